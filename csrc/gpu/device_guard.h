// Which device is current. Apart from platform.h, because kernels are compiled without torch's headers.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "gpu/platform.h"

namespace kvio::gpu {

// Makes `device` current and puts the previous one back, through torch's guard: restoring with the runtime's own call
// would create a context on a device that has none yet. Costs nothing when the device is current already.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess) (void)cudaGetLastError();
    if (current == device) return;
    torch_guard_.emplace(device);
    // This library's own copy of the runtime follows the context that torch made current; make sure.
    check(op, "reading the current device", cudaGetDevice(&current));
    if (current != device) check(op, "setting the current device", cudaSetDevice(device));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> torch_guard_;
};

}  // namespace kvio::gpu
