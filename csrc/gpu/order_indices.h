// Order of scattered rows by host address.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "gpu/platform.h"
#include "request/request.h"

namespace kvio::gpu {

// Puts the index pairs of `request`, which are on the GPU, in coarse order of host address, into memory of its own: the
// request names the ordered lists and every entry's position in the caller's from then on. Entries outside their pools
// stay among them. Keep the result until the work that uses it is enqueued. Also during capture: then every replay
// orders the values of that time.
torch::stable::Tensor order_indices(const char* op, TransferRequest* request, Stream stream);

}  // namespace kvio::gpu
