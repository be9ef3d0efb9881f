#include "gpu/stream.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "error.h"

// Weak: it lives in libtorch_cuda, which a CPU torch does not have, and Python resolves every strong symbol at import.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace kvio::gpu {

Stream current_stream(const char* op, int device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    fail(op, "the loaded torch has no GPU support; it needs a torch build for this GPU");
  }
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != 0) fail(op, "reading the current stream failed");
  return static_cast<Stream>(stream);
}

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const Error error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();
  return error == cudaErrorStreamCaptureImplicit;  // the legacy stream, while a stream that it waits for is captured
}

}  // namespace kvio::gpu
