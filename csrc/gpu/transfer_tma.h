// The `tma` backend: bulk copies into a ring of shared memory, guarded by mbarriers. Compute capability 9.0 and later.
#pragma once

#include "gpu/platform.h"
#include "plan/tma_plan.h"
#include "request/request.h"

namespace kvio::gpu {

// Whether this build has code of the kernel's for GPUs of that compute capability. The driver compiles the PTX of an
// older one too, but there the kernel is empty.
bool has_bulk_code(int compute_major);

// The built-in policy with this device's shared memory.
TmaPolicy tma_policy(const char* op, int device);

// Enqueues the copy of `group` on `stream`. Indices and base addresses are device addresses; tma_refusal(request) is
// null.
void launch_tma(const TransferRequest& request, const BufferGroup& group, int device, Stream stream);

}  // namespace kvio::gpu
