// The caller's current stream, from whatever torch is loaded.
#pragma once

#include "gpu/platform.h"

namespace kvio::gpu {

// Throws when the loaded torch has no GPU support.
Stream current_stream(const char* op, int device);

bool is_capturing(Stream stream);

// True for the legacy default stream, torch's default; the per-thread one is a stream like any other.
inline bool is_legacy_stream(Stream stream) { return stream == nullptr || stream == cudaStreamLegacy; }

}  // namespace kvio::gpu
