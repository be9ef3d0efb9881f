// The one table that a backend choice rests on: what each GPU backend moves, by direction, shape and length of a run.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/backend.h"

namespace kvio {

constexpr int kNumRateDirections = 2;  // host to device, device to host
constexpr int kNumRateShapes = 2;      // rows of a page follow each other on the host, or lie apart there
constexpr int kNumRateBuckets = 14;
constexpr int64_t kShortestRunBytes = 512;  // of bucket 0; each bucket doubles it, up to 4 MiB
constexpr int64_t kNumRates = int64_t{kNumGpuBackends} * kNumRateDirections * kNumRateShapes * kNumRateBuckets;

// GB/s of payload in a flow of large calls, 0 where a backend cannot serve. Backends: register, tma, copy_engine. A run
// of the shape "rows apart" is one row (or one piece of it), and rows come in pages.
struct RateTable {
  double gbps[kNumGpuBackends][kNumRateDirections][kNumRateShapes][kNumRateBuckets];
  bool built_in;
};

const RateTable& built_in_rates();

// The table that choices use now. The reference stays valid for the life of the process.
const RateTable& current_rates();

// Makes `rates` the current table, flat in the order of RateTable; an empty list restores the built-in one. Safe beside
// calls of other threads. Throws when the number of rates is wrong, or one is negative or not finite.
void set_rates(const char* op, const std::vector<double>& rates);

// Between two buckets the rate is interpolated; a run shorter than the first moves at its number of runs a second.
double rate_of(const RateTable& table, Backend backend, Direction direction, bool rows_apart, double run_bytes);

// The best rate that the table has in one direction: what long runs reach.
double link_rate(const RateTable& table, Direction direction);

}  // namespace kvio
