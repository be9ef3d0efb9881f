#include "request/pool_view.h"

#include "error.h"

namespace kvio {
namespace {

struct Dim {
  int64_t size;
  int64_t stride;  // elements
};

// Folds dims of size 1 away and merges an outer dim into its inner neighbour where one stride describes both.
int collapse(const TensorView& tensor, int64_t first, Dim* out, int capacity) {
  int count = 0;
  for (int64_t i = first; i < tensor.ndim; ++i) {
    const Dim dim{tensor.sizes[i], tensor.strides[i]};
    if (dim.size == 1) continue;
    if (count > 0 && out[count - 1].stride == dim.stride * dim.size) {
      out[count - 1] = {out[count - 1].size * dim.size, dim.stride};
      continue;
    }
    if (count == capacity) return -1;
    out[count++] = dim;
  }
  return count;
}

}  // namespace

PoolView make_pool_view(const char* op, const char* argument, int64_t position, const TensorView& tensor,
                        int64_t row_ndim) {
  const int64_t lead = tensor.ndim - row_ndim;
  if (lead != 1 && lead != 2) {
    fail(op, argument, "[", position, "] has shape ", shape_text(tensor.sizes, tensor.ndim),
         " with row_ndim=", row_ndim, "; it needs [slots, *row] (", row_ndim + 1,
         " dims) or [pages, page_size, *row] (", row_ndim + 2, " dims)");
  }
  PoolView view;
  const int64_t item = tensor.element_size;

  // Of an empty tensor only the number of slots matters; its other sizes and strides may be anything.
  if (is_empty(tensor)) {
    view.slots = tensor.sizes[0];
    if (lead == 2 && __builtin_mul_overflow(tensor.sizes[0], tensor.sizes[1], &view.slots)) view.slots = INT64_MAX;
    return view;
  }

  constexpr int kMaxRowDims = 3;  // one piece dim, one contiguous dim, one more to recognise what is refused
  Dim row[kMaxRowDims];
  int count = collapse(tensor, lead, row, kMaxRowDims);
  int64_t contiguous = 1;
  if (count > 0 && row[count - 1].stride == 1) contiguous = row[--count].size;
  if (count < 0 || count > 1) {
    fail(op, argument, "[", position, "] has row dims of shape ", shape_text(tensor.sizes + lead, row_ndim),
         " and strides ", shape_text(tensor.strides + lead, row_ndim),
         "; it needs rows that are contiguous, or equal pieces at one stride (for example heads)");
  }
  view.piece_bytes = contiguous * item;
  view.num_pieces = count == 1 ? row[0].size : 1;
  view.piece_stride = count == 1 ? row[0].stride * item : view.piece_bytes;

  // The stride of a dim of one element is never used and may be anything: the packed one takes its place.
  const auto stride = [&](int64_t dim, int64_t packed) {
    return tensor.sizes[dim] > 1 ? tensor.strides[dim] * item : packed;
  };
  if (lead == 1) {
    view.slots = tensor.sizes[0];
    view.token_stride = stride(0, view.row_bytes());
    view.page_stride = view.token_stride;
    return view;
  }
  view.slots = tensor.sizes[0] * tensor.sizes[1];
  view.page_slots = tensor.sizes[1];
  view.token_stride = stride(1, view.row_bytes());
  view.page_stride = stride(0, view.page_slots * view.token_stride);
  if (view.page_slots == 1) {
    view.token_stride = view.page_stride;
  } else if (view.page_stride == view.page_slots * view.token_stride) {
    view.page_slots = 1;
    view.page_stride = view.token_stride;
  }
  return view;
}

void align_pieces(const char* op, const SideNames& names, int64_t position, PoolView* dst, PoolView* src) {
  if (dst->piece_bytes == src->piece_bytes) return;
  PoolView* whole = dst->num_pieces == 1 ? dst : src;
  const PoolView* cut = whole == dst ? src : dst;
  if (whole->num_pieces != 1) {
    fail(op, names.dst, "[", position, "] has rows in ", dst->num_pieces, " pieces of ", dst->piece_bytes,
         " bytes and ", names.src, "[", position, "] in ", src->num_pieces, " pieces of ", src->piece_bytes,
         " bytes; it needs rows cut alike on both sides, or contiguous on one");
  }
  whole->num_pieces = cut->num_pieces;
  whole->piece_bytes = cut->piece_bytes;
  whole->piece_stride = cut->piece_bytes;
}

}  // namespace kvio
