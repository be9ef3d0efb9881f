// How kernels turn index entries into addresses: one side of a transfer as launch parameters, and the affine map.
#pragma once

#include <cstdint>

#include "gpu/primitives.cuh"
#include "request/request.h"

namespace kvio::gpu {

struct Side {
  FastDivide page_slots;
  int64_t page_stride;
  int64_t token_stride;
  int64_t piece_stride;
  int64_t index_stride;  // elements
  const void* indices;
  int64_t num_entries;  // valid index values are 0 .. num_entries - 1
  bool flat;
};

// `first` is the launch's first position in the caller's index lists.
inline Side make_side(const PoolView& view, const IndexList& indices, int64_t first, int64_t slots_per_index) {
  Side side{};
  side.flat = view.is_flat();
  side.page_slots = FastDivide(static_cast<uint32_t>(view.page_slots));
  side.page_stride = view.page_stride;
  side.token_stride = view.token_stride;
  side.piece_stride = view.num_pieces > 1 ? view.piece_stride : 0;
  side.index_stride = indices.stride;
  side.indices = indices.from(first).data;
  side.num_entries = view.slots / slots_per_index;
  return side;
}

__device__ __forceinline__ int64_t load_index(const Side& side, bool is_int64, uint32_t position) {
  const int64_t at = position * side.index_stride;
  return is_int64 ? static_cast<const int64_t*>(side.indices)[at] : static_cast<const int32_t*>(side.indices)[at];
}

// An index entry as it was loaded, widened only when it is used: widening at once would wait for the load.
struct IndexWords {
  uint32_t low;
  uint32_t high;

  __device__ __forceinline__ int64_t value(bool is_int64) const {
    if (!is_int64) return static_cast<int32_t>(low);
    return static_cast<int64_t>(uint64_t{high} << 32 | low);
  }
};

// Starts loading the entry at `position`, if `wanted`; else `words` stays.
template <bool kInt64>
__device__ __forceinline__ void load_index_if(bool wanted, const Side& side, uint32_t position, IndexWords& words) {
  const char* entry = static_cast<const char*>(side.indices) + position * side.index_stride * (kInt64 ? 8 : 4);
  if constexpr (kInt64) {
    load_words_if(wanted, words.low, words.high, entry);
  } else {
    load_word_if(wanted, words.low, entry);
  }
}

// Whether `index` names an entry of the pool.
__device__ __forceinline__ bool is_inside(const Side& side, int64_t index) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(side.num_entries);
}

// Byte offset of slot, piece in a pool.
__device__ __forceinline__ int64_t offset_of(const Side& side, int64_t slot, uint32_t piece) {
  const int64_t in_row = piece * side.piece_stride;
  if (side.flat) return slot * side.token_stride + in_row;
  const uint32_t page = side.page_slots.quotient(static_cast<uint32_t>(slot));
  const uint32_t token = static_cast<uint32_t>(slot) - page * side.page_slots.divisor;
  return page * side.page_stride + token * side.token_stride + in_row;
}

}  // namespace kvio::gpu
