// CPU indices for a GPU kernel, without a host sync.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <functional>

#include "gpu/platform.h"
#include "request/request.h"

namespace kvio::gpu {

// Copies both index lists of `request` to the GPU on `stream` and points the request at them. Where that pays
// (plan/order.h) the pairs go over in host-address order, so positions are then not the caller's. The returned tensor
// owns the device memory: keep it until everything that reads the indices has been enqueued on `stream`.
torch::stable::Tensor upload_indices(const char* op, TransferRequest* request, Stream stream);

// Brings `nbytes` that `fill` writes to the GPU on `stream`, through page-locked memory of the library's own. The
// returned tensor is what upload_indices returns. While `capturing` the graph reads that memory at every replay, so it
// is never used again.
torch::stable::Tensor upload_bytes(const char* op, int device, int64_t nbytes, Stream stream, bool capturing,
                                   const std::function<void(char*)>& fill);

// Writes the first `count` entries of a list on the CPU to `out`, packed.
void pack_indices(const IndexList& list, int64_t count, char* out);

}  // namespace kvio::gpu
