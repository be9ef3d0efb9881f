// The CPU kernels: the embedded default and the oracle of every other backend.
#pragma once

#include "request/request.h"

namespace kvio::cpu {

// Moves a checked request whose tensors are all on the CPU. Indices must have been checked. Synchronous.
void transfer(const TransferRequest& request);

void memcpy_batch(const MemcpyBatchRequest& request);

}  // namespace kvio::cpu
