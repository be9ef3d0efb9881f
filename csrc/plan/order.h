// Order of scattered rows by host address. Pure host code.
//
// Rows that are on their way at the same time should lie close together in host memory: over a pool of 4 GiB, 512-byte
// rows in random order reach 20 GB/s and in host-address order 48, because a GPU translates only about 1 GiB of host
// addresses without a miss. Any order of a call's index pairs is legal, so the GPU permutes them before a kernel reads
// them: some 40 us for 131,072 pairs, where one pass on the CPU takes 1 to 2 ms, which the copying would wait for.
#pragma once

#include <cstdint>

#include "request/request.h"

namespace kvio {

struct OrderPolicy {
  int64_t span_bytes = int64_t{1} << 30;  // of host memory that the rows are spread over: below it nothing is lost
  int64_t run_bytes = 4096;               // longer runs hide translation by themselves (64 KiB runs lose nothing)
  int64_t indices = 4096;                 // fewer rows stay far apart however they are ordered
  int64_t sweeps = 2;                     // times the pool's length that host addresses travel in the order given
  int64_t unseen_span_bytes = int64_t{2} << 30;  // of a host buffer, for indices that only the GPU knows
  int64_t unseen_payload_bytes = 32 << 20;       // 640 us at link speed
};

// Ordering is one pass of a counting sort over the highest bits that the pool's indices use. The windows that it leaves
// unordered are 1/1024 of the pool at most, far below what translation holds.
constexpr int kOrderBucketBits = 11;
constexpr int kOrderBuckets = 1 << kOrderBucketBits;

// Bits that an index below `limit` is shifted by to give its bucket.
int order_shift(int64_t limit);

// Whether ordering the pairs of `request`, whose indices are on the CPU and checked, will repay itself: always false
// without a host pool on exactly one side.
bool worth_ordering(const TransferRequest& request, const OrderPolicy& policy = OrderPolicy());

// The same where the indices are on the GPU, so that neither their runs nor their order can be seen: only large calls
// without a promise of runs, for which ordering costs little (some 40 us) even where it gains nothing.
bool worth_ordering_unseen(const TransferRequest& request, const OrderPolicy& policy = OrderPolicy());

}  // namespace kvio
