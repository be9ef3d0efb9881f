// Names of the GPU runtime. The only file that says which vendor's it is; kernels and launchers use `gpu...` names.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <sstream>
#include <stdexcept>

namespace kvio::gpu {

constexpr int kMaxDevices = 64;  // of one machine

using Stream = cudaStream_t;
using Event = cudaEvent_t;
using Error = cudaError_t;

// Throws "kvio::<op>: <what> failed: <error>" and clears the sticky copy of the error, so that a later, unrelated
// call does not report it again.
inline void check(const char* op, const char* what, Error error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  std::ostringstream text;
  text << "kvio::" << op << ": " << what << " failed: " << cudaGetErrorString(error) << " (error "
       << static_cast<int>(error) << ")";
  throw std::runtime_error(text.str());
}

// Makes `device` current and puts the previous one back, through torch's guard: restoring with the runtime's own call
// would create a context on a device that has none yet. Costs nothing when the device is current already.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess) cudaGetLastError();
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

// Lets a lazy allocation happen while some stream of this thread is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace kvio::gpu
