// GPU side of the ops: host addresses translated, faults reported, work enqueued on the caller's current stream.
#pragma once

#include <string>

#include "plan/backend.h"
#include "request/request.h"

namespace kvio::gpu {

// Of every op that makes a TransferRequest. Replaces host addresses and CPU indices in it by what the GPU uses.
void transfer(const char* op, TransferRequest* request);

void memcpy_batch(const MemcpyBatchRequest& request);

// The choice transfer would make, and the grid it would launch, as text lines.
std::string explain(const TransferRequest& request);

// A device index of -1 means torch's current device.
int resolve_device(const char* op, int64_t device_index);

// As above, but -1 where there is none.
int current_or(const char* op, int64_t device_index);

// JSON fields about the driver and the devices; never initializes a device.
std::string driver_info();

}  // namespace kvio::gpu
