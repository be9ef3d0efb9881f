// The two lists of buffers of a call: checked in pairs, and grouped by geometry. Every op that moves rows shares this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "request/pool_view.h"
#include "request/tensor_view.h"

namespace kvio {

constexpr int64_t kMaxPieceBytes = int64_t{64} << 20;  // of contiguous row bytes: kernels count them in 32 bits
constexpr int64_t kMaxCount = int64_t{1} << 30;        // of what kernels count in 32 bits

// Buffers that share one geometry, so that one launch (or one loop) serves them all.
struct BufferGroup {
  PoolView dst;
  PoolView src;
  std::vector<char*> dst_base;
  std::vector<const char*> src_base;
  std::vector<int64_t> position;  // of each buffer in the caller's lists
  int64_t dst_extent = 0;         // bytes one buffer's view spans
  int64_t src_extent = 0;
};

// Smallest pool of one side over all groups, in token slots, and the position of a buffer that has it.
struct SlotLimit {
  int64_t slots = INT64_MAX;
  int64_t position = 0;
};

SlotLimit slot_limit(const std::vector<BufferGroup>& groups, PoolView BufferGroup::* side);

// Pairs of buffers, in the caller's order inside each group. The lists are of equal length. Throws where a pair does
// not fit together or a row is none; `names` are what the caller calls the lists.
std::vector<BufferGroup> group_buffers(const char* op, const SideNames& names, const std::vector<TensorView>& dst,
                                       const std::vector<TensorView>& src, int64_t row_ndim, DtypeName dtype_name);

// Throws on geometries that kernels could not count in 32 bits.
void check_countable(const char* op, const SideNames& names, const std::vector<BufferGroup>& groups);

// Throws unless every tensor of a list (not an empty one) is on the first one's device, in memory that it owns.
void check_one_device(const char* op, const char* argument, const std::vector<TensorView>& list);

// A view can outlive its memory: resizing a storage leaves the views as they are.
// `position` is that of a list's item, -1 for an argument that is no list.
void check_has_storage(const char* op, const char* argument, int64_t position, const TensorView& tensor);

// Throws where a dim of stride 0 would be written many times over.
void check_not_expanded(const char* op, const char* argument, size_t position, const TensorView& tensor);

// Options that several ops have.
void check_row_ndim(const char* op, int64_t row_ndim);
void check_num_blocks(const char* op, int64_t num_blocks);

}  // namespace kvio
