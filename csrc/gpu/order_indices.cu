// One pass of a counting sort over the high bits of the host slots: count, turn counts into places, scatter. 2048
// buckets leave windows of 1/2048 of the pool unordered, far less than the GPU translates without a miss (about 1 GiB).
// Not stable: which of two pairs of one bucket comes first is left to chance, and no byte depends on it.

#include <algorithm>

#include "gpu/addressing.cuh"
#include "gpu/order_kernels.h"

namespace kvio::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxBlocks = 32;  // short bursts; more would only queue for the same counters
constexpr int kBuckets = kOrderBuckets;
constexpr int kBucketsPerThread = kBuckets / kThreads;

struct Params {
  Side dst;
  Side src;
  uint32_t* counts;  // of a bucket; then where its next pair goes
  void* dst_out;
  void* src_out;
  int32_t* positions;
  uint32_t num_indices;
  uint32_t shift;
  bool host_is_dst;
  bool is_int64;
};

// Entries outside their pool go to the last bucket: where they lie is of no matter.
__device__ __forceinline__ uint32_t bucket_of(const Params& p, int64_t dst, int64_t src) {
  const uint64_t host = static_cast<uint64_t>(p.host_is_dst ? dst : src) >> p.shift;
  return host < kBuckets ? static_cast<uint32_t>(host) : kBuckets - 1;
}

__global__ void __launch_bounds__(kThreads) count_buckets(const __grid_constant__ Params p) {
  __shared__ uint32_t mine[kBuckets];
  for (uint32_t b = threadIdx.x; b < kBuckets; b += kThreads) mine[b] = 0;
  __syncthreads();
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.num_indices; i += gridDim.x * kThreads) {
    const int64_t dst = load_index(p.dst, p.is_int64, i);
    const int64_t src = load_index(p.src, p.is_int64, i);
    atomicAdd(&mine[bucket_of(p, dst, src)], 1u);
  }
  __syncthreads();
  for (uint32_t b = threadIdx.x; b < kBuckets; b += kThreads) {
    if (mine[b] != 0) atomicAdd(&p.counts[b], mine[b]);
  }
}

// One block: every count becomes the sum of those before it.
__global__ void __launch_bounds__(kThreads) place_buckets(const __grid_constant__ Params p) {
  __shared__ uint32_t sums[kThreads];
  uint32_t counts[kBucketsPerThread];
  uint32_t total = 0;
  for (int j = 0; j < kBucketsPerThread; ++j) {
    counts[j] = p.counts[threadIdx.x * kBucketsPerThread + j];
    total += counts[j];
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  for (uint32_t step = 1; step < kThreads; step *= 2) {
    const uint32_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  uint32_t place = sums[threadIdx.x] - total;
  for (int j = 0; j < kBucketsPerThread; ++j) {
    p.counts[threadIdx.x * kBucketsPerThread + j] = place;
    place += counts[j];
  }
}

__device__ __forceinline__ void store_index(void* list, bool is_int64, uint32_t at, int64_t value) {
  if (is_int64) {
    static_cast<int64_t*>(list)[at] = value;
  } else {
    static_cast<int32_t*>(list)[at] = static_cast<int32_t>(value);
  }
}

__global__ void __launch_bounds__(kThreads) scatter_pairs(const __grid_constant__ Params p) {
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.num_indices; i += gridDim.x * kThreads) {
    const int64_t dst = load_index(p.dst, p.is_int64, i);
    const int64_t src = load_index(p.src, p.is_int64, i);
    const uint32_t to = atomicAdd(&p.counts[bucket_of(p, dst, src)], 1u);
    store_index(p.dst_out, p.is_int64, to, dst);
    store_index(p.src_out, p.is_int64, to, src);
    p.positions[to] = static_cast<int32_t>(i);
  }
}

void launch(const char* op, void (*kernel)(Params), int64_t blocks, Params* p, Stream stream) {
  void* arguments[] = {p};
  check(op, "launching the ordering of indices",
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                         arguments, 0, stream));
}

Side index_side(const IndexList& list) {
  Side side{};
  side.indices = list.data;
  side.index_stride = list.stride;
  return side;
}

}  // namespace

void launch_order(const char* op, const OrderLaunch& order, Stream stream) {
  Params p{};
  p.dst = index_side(order.dst);
  p.src = index_side(order.src);
  p.counts = order.counts;
  p.dst_out = order.dst_out;
  p.src_out = order.src_out;
  p.positions = order.positions;
  p.num_indices = static_cast<uint32_t>(order.num_indices);
  p.shift = static_cast<uint32_t>(order.shift);
  p.host_is_dst = order.host_is_dst;
  p.is_int64 = order.dst.is_int64;
  const int64_t blocks = std::min<int64_t>(kMaxBlocks, (order.num_indices + kThreads - 1) / kThreads);
  check(op, "clearing the ordering of indices", cudaMemsetAsync(p.counts, 0, kBuckets * 4, stream));
  launch(op, count_buckets, blocks, &p, stream);
  launch(op, place_buckets, 1, &p, stream);
  launch(op, scatter_pairs, blocks, &p, stream);
}

}  // namespace kvio::gpu
