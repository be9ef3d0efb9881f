// Runs: index positions whose slots are consecutive on both sides and whose rows follow each other in memory on both
// sides, so that one copy serves them all.
#pragma once

#include <algorithm>
#include <cstdint>

#include "request/request.h"

namespace kvio {

struct Run {
  int64_t dst_slot;
  int64_t src_slot;
  int64_t num_slots;
};

// Slots that follow `slot` without a gap in memory, itself included, capped at `wanted`.
inline int64_t gapless_slots(const PoolView& view, int64_t slot, int64_t wanted) {
  if (!view.packed()) return 1;
  if (view.is_flat()) return wanted;
  return std::min(wanted, view.page_slots - slot % view.page_slots);
}

// Calls visit(Run) for the index positions [begin, end), in order. Every position is covered once; runs are maximal
// inside the range. Correct for any order of indices: only steps of exactly +1 on both sides are merged.
template <class Visit>
void for_each_run(const TransferRequest& request, const BufferGroup& group, int64_t begin, int64_t end, Visit visit) {
  const int64_t per_index = request.slots_per_index;
  Run pending{0, 0, 0};
  for (int64_t i = begin; i < end; ++i) {
    int64_t dst_slot = request.dst_indices.at(i) * per_index;
    int64_t src_slot = request.src_indices.at(i) * per_index;
    int64_t left = per_index;
    while (left > 0) {
      const int64_t take = std::min(gapless_slots(group.dst, dst_slot, left), gapless_slots(group.src, src_slot, left));
      const int64_t last = pending.num_slots - 1;
      const bool extends = pending.num_slots > 0 && dst_slot == pending.dst_slot + pending.num_slots &&
                           src_slot == pending.src_slot + pending.num_slots &&
                           gapless_slots(group.dst, pending.dst_slot + last, 2) == 2 &&
                           gapless_slots(group.src, pending.src_slot + last, 2) == 2;
      if (extends) {
        pending.num_slots += take;
      } else {
        if (pending.num_slots > 0) visit(pending);
        pending = {dst_slot, src_slot, take};
      }
      dst_slot += take;
      src_slot += take;
      left -= take;
    }
  }
  if (pending.num_slots > 0) visit(pending);
}

}  // namespace kvio
