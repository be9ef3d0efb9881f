// The copy-width rule: how many bytes one load may move. The only place where alignment is judged.
#pragma once

#include <cstdint>

#include "request/request.h"

namespace kvio {

// All base addresses of a group's buffers, both sides, or-ed together: the low bits are what alignment is read from.
uint64_t address_bits(const BufferGroup& group);

// Largest power of two, at most 128 (a line), that divides every address touched on both sides: bases, page, token and
// piece strides.
int64_t address_alignment(const PoolView& dst, const PoolView& src, uint64_t address_bits);

// The rule: that alignment, but at most 16 and at most the piece. Row length is not part of it: what a piece has beyond
// a multiple of the width is its remainder, which is moved in narrower packages.
int64_t copy_width(const PoolView& dst, const PoolView& src, uint64_t address_bits);

}  // namespace kvio
