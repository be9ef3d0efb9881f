#include "plan/units.h"

#include <algorithm>

namespace kvio {

void join_pages(PoolView* dst, PoolView* src, int64_t* slots_per_index) {
  const int64_t slots = *slots_per_index;
  const auto joinable = [&](const PoolView& v) { return v.packed() && (v.is_flat() || v.page_slots % slots == 0); };
  if (slots == 1 || !joinable(*dst) || !joinable(*src)) return;
  if (dst->piece_bytes > kMaxPieceBytes / slots) return;
  for (PoolView* v : {dst, src}) {
    v->slots /= slots;
    v->piece_bytes *= slots;
    v->piece_stride = v->piece_bytes;
    if (v->is_flat()) {
      v->token_stride *= slots;
      v->page_stride = v->token_stride;
    } else if (v->page_slots == slots) {
      v->token_stride = v->page_stride;
      v->page_slots = 1;
    } else {
      v->token_stride *= slots;
      v->page_slots /= slots;
    }
  }
  *slots_per_index = 1;
}

void cut_piece(PoolView* dst, PoolView* src, int64_t parts) {
  for (PoolView* v : {dst, src}) {
    v->num_pieces = parts;
    v->piece_bytes /= parts;
    v->piece_stride = v->piece_bytes;
  }
}

bool buffers_share_pages(const BufferGroup& group) {
  const auto interleaved = [](const PoolView& v, const auto& bases) {
    const int64_t pitch = v.is_flat() ? v.token_stride : v.page_stride;
    return std::any_of(bases.begin() + 1, bases.end(),
                       [&](const char* base) { return (base > bases[0] ? base - bases[0] : bases[0] - base) < pitch; });
  };
  return interleaved(group.dst, group.dst_base) || interleaved(group.src, group.src_base);
}

}  // namespace kvio
