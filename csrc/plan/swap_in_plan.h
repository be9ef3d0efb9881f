// What a swap-in does to one request, decided before anything is written: a pure function of a request on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "request/swap_in_request.h"

namespace kvio {

// A selected token that is not on the device yet, and the slot of the hot buffer that it takes.
struct Miss {
  int32_t token;
  int32_t slot;
  int32_t device_loc;
  int64_t host_loc;
};

struct SwapInRow {
  std::vector<int32_t> locs;   // device location of each top-k entry, -1 for none
  std::vector<Miss> misses;    // in the order of their first entries
  std::vector<int16_t> order;  // the slots from the least to the most recently used; empty: as they were
};

// Throws unless the first `num_rows` rows of the batch name requests that exist and lengths that can be, and work on
// hot buffers of their own.
void check_batch(const SwapInRequest& request, int64_t num_rows);

// Row `b` of the batch, a real one that check_batch has passed. Throws on a value that names nothing: a token, a
// location that would be read, written or given out, a slot.
SwapInRow resolve_row(const SwapInRequest& request, int64_t b);

// The moves of a plan on the CPU: locations of the first `num_rows` rows, one list a side.
struct PlannedMoves {
  std::vector<int64_t> device_locs;
  std::vector<int64_t> host_locs;
};

// Throws on a count or a location that cannot be.
PlannedMoves planned_moves(const CopyPlannedRequest& request, int64_t num_rows);

}  // namespace kvio
