// How the tma backend cuts a buffer group into chunks, and which rows it can serve. Pure host code.
#pragma once

#include <cstdint>

#include "request/request.h"

namespace kvio {

constexpr int64_t kTmaMaxLoaders = 4;  // warps
constexpr int64_t kTmaMaxStoreWarps = 12;

// Tunables, measured on an H200. One CTA keeps its whole ring in flight: at 1.3 us and more a load from host memory
// that is what 44 GB/s from one CTA takes.
struct TmaPolicy {
  int64_t chunk_bytes = 32 << 10;        // aimed at: one op of this size costs the copy unit least
  int64_t max_chunk_bytes = 36 << 10;    // taken when whole pages fit only so (64 rows of 576 bytes)
  int64_t min_chunk_bytes = 8 << 10;     // small calls are cut down to this, so that every CTA has some
  int64_t max_units_per_chunk = 256;     // lanes work out at most eight units each
  int64_t shared_bytes = 232448 - 1024;  // a CTA's on sm_90 and later, less what the kernel has of its own
  int64_t max_stages = 24;
  int64_t store_warps_to_device = 8;
  int64_t store_warps_to_host = 8;
  int64_t blocks = 2;        // fill a link with runs of 8 KiB and more
  int64_t blocks_boxes = 3;  // with boxes of a pool whose rows are apart
};

// A unit is one piece of one slot; a chunk is up to `units_per_chunk` consecutive units of one buffer.
struct TmaPlan {
  PoolView dst;
  PoolView src;
  int64_t slots_per_index = 1;
  int64_t unit_bytes = 0;
  int64_t units = 0;  // of one buffer
  int64_t units_per_chunk = 1;
  int64_t chunks = 0;  // of all buffers
  // Tokens of one tensor-map box, 0 for none. Boxes serve sources whose rows are apart: a chunk is then one box.
  int64_t box_tokens = 0;
  int64_t stage_bytes = 0;
  int64_t stages = 0;
  int64_t loaders = 1;  // warps, no more than stages
  int64_t store_warps = 8;
  int64_t num_blocks = 1;
  bool buffers_innermost = false;
};

// Why bulk copies cannot move the rows of `request`, null when they can.
const char* tma_refusal(const TransferRequest& request);

// `range` is the number of index positions this launch serves. `with_boxes`: the driver can encode tensor maps. Only
// for requests that tma_refusal accepts.
TmaPlan make_tma_plan(const TransferRequest& request, const BufferGroup& group, int64_t range, bool with_boxes,
                      const TmaPolicy& policy = TmaPolicy());

// Bytes of shared memory that one stage of the ring takes besides its rows.
constexpr int64_t tma_stage_overhead(int64_t units_per_chunk) { return units_per_chunk * 8 + 32; }

}  // namespace kvio
