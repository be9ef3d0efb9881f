#include "request/buffer_list.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"

namespace kvio {
namespace {

bool same_layout(const TensorView& a, const TensorView& b) {
  const size_t bytes = static_cast<size_t>(a.ndim) * sizeof(int64_t);
  return a.ndim == b.ndim && a.dtype == b.dtype && std::memcmp(a.sizes, b.sizes, bytes) == 0 &&
         std::memcmp(a.strides, b.strides, bytes) == 0;
}

void check_pair(const char* op, const SideNames& names, size_t i, const TensorView& dst, const TensorView& src,
                int64_t row_ndim, DtypeName dtype_name) {
  if (dst.dtype != src.dtype) {
    fail(op, names.src, "[", i, "] has dtype ", dtype_name(src.dtype), " but ", names.dst, "[", i, "] has ",
         dtype_name(dst.dtype), "; it needs the same dtype");
  }
  if (dst.ndim < row_ndim || src.ndim < row_ndim) return;  // make_pool_view words it better
  const int64_t* dst_row = dst.sizes + (dst.ndim - row_ndim);
  const int64_t* src_row = src.sizes + (src.ndim - row_ndim);
  if (!std::equal(dst_row, dst_row + row_ndim, src_row)) {
    fail(op, names.src, "[", i, "] has rows of shape ", shape_text(src_row, row_ndim), " but ", names.dst, "[", i,
         "] has ", shape_text(dst_row, row_ndim), "; it needs the same row shape (row_ndim=", row_ndim, ")");
  }
}

}  // namespace

SlotLimit slot_limit(const std::vector<BufferGroup>& groups, PoolView BufferGroup::* side) {
  SlotLimit limit;
  for (const BufferGroup& g : groups) {
    const int64_t slots = (g.*side).slots;
    if (slots < limit.slots) limit = {slots, g.position[0]};
  }
  return limit;
}

std::vector<BufferGroup> group_buffers(const char* op, const SideNames& names, const std::vector<TensorView>& dst,
                                       const std::vector<TensorView>& src, int64_t row_ndim, DtypeName dtype_name) {
  std::vector<BufferGroup> groups;
  // Buffers of one pool look alike: each is compared with the previous one before its geometry is worked out anew.
  std::vector<size_t> example;  // per group, the pair it was made from
  for (size_t i = 0; i < dst.size(); ++i) {
    size_t g = 0;
    while (g < example.size() && !(same_layout(dst[example[g]], dst[i]) && same_layout(src[example[g]], src[i]))) {
      ++g;
    }
    if (g == example.size()) {
      check_pair(op, names, i, dst[i], src[i], row_ndim, dtype_name);
      check_not_expanded(op, names.dst, i, dst[i]);
      BufferGroup group;
      group.dst = make_pool_view(op, names.dst, static_cast<int64_t>(i), dst[i], row_ndim);
      group.src = make_pool_view(op, names.src, static_cast<int64_t>(i), src[i], row_ndim);
      align_pieces(op, names, static_cast<int64_t>(i), &group.dst, &group.src);
      group.dst_extent = extent_bytes(dst[i]);
      group.src_extent = extent_bytes(src[i]);
      group.dst_base.reserve(dst.size() - i);
      group.src_base.reserve(dst.size() - i);
      group.position.reserve(dst.size() - i);
      groups.push_back(std::move(group));
      example.push_back(i);
    }
    groups[g].dst_base.push_back(dst[i].data);
    groups[g].src_base.push_back(src[i].data);
    groups[g].position.push_back(static_cast<int64_t>(i));
  }
  return groups;
}

void check_countable(const char* op, const SideNames& names, const std::vector<BufferGroup>& groups) {
  const auto check = [&](const char* argument, const BufferGroup& group, const PoolView& view) {
    if (!view.is_flat() && view.slots > 2 * kMaxCount) {
      fail(op, argument, "[", group.position[0], "] has ", view.slots,
           " token slots in pages apart from each other; it needs at most ", 2 * kMaxCount,
           ", or pages that follow each other");
    }
    if (view.piece_bytes > kMaxPieceBytes) {
      fail(op, argument, "[", group.position[0], "] has rows of ", view.piece_bytes,
           " contiguous bytes; it needs at most ", kMaxPieceBytes);
    }
  };
  for (const BufferGroup& group : groups) {
    if (group.dst.row_bytes() == 0) continue;
    check(names.dst, group, group.dst);
    check(names.src, group, group.src);
  }
}

void check_one_device(const char* op, const char* argument, const std::vector<TensorView>& list) {
  const TensorView& first = list[0];
  for (size_t i = 0; i < list.size(); ++i) {
    const TensorView& t = list[i];
    if (t.device == DeviceKind::kOther) {
      fail(op, argument, "[", i, "] is on a device of another kind; it needs a CPU or a GPU tensor");
    }
    if (t.device != first.device || t.device_index != first.device_index) {
      fail(op, argument, "[", i, "] is on ", device_name(t.device, t.device_index), " but ", argument, "[0] is on ",
           device_name(first.device, first.device_index), "; it needs every tensor of ", argument, " on one device");
    }
    check_has_storage(op, argument, static_cast<int64_t>(i), t);
  }
}

void check_has_storage(const char* op, const char* argument, int64_t position, const TensorView& t) {
  const int64_t extent = extent_bytes(t);
  // A view without a byte may begin anywhere, also behind its storage.
  if (extent == 0 || extent <= t.storage_bytes) return;
  const std::string item = position < 0 ? "" : "[" + std::to_string(position) + "]";
  fail(op, argument, item, " spans ", extent, " bytes but its storage has ", t.storage_bytes,
       " from there on; it needs a storage that was not resized");
}

void check_not_expanded(const char* op, const char* argument, size_t i, const TensorView& dst) {
  if (is_empty(dst)) return;
  for (int64_t d = 0; d < dst.ndim; ++d) {
    if (dst.strides[d] == 0 && dst.sizes[d] > 1) {
      fail(op, argument, "[", i, "] has stride 0 in dimension ", d, " of size ", dst.sizes[d],
           "; it needs memory of its own for every element (no expanded tensor)");
    }
  }
}

void check_row_ndim(const char* op, int64_t row_ndim) {
  if (row_ndim < 0 || row_ndim > 62) fail(op, "row_ndim is ", row_ndim, "; it needs 0 to 62");
}

void check_num_blocks(const char* op, int64_t num_blocks) {
  if (num_blocks < 0 || num_blocks > 65535) {
    fail(op, "num_blocks is ", num_blocks, "; it needs 0 (chosen for you) to 65535");
  }
}

}  // namespace kvio
