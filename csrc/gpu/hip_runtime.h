// The HIP runtime, of which this extension uses the copy that torch has loaded: a second one would know nothing of
// torch's streams. Nothing is linked, so the extension loads, and its CPU ops run, where there is no ROCm; every call
// then answers that there is no device.
#pragma once

namespace kvio::gpu {

// A function of the loaded runtime; null where it, or the runtime, is missing.
void* hip_symbol(const char* name);

// 10,000,000 * major + 100,000 * minor + patch of the loaded runtime; 0 without one.
int hip_version();

}  // namespace kvio::gpu
