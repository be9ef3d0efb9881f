#include "gpu/order_indices.h"

#include <algorithm>

#include "gpu/device_memory.h"
#include "gpu/order_kernels.h"

namespace kvio::gpu {

torch::stable::Tensor order_indices(const char* op, TransferRequest* request, Stream stream) {
  const int64_t count = request->num_indices;
  const bool wide = request->dst_indices.is_int64;
  const int64_t list_bytes = count * request->dst_indices.entry_bytes();
  const int64_t positions_bytes = (count * 4 + 7) / 8 * 8;
  const int64_t counts_bytes = kOrderBuckets * 4;
  const int64_t total = counts_bytes + 2 * list_bytes + positions_bytes;
  // Allocating spoils the graph that another thread captures, unless this thread says that it knows better.
  torch::stable::Tensor memory = [&] {
    const RelaxedCapture relaxed;
    return device_bytes(total, request->gpu_index);
  }();
  char* base = static_cast<char*>(memory.data_ptr());

  OrderLaunch order{};
  order.dst = request->dst_indices;
  order.src = request->src_indices;
  order.counts = reinterpret_cast<uint32_t*>(base);
  order.positions = reinterpret_cast<int32_t*>(base + counts_bytes);
  order.dst_out = base + counts_bytes + positions_bytes;
  order.src_out = base + counts_bytes + positions_bytes + list_bytes;
  order.num_indices = count;
  order.host_is_dst = request->dst_device == DeviceKind::kCpu;
  int64_t slots = 0;
  for (const BufferGroup& group : request->groups) {
    slots = std::max(slots, order.host_is_dst ? group.dst.slots : group.src.slots);
  }
  order.shift = order_shift(slots / request->slots_per_index);
  launch_order(op, order, stream);
  request->dst_indices = {order.dst_out, 1, wide};
  request->src_indices = {order.src_out, 1, wide};
  request->caller_positions = order.positions;
  return memory;
}

}  // namespace kvio::gpu
