// The `register` backend: rows through registers, several independent loads in flight a thread.
#pragma once

#include "gpu/platform.h"
#include "plan/register_plan.h"
#include "request/request.h"

namespace kvio::gpu {

// Enqueues the copy of `group` on `stream`. Indices and base addresses are device addresses. At most kMaxBuffers
// buffers a launch; more are split. `sm_count` is the device's.
void launch_register(const TransferRequest& request, const BufferGroup& group, int sm_count, int device, Stream stream);

}  // namespace kvio::gpu
