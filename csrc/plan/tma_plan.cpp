#include "plan/tma_plan.h"

#include <algorithm>

#include "plan/copy_width.h"
#include "plan/units.h"

namespace kvio {
namespace {

constexpr int64_t kBulkBytes = 16;  // alignment and granule of a bulk copy
constexpr int64_t kBoxBytes = 128;  // alignment of a box in shared memory
constexpr int64_t kBoxDim = 256;    // largest dim of a box, elements of 8 bytes or rows
constexpr int64_t kMaxStride = int64_t{1} << 40;
constexpr int64_t kMaxBoxSlots = int64_t{1} << 31;  // a coordinate is a signed number of 32 bits

// Fewest equal parts of at most `most` bytes that `bytes` can be cut into, each a multiple of 16; 0 when there are none
// of a useful length.
int64_t equal_parts(int64_t bytes, int64_t most) {
  const int64_t packages = bytes / kBulkBytes;
  const int64_t fewest = (bytes + most - 1) / most;
  for (int64_t parts = fewest; parts <= 4 * fewest; ++parts) {
    if (packages % parts == 0) return parts;
  }
  return 0;
}

// Joins whole pages where the result can be cut into chunks, and cuts units that are longer than one. False when a unit
// cannot be cut.
bool shape_units(TmaPlan* plan, const TmaPolicy& policy) {
  PoolView dst = plan->dst;
  PoolView src = plan->src;
  int64_t slots_per_index = plan->slots_per_index;
  join_pages(&dst, &src, &slots_per_index);
  const int64_t joined = dst.piece_bytes;
  if (joined <= policy.max_chunk_bytes || (dst.num_pieces == 1 && equal_parts(joined, policy.max_chunk_bytes) > 0)) {
    plan->dst = dst;
    plan->src = src;
    plan->slots_per_index = slots_per_index;
  }
  const int64_t piece = plan->dst.piece_bytes;
  if (piece <= policy.max_chunk_bytes) return true;
  const int64_t parts = plan->dst.num_pieces == 1 ? equal_parts(piece, policy.max_chunk_bytes) : 0;
  if (parts == 0) return false;
  cut_piece(&plan->dst, &plan->src, parts);
  return true;
}

// Units of a chunk when `run` units are expected to follow each other: whole runs, or an equal part of one.
int64_t chunk_units(int64_t run, int64_t unit_bytes, const TmaPolicy& policy) {
  const int64_t most = std::min(policy.max_units_per_chunk, std::max<int64_t>(1, policy.max_chunk_bytes / unit_bytes));
  const int64_t aim = std::min(policy.max_units_per_chunk, std::max<int64_t>(1, policy.chunk_bytes / unit_bytes));
  if (run <= 1) return aim;
  if (run <= most) return std::max<int64_t>(1, aim / run) * run;
  int64_t part = most;
  while (part > 1 && run % part != 0) --part;
  return part * 2 >= aim ? part : aim;
}

bool strides_fit_boxes(const PoolView& v) {
  const auto fits = [](int64_t stride) { return stride > 0 && stride < kMaxStride; };
  return fits(v.token_stride) && fits(v.page_stride) && (v.num_pieces == 1 || fits(v.piece_stride));
}

// Rows of a page follow each other, cut into pieces or not: a run of them is one bulk copy.
bool rows_touch(const PoolView& v) {
  return v.token_stride == v.row_bytes() && (v.num_pieces == 1 || v.piece_stride == v.piece_bytes);
}

// Tokens of a box: the largest part of a promised run whose rows fit a chunk; 0 when boxes do not fit the source.
int64_t box_tokens(const TmaPlan& plan, int64_t promised_tokens, const TmaPolicy& policy) {
  const PoolView& src = plan.src;
  const int64_t row = src.row_bytes();
  if (rows_touch(src) || promised_tokens < 2 || !strides_fit_boxes(src) || src.slots > kMaxBoxSlots) return 0;
  if (src.piece_bytes / 8 > kBoxDim || src.num_pieces > kBoxDim) return 0;
  const int64_t most =
      std::min({policy.max_chunk_bytes / row, policy.max_units_per_chunk / src.num_pieces, kBoxDim, promised_tokens});
  for (int64_t tokens = most; tokens >= 2; --tokens) {
    const bool whole = promised_tokens % tokens == 0 && (src.is_flat() || src.page_slots % tokens == 0);
    if (whole && tokens * row % kBoxBytes == 0) return tokens;
  }
  return 0;
}

}  // namespace

const char* tma_refusal(const TransferRequest& request) {
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0) continue;
    if (group.dst.piece_bytes % kBulkBytes != 0)
      return "rows or their pieces are no multiple of 16 bytes; it needs such as are";
    if (address_alignment(group.dst, group.src, address_bits(group)) < kBulkBytes) {
      return "an address or a stride is no multiple of 16 bytes; it needs all of them to be";
    }
    TmaPlan plan;
    plan.dst = group.dst;
    plan.src = group.src;
    plan.slots_per_index = request.slots_per_index;
    if (!shape_units(&plan, TmaPolicy()))
      return "rows have no equal parts of 36 KiB at most; it needs rows that can be cut so";
  }
  return nullptr;
}

TmaPlan make_tma_plan(const TransferRequest& request, const BufferGroup& group, int64_t range, bool with_boxes,
                      const TmaPolicy& policy) {
  TmaPlan plan;
  plan.dst = group.dst;
  plan.src = group.src;
  plan.slots_per_index = request.slots_per_index;
  shape_units(&plan, policy);
  const int64_t pieces = plan.dst.num_pieces;
  plan.unit_bytes = plan.dst.piece_bytes;
  plan.units = range * plan.slots_per_index * pieces;
  plan.buffers_innermost = buffers_share_pages(group);

  const bool joined = plan.slots_per_index != request.slots_per_index;
  const int64_t promised_tokens = joined ? 1 : request.page_size;
  if (with_boxes) plan.box_tokens = box_tokens(plan, promised_tokens, policy);
  const int64_t wanted_blocks =
      request.num_blocks > 0 ? request.num_blocks : (plan.box_tokens > 0 ? policy.blocks_boxes : policy.blocks);
  const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
  const auto chunks = [&](int64_t units_per_chunk) {
    return (plan.units + units_per_chunk - 1) / units_per_chunk * buffers;
  };
  if (plan.box_tokens > 0) {
    plan.units_per_chunk = plan.box_tokens * pieces;
  } else {
    plan.units_per_chunk = chunk_units(promised_tokens * pieces, plan.unit_bytes, policy);
    while (plan.units_per_chunk % 2 == 0 && chunks(plan.units_per_chunk) < 2 * wanted_blocks &&
           plan.units_per_chunk / 2 * plan.unit_bytes >= policy.min_chunk_bytes) {
      plan.units_per_chunk /= 2;
    }
  }
  plan.chunks = chunks(plan.units_per_chunk);
  plan.num_blocks = std::max<int64_t>(1, std::min(wanted_blocks, plan.chunks));

  const int64_t rows = plan.units_per_chunk * plan.unit_bytes;
  plan.stage_bytes = (rows + kBoxBytes - 1) / kBoxBytes * kBoxBytes;
  const int64_t fit = policy.shared_bytes / (plan.stage_bytes + tma_stage_overhead(plan.units_per_chunk));
  plan.stages = std::min(policy.max_stages, fit);
  plan.loaders = std::min(kTmaMaxLoaders, plan.stages);
  plan.store_warps = request.dst_device == DeviceKind::kCpu ? policy.store_warps_to_host : policy.store_warps_to_device;
  return plan;
}

}  // namespace kvio
