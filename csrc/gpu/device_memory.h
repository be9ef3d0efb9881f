// Short-lived device memory, from torch's allocator: it is stream-ordered and knows about graph capture.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace kvio::gpu {

// `nbytes` on `device`, to be used on torch's current stream of it.
inline torch::stable::Tensor device_bytes(int64_t nbytes, int device) {
  AtenTensorHandle handle = nullptr;
  const int64_t stride = 1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &nbytes, &stride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return torch::stable::Tensor(handle);
}

}  // namespace kvio::gpu
