// What kernels move: units, pieces of slots, after whole pages have been joined. Shared by the kernels' plans.
#pragma once

#include "request/request.h"

namespace kvio {

// Whole pages whose rows are packed on both sides become one long row each; `slots_per_index` is then 1.
void join_pages(PoolView* dst, PoolView* src, int64_t* slots_per_index);

// Cuts the one piece of a row into `parts` equal ones, on both sides.
void cut_piece(PoolView* dst, PoolView* src, int64_t parts);

// True when buffers lie inside one another's pitch (page-first pools): then they are moved together.
bool buffers_share_pages(const BufferGroup& group);

}  // namespace kvio
