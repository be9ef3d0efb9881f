#include "plan/order.h"

#include <algorithm>
#include <cstdlib>

namespace kvio {
namespace {

bool host_is_dst(const TransferRequest& request) { return request.dst_device == DeviceKind::kCpu; }

// How host slots follow each other in the order given.
struct Walk {
  int64_t lowest = INT64_MAX;
  int64_t highest = 0;
  int64_t travel = 0;  // sum of the steps, up or down
  int64_t runs = 1;
  int64_t steps = 0;
};

// A long list is looked at in windows, evenly spread: all of 131,072 pairs would take 170 us of the caller's time.
constexpr int64_t kWindow = 1024;
constexpr int64_t kWindows = 16;

template <class Index>
Walk walk_of(const IndexList& host, const IndexList& other, int64_t count) {
  const Index* at = static_cast<const Index*>(host.data);
  const Index* with = static_cast<const Index*>(other.data);
  const int64_t windows = count > kWindow * kWindows ? kWindows : 1;
  const int64_t length = windows > 1 ? kWindow : count;
  Walk walk;
  for (int64_t w = 0; w < windows; ++w) {
    const int64_t first = windows > 1 ? w * (count - length) / (windows - 1) : 0;
    const int64_t start = at[first * host.stride];
    walk.lowest = std::min(walk.lowest, start);
    walk.highest = std::max(walk.highest, start);
    for (int64_t i = first + 1; i < first + length; ++i) {
      const int64_t value = at[i * host.stride];
      const int64_t step = value - at[(i - 1) * host.stride];
      const int64_t other_step = static_cast<int64_t>(with[i * other.stride]) - with[(i - 1) * other.stride];
      walk.lowest = std::min(walk.lowest, value);
      walk.highest = std::max(walk.highest, value);
      walk.travel += std::abs(step);
      walk.runs += (step != 1) | (other_step != 1);
    }
    walk.steps += length - 1;
  }
  return walk;
}

}  // namespace

int order_shift(int64_t limit) {
  const int used = limit <= 1 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(limit - 1));
  return std::max(0, used - kOrderBucketBits);
}

bool worth_ordering(const TransferRequest& request, const OrderPolicy& policy) {
  if (request.num_indices < std::max<int64_t>(policy.indices, 1) || request.num_indices > INT32_MAX) return false;
  if ((request.dst_device == DeviceKind::kCpu) == (request.src_device == DeviceKind::kCpu)) return false;
  const bool dst = host_is_dst(request);

  // Of the buffer that is spread widest: bytes of host memory, and of payload, that an index stands for.
  double host_bytes = 0;
  int64_t payload_bytes = 0;
  for (const BufferGroup& group : request.groups) {
    const int64_t slots = dst ? group.dst.slots : group.src.slots;
    if (group.dst.row_bytes() == 0 || slots == 0) continue;
    const double extent = static_cast<double>(dst ? group.dst_extent : group.src_extent);
    const double per_index = extent / static_cast<double>(slots) * static_cast<double>(request.slots_per_index);
    if (per_index <= host_bytes) continue;
    host_bytes = per_index;
    payload_bytes = group.dst.row_bytes() * request.slots_per_index;
  }
  if (payload_bytes >= policy.run_bytes) return false;

  const IndexList& host = dst ? request.dst_indices : request.src_indices;
  const IndexList& other = dst ? request.src_indices : request.dst_indices;
  const Walk walk = host.is_int64 ? walk_of<int64_t>(host, other, request.num_indices)
                                  : walk_of<int32_t>(host, other, request.num_indices);
  const int64_t range = walk.highest - walk.lowest + 1;
  if (static_cast<double>(range) * host_bytes <= static_cast<double>(policy.span_bytes)) return false;
  if (payload_bytes * (walk.steps + 1) >= policy.run_bytes * walk.runs) return false;
  const double scale = static_cast<double>(request.num_indices) / static_cast<double>(walk.steps + 1);
  return static_cast<double>(walk.travel) * scale > static_cast<double>(policy.sweeps) * static_cast<double>(range);
}

bool worth_ordering_unseen(const TransferRequest& request, const OrderPolicy& policy) {
  if ((request.dst_device == DeviceKind::kCpu) == (request.src_device == DeviceKind::kCpu)) return false;
  if (request.page_size > 1 || request.num_indices > INT32_MAX) return false;
  if (request.payload_bytes() < policy.unseen_payload_bytes || request.num_indices < policy.indices) return false;
  const bool dst = host_is_dst(request);
  int64_t span_bytes = 0;
  int64_t row_bytes = 0;
  for (const BufferGroup& group : request.groups) {
    span_bytes = std::max(span_bytes, dst ? group.dst_extent : group.src_extent);
    row_bytes = std::max(row_bytes, group.dst.row_bytes());
  }
  return span_bytes >= policy.unseen_span_bytes && row_bytes < policy.run_bytes;
}

}  // namespace kvio
