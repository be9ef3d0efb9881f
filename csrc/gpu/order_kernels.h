// Launching what order_indices runs on a GPU.
#pragma once

#include "gpu/platform.h"
#include "plan/order.h"
#include "request/request.h"

namespace kvio::gpu {

struct OrderLaunch {
  IndexList dst;  // as given, on the GPU
  IndexList src;
  uint32_t* counts;  // [kOrderBuckets]
  void* dst_out;
  void* src_out;
  int32_t* positions;
  int64_t num_indices;
  int64_t shift;
  bool host_is_dst;
};
void launch_order(const char* op, const OrderLaunch& order, Stream stream);

}  // namespace kvio::gpu
