// The caller's current stream, from whatever torch is loaded.
#pragma once

#include "gpu/platform.h"

namespace kvio::gpu {

// Throws when the loaded torch has no GPU support.
Stream current_stream(const char* op, int device);

bool is_capturing(Stream stream);

}  // namespace kvio::gpu
