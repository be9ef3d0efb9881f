// Names of the GPU runtime. The only file that says which vendor's it is; kernels and launchers use `gpu...` names.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>

namespace kvio::gpu {

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

// Makes `device` current and puts the previous one back. Costs nothing when it already is.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    check(op, "reading the current device", cudaGetDevice(&previous_));
    changed_ = previous_ != device;
    if (changed_) check(op, "setting the current device", cudaSetDevice(device));
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
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
