// What a call has to know of its GPU and its stream.
#pragma once

#include "gpu/platform.h"
#include "plan/backend.h"

namespace kvio::gpu {

int sm_count(const char* op, int device);

// Most bytes of shared memory that one block may have.
int shared_memory_limit(const char* op, int device);

// A kernel may use more than 48 KiB of shared memory once it has been told so, on every device. `bytes` is always the
// same for a kernel.
void allow_shared_memory(const char* op, const void* kernel, int device, int bytes);

GpuFacts gpu_facts(const char* op, int device, Stream stream, bool capturing);

}  // namespace kvio::gpu
