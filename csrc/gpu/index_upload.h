// CPU indices for a GPU kernel, without a host sync.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "gpu/platform.h"
#include "request/request.h"

namespace kvio::gpu {

// Copies both index lists of `request` to the GPU on `stream` and points the request at them. Where that pays
// (plan/order.h) the pairs go over in host-address order, so positions are then not the caller's. The returned tensor
// owns the device memory: keep it until everything that reads the indices has been enqueued on `stream`.
torch::stable::Tensor upload_indices(const char* op, TransferRequest* request, Stream stream);

}  // namespace kvio::gpu
