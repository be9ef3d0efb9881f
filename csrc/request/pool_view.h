// A pool view is an affine map. Every layout is the same formula with other strides:
//
//   address(slot, piece) = base + (slot / page_slots) * page_stride + (slot % page_slots) * token_stride
//                        + piece * piece_stride
//
// so nothing below this room knows what a layout is.
#pragma once

#include <cstdint>

#include "request/tensor_view.h"

namespace kvio {

// What an op calls its two lists of buffers.
struct SideNames {
  const char* dst;
  const char* src;
};

// All strides in bytes. A flat pool has page_slots == 1 and page_stride == token_stride.
struct PoolView {
  int64_t slots = 0;
  int64_t page_slots = 1;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t num_pieces = 1;
  int64_t piece_stride = 0;
  int64_t piece_bytes = 0;

  bool is_flat() const { return page_slots == 1; }
  int64_t row_bytes() const { return num_pieces * piece_bytes; }
  // Rows of one page follow each other without a gap.
  bool packed() const { return num_pieces == 1 && token_stride == piece_bytes; }
  int64_t offset(int64_t slot) const { return (slot / page_slots) * page_stride + (slot % page_slots) * token_stride; }
};

// Reads a view off a strided tensor [slots, *row] or [pages, page_slots, *row]; `row_ndim` trailing dims are the row.
// Throws when the dims fit neither form or the row dims need more than one level of pieces.
PoolView make_pool_view(const char* op, const char* argument, int64_t position, const TensorView& tensor,
                        int64_t row_ndim);

// Cuts the rows of both sides into the same pieces. Throws when no common cut is affine on both.
void align_pieces(const char* op, const SideNames& names, int64_t position, PoolView* dst, PoolView* src);

}  // namespace kvio
