#include "plan/run_stats.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "plan/copy_plan.h"
#include "plan/runs.h"

namespace kvio {
namespace {

constexpr int64_t kNoPages = 0;  // index steps never cross a page
constexpr int64_t kIrregular = -1;

// A side's pages in units of one index: after how many indices a page ends (1: with every index).
int64_t indices_per_page(const PoolView& view, int64_t slots_per_index) {
  if (view.is_flat()) return kNoPages;
  if (slots_per_index % view.page_slots == 0) return 1;
  return view.page_slots % slots_per_index == 0 ? view.page_slots / slots_per_index : kIrregular;
}

bool is_mask(int64_t count) { return (count & (count - 1)) == 0; }

// 1 for any value but 0, by arithmetic: 64-bit comparisons do not vectorize on every x86-64.
template <class Index>
std::make_unsigned_t<Index> is_set(Index value) {
  const auto bits = static_cast<std::make_unsigned_t<Index>>(value);
  return static_cast<std::make_unsigned_t<Index>>((bits | (0 - bits)) >> (sizeof(Index) * 8 - 1));
}

// Branch-free, so that it vectorizes. A mask of all ones never ends a page: entry 0 follows nothing.
template <class Index>
int64_t count_steps(const Index* dst, const Index* src, int64_t count, Index dst_mask, Index src_mask) {
  constexpr int64_t kBlock = int64_t{1} << 20;  // the counter is as narrow as an index
  int64_t breaks = 0;
  for (int64_t begin = 1; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    std::make_unsigned_t<Index> here = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Index off = (dst[i] - dst[i - 1] - 1) | (src[i] - src[i - 1] - 1);
      here += is_set<Index>(off) | (1 ^ (is_set<Index>(dst[i] & dst_mask) & is_set<Index>(src[i] & src_mask)));
    }
    breaks += static_cast<int64_t>(here);
  }
  return breaks;
}

template <class Index>
int64_t count_steps(const TransferRequest& request, int64_t dst_pages, int64_t src_pages) {
  const auto mask = [](int64_t pages) { return static_cast<Index>(pages == kNoPages ? -1 : pages - 1); };
  return count_steps(static_cast<const Index*>(request.dst_indices.data),
                     static_cast<const Index*>(request.src_indices.data), request.num_indices, mask(dst_pages),
                     mask(src_pages));
}

// Any stride, any number of slots a page.
int64_t count_steps_one_by_one(const TransferRequest& request, int64_t dst_pages, int64_t src_pages) {
  const auto continues = [](const IndexList& list, int64_t i, int64_t pages) {
    const int64_t at = list.at(i);
    return at == list.at(i - 1) + 1 && (pages == kNoPages || at % pages != 0);
  };
  int64_t breaks = 0;
  for (int64_t i = 1; i < request.num_indices; ++i) {
    breaks += !(continues(request.dst_indices, i, dst_pages) && continues(request.src_indices, i, src_pages));
  }
  return breaks;
}

// Index positions that do not continue the one before.
int64_t count_breaks(const TransferRequest& request, int64_t dst_pages, int64_t src_pages) {
  const bool dense = request.dst_indices.stride == 1 && request.src_indices.stride == 1;
  if (!dense || !is_mask(dst_pages) || !is_mask(src_pages)) {
    return count_steps_one_by_one(request, dst_pages, src_pages);
  }
  return request.dst_indices.is_int64 ? count_steps<int64_t>(request, dst_pages, src_pages)
                                      : count_steps<int32_t>(request, dst_pages, src_pages);
}

bool packed(const BufferGroup& group) { return group.dst.packed() && group.src.packed(); }

// Stretches of one buffer.
int64_t count_stretches(const TransferRequest& request, const BufferGroup& group) {
  const int64_t per_index = request.slots_per_index;
  const int64_t dst_pages = indices_per_page(group.dst, per_index);
  const int64_t src_pages = indices_per_page(group.src, per_index);
  const int64_t shorter = std::min(group.dst.is_flat() ? per_index : group.dst.page_slots,
                                   group.src.is_flat() ? per_index : group.src.page_slots);
  const auto divided = [&](const PoolView& view) { return view.is_flat() || view.page_slots % shorter == 0; };
  const bool nested = shorter >= per_index || (divided(group.dst) && divided(group.src));
  if (dst_pages == kIrregular || src_pages == kIrregular || !nested) {
    if (!packed(group)) return request.num_indices;
    int64_t runs = 0;
    for_each_run(request, group, 0, request.num_indices, [&](const Run&) { ++runs; });
    return runs;
  }
  if (dst_pages == 1 || src_pages == 1) return request.num_indices * (per_index / std::min(per_index, shorter));
  return 1 + count_breaks(request, dst_pages, src_pages);
}

// How many buffers continue another one on both sides, page by page, when every run is a whole page.
int64_t count_joined_buffers(const BufferGroup& group) {
  const int64_t page_bytes = group.dst.page_slots * group.dst.piece_bytes;
  std::vector<std::pair<const char*, const char*>> bases;
  bases.reserve(group.dst_base.size());
  for (size_t b = 0; b < group.dst_base.size(); ++b) bases.emplace_back(group.dst_base[b], group.src_base[b]);
  std::sort(bases.begin(), bases.end());
  int64_t joined = 0;
  for (size_t b = 1; b < bases.size(); ++b) {
    joined += bases[b].first - bases[b - 1].first == page_bytes && bases[b].second - bases[b - 1].second == page_bytes;
  }
  return joined;
}

// Both pools have pages of one size, apart from each other, and the request moves nothing but whole ones.
bool moves_whole_pages(const TransferRequest& request, const BufferGroup& group, int64_t stretches) {
  if (group.dst.is_flat() || group.dst.page_slots != group.src.page_slots) return false;
  return stretches * group.dst.page_slots == request.num_indices * request.slots_per_index;
}

// Driver copies where rows are apart in each buffer: one a row or piece of it, but buffers that lie between each other
// on both sides alike (layers of two token-major pools, K beside V) close the gaps.
int64_t count_blocks(const BufferGroup& group, int64_t slots, int64_t stretches) {
  int64_t blocks = 0;
  for (const CopyNest& nest : make_copy_nests(group)) {
    int64_t of_nest = nest.slots_in_block ? stretches : slots;
    for (int d = 0; d < 3; ++d) of_nest *= d == nest.slot_dim ? 1 : nest.dims[d].count;
    blocks += of_nest;
  }
  return blocks;
}

}  // namespace

RunStats count_runs(const TransferRequest& request) {
  RunStats stats;
  if (request.num_indices == 0) return stats;
  const int64_t slots = request.num_indices * request.slots_per_index;
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
    const int64_t stretches = count_stretches(request, group);
    stats.stretches += stretches * buffers;
    if (!packed(group)) {
      stats.runs += count_blocks(group, slots, stretches);
    } else if (buffers > 1 && moves_whole_pages(request, group, stretches)) {
      stats.runs += stretches * (buffers - count_joined_buffers(group));
    } else {
      stats.runs += stretches * buffers;
    }
  }
  return stats;
}

RunStats promised_runs(const TransferRequest& request) {
  RunStats stats;
  const int64_t slots = request.num_indices * request.slots_per_index;
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
    int64_t together = request.page_size;
    for (const PoolView* view : {&group.dst, &group.src}) {
      if (!view->is_flat()) together = std::min(together, view->page_slots);
    }
    const int64_t stretches = (slots + together - 1) / together;
    stats.stretches += stretches * buffers;
    stats.runs += packed(group) ? stretches * buffers : slots * group.dst.num_pieces * buffers;
  }
  return stats;
}

}  // namespace kvio
