#include "plan/copy_width.h"

#include <algorithm>

namespace kvio {
namespace {

uint64_t stride_bits(const PoolView& view) {
  uint64_t bits = static_cast<uint64_t>(view.token_stride);
  if (!view.is_flat()) bits |= static_cast<uint64_t>(view.page_stride);
  if (view.num_pieces > 1) bits |= static_cast<uint64_t>(view.piece_stride);
  return bits;
}

}  // namespace

uint64_t address_bits(const BufferGroup& group) {
  uint64_t bits = 0;
  for (const char* base : group.dst_base) bits |= reinterpret_cast<uint64_t>(base);
  for (const char* base : group.src_base) bits |= reinterpret_cast<uint64_t>(base);
  return bits;
}

int64_t address_alignment(const PoolView& dst, const PoolView& src, uint64_t address_bits) {
  const uint64_t bits = 128 | address_bits | stride_bits(dst) | stride_bits(src);
  return static_cast<int64_t>(bits & (~bits + 1));
}

int64_t copy_width(const PoolView& dst, const PoolView& src, uint64_t address_bits) {
  int64_t width = std::min<int64_t>(16, address_alignment(dst, src, address_bits));
  while (width > dst.piece_bytes && width > 1) width /= 2;
  return width;
}

}  // namespace kvio
