// The GPU side of kvio::swap_in and kvio::copy_planned.
#pragma once

#include "request/swap_in_request.h"

namespace kvio::gpu {

// Enqueues a checked request on the current stream of its GPU; host addresses are translated in place. Nothing waits
// for the GPU. Throws on a pending fault and on host memory that is not page-locked, before anything is enqueued.
void swap_in(SwapInRequest* request);
void copy_planned(CopyPlannedRequest* request);

}  // namespace kvio::gpu
