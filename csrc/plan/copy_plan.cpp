#include "plan/copy_plan.h"

#include <numeric>

namespace kvio {
namespace {

// Where a slot lies, and how many slots from it on stay in its page. Pages of 2^n slots need no division.
class SlotLocator {
 public:
  explicit SlotLocator(const PoolView& view)
      : page_slots_(view.page_slots),
        page_stride_(view.page_stride),
        token_stride_(view.token_stride),
        flat_(view.is_flat()) {
    if ((page_slots_ & (page_slots_ - 1)) == 0) shift_ = __builtin_ctzll(static_cast<uint64_t>(page_slots_));
  }

  void locate(int64_t slot, int64_t* offset, int64_t* room) const {
    if (flat_) {
      *offset = slot * token_stride_;
      *room = INT64_MAX;
      return;
    }
    const int64_t page = shift_ >= 0 ? slot >> shift_ : slot / page_slots_;
    const int64_t inside = slot - page * page_slots_;
    *offset = page * page_stride_ + inside * token_stride_;
    *room = page_slots_ - inside;
  }

 private:
  int64_t page_slots_;
  int64_t page_stride_;
  int64_t token_stride_;
  bool flat_;
  int shift_ = -1;
};

// As plan/runs.h finds runs, but rows need not be packed, pages are looked up once a stretch and the index width is
// known to the compiler: 1.7 ns an index in runs of 64 tokens, where that one takes 4 to 5.
template <class Index>
std::vector<Stretch> stretches_of(const TransferRequest& request, const BufferGroup& group) {
  const Index* dst = static_cast<const Index*>(request.dst_indices.data);
  const Index* src = static_cast<const Index*>(request.src_indices.data);
  const SlotLocator dst_locator(group.dst);
  const SlotLocator src_locator(group.src);
  const int64_t per_index = request.slots_per_index;
  std::vector<Stretch> stretches;
  Stretch current{0, 0, 0};
  int64_t next_dst = 0;  // the slot that would extend `current`
  int64_t next_src = 0;
  int64_t room = 0;  // slots it may still grow by
  for (int64_t i = 0; i < request.num_indices; ++i) {
    int64_t dst_slot = static_cast<int64_t>(dst[i * request.dst_indices.stride]) * per_index;
    int64_t src_slot = static_cast<int64_t>(src[i * request.src_indices.stride]) * per_index;
    for (int64_t left = per_index; left > 0;) {
      if (room == 0 || dst_slot != next_dst || src_slot != next_src) {
        if (current.num_slots > 0) stretches.push_back(current);
        int64_t src_room = 0;
        dst_locator.locate(dst_slot, &current.dst_offset, &room);
        src_locator.locate(src_slot, &current.src_offset, &src_room);
        room = std::min(room, src_room);
        current.num_slots = 0;
      }
      const int64_t take = std::min(left, room);
      current.num_slots += take;
      room -= take;
      left -= take;
      next_dst = dst_slot += take;
      next_src = src_slot += take;
    }
  }
  if (current.num_slots > 0) stretches.push_back(current);
  return stretches;
}

// Buffers that one nest walks: `count` of them, `stride` bytes apart on both sides.
struct Chain {
  size_t first;
  int64_t count;
  int64_t stride;
};

// Bytes from buffer `a` to buffer `b`, the same on both sides and less than a buffer spans; 0 when that is not so.
int64_t common_stride(const BufferGroup& group, size_t a, size_t b) {
  const int64_t stride = group.dst_base[b] - group.dst_base[a];
  const bool inside = stride > 0 && stride < group.dst_extent && stride < group.src_extent;
  return inside && group.src_base[b] - group.src_base[a] == stride ? stride : 0;
}

std::vector<Chain> chain_buffers(const BufferGroup& group) {
  std::vector<size_t> order(group.dst_base.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto lower = [&](size_t a, size_t b) { return group.dst_base[a] < group.dst_base[b]; };
  if (!std::is_sorted(order.begin(), order.end(), lower)) std::sort(order.begin(), order.end(), lower);

  std::vector<Chain> chains;
  for (size_t i = 0; i < order.size();) {
    Chain chain{order[i], 1, i + 1 < order.size() ? common_stride(group, order[i], order[i + 1]) : 0};
    for (++i; chain.stride > 0 && i < order.size(); ++i) {
      if (common_stride(group, order[i - 1], order[i]) != chain.stride) break;
      ++chain.count;
    }
    chains.push_back(chain);
  }
  return chains;
}

CopyNest make_nest(const BufferGroup& group, const Chain& chain) {
  constexpr int64_t kSlots = -1;  // in place of a count that each stretch has of its own
  CopyNest::Dim dims[3] = {{kSlots, group.dst.token_stride, group.src.token_stride}};
  int num_dims = 1;
  if (group.dst.num_pieces > 1) {
    dims[num_dims++] = {group.dst.num_pieces, group.dst.piece_stride, group.src.piece_stride};
  }
  if (chain.count > 1) dims[num_dims++] = {chain.count, chain.stride, chain.stride};
  std::sort(dims, dims + num_dims, [](const CopyNest::Dim& a, const CopyNest::Dim& b) {
    return a.dst_stride != b.dst_stride ? a.dst_stride < b.dst_stride : a.src_stride < b.src_stride;
  });

  CopyNest nest;
  nest.dst = group.dst_base[chain.first];
  nest.src = group.src_base[chain.first];
  nest.block_bytes = group.dst.piece_bytes;
  int innermost = 0;
  for (; innermost < num_dims && !nest.slots_in_block; ++innermost) {
    const CopyNest::Dim& dim = dims[innermost];
    if (dim.dst_stride != nest.block_bytes || dim.src_stride != nest.block_bytes) break;
    if (dim.count == kSlots) {
      nest.slots_in_block = true;
    } else {
      nest.block_bytes *= dim.count;
    }
  }
  for (int at = 2; innermost < num_dims; ++innermost, --at) {
    nest.dims[at] = dims[innermost];
    if (dims[innermost].count == kSlots) nest.slot_dim = at;
  }
  return nest;
}

}  // namespace

std::vector<Stretch> find_stretches(const TransferRequest& request, const BufferGroup& group) {
  return request.dst_indices.is_int64 ? stretches_of<int64_t>(request, group) : stretches_of<int32_t>(request, group);
}

std::vector<CopyNest> make_copy_nests(const BufferGroup& group) {
  std::vector<CopyNest> nests;
  nests.reserve(group.dst_base.size());
  for (const Chain& chain : chain_buffers(group)) nests.push_back(make_nest(group, chain));
  return nests;
}

int64_t next_batch_entries(int64_t previous, const BatchPolicy& policy) {
  const int64_t most = std::clamp<int64_t>(policy.most, 1, kMaxBatchEntries);
  if (previous == 0) return std::clamp<int64_t>(policy.first, 1, most);
  return std::min(most, previous + (previous * policy.growth_percent + 99) / 100);
}

std::vector<int64_t> cut_into_batches(int64_t entries, const BatchPolicy& policy) {
  std::vector<int64_t> batches;
  int64_t size = 0;
  while (entries > 0) {
    size = next_batch_entries(size, policy);
    batches.push_back(std::min(size, entries));
    entries -= batches.back();
  }
  return batches;
}

CopyEngineRoute copy_engine_route(const GpuFacts& gpu, bool alias_differs) {
  const auto one_by_one = [](const char* why) { return CopyEngineRoute{false, false, why}; };
  if (gpu.capturing) return one_by_one("the stream is being captured, where the driver refuses batches");
  if (!gpu.has_batch_call) return one_by_one("the driver has no batched copy; it needs CUDA 12.8 or later");
  if (alias_differs) return one_by_one("the GPU knows the host memory under another address");
  return {true, gpu.legacy_stream, nullptr};
}

CopyEngineRoute copy_engine_route(const TransferRequest&, const GpuFacts& gpu, bool alias_differs) {
  return copy_engine_route(gpu, alias_differs);
}

std::string describe(const CopyEngineRoute& route) {
  if (!route.batched) return std::string("copies: one asynchronous copy an entry, because ") + route.why_not_batched;
  return route.forked ? "copies: batched, on a stream forked from the legacy default stream and joined to it"
                      : "copies: batched, on the caller's stream";
}

}  // namespace kvio
