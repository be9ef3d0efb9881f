// Register copy: one warp moves up to 32 units (row pieces) of one buffer at a time (a wave of 64 lanes: up to 64).
// Each lane works out the addresses of one unit. Units that follow each other on both sides are moved as one stretch of
// memory; others by groups of lanes, a unit a group, cut as plan/register_plan.h says, or by the wave copy where the
// platform's policy says so.
//
// What shaped it (H200, PCIe gen5 x16):
// * A load from page-locked host memory takes about 1.3 us. 46 GB/s from one CTA therefore wants about 100 KiB in
//   flight: 512 threads with 16 or 18 independent 16-byte loads each, all issued before the first store. (1024 threads
//   with half of that each leave too few registers for the addresses.)
// * All warps of one SM issue some 8 instructions a nanosecond: at 46 GB/s that is 90 a 512-byte load of a warp. So
//   addresses are worked out per unit and not per load.
// * Neighbouring lanes read neighbouring packages: the link carries whole 128-byte lines best.
// * Indices are read once per unit and one item ahead, since each is a dependent load.

#include <algorithm>
#include <cstdint>

#include "gpu/fault.h"
#include "gpu/register_items.cuh"
#include "gpu/transfer_register.h"

namespace kvio::gpu {
namespace {

constexpr int kFewBuffers = 8;  // a one-layer call, whose launch need not carry kilobytes of parameters

template <int kBuffers>
struct Params : UnitParams {
  char* dst_base[kBuffers];
  const char* src_base[kBuffers];
  FastDivide inner_items;  // items are numbered outer * inner + inner
  uint32_t units_per_item;
  uint32_t num_items;
  UnitCut cut;
};

// What one launch can be told of.
constexpr int kMaxBuffers = sizeof(Params<kMaxBuffersPerLaunch>) <= kMaxParameterBytes ? kMaxBuffersPerLaunch : 192;
static_assert(sizeof(Params<kMaxBuffers>) <= kMaxParameterBytes, "a launch has room for its parameters");

template <int kBuffers>
struct BasesOf {
  const Params<kBuffers>& p;
  uint32_t buffer;
  __device__ __forceinline__ char* dst() const { return p.dst_base[buffer]; }
  __device__ __forceinline__ const char* src() const { return p.src_base[buffer]; }
};

struct Item {
  uint32_t buffer;
  uint32_t first_unit;
};

template <class P>
__device__ __forceinline__ Item item_at(const P& p, uint32_t number) {
  const uint32_t outer = p.inner_items.quotient(number);
  const uint32_t inner = number - outer * p.inner_items.divisor;
  return p.buffers_innermost ? Item{inner, outer * p.units_per_item} : Item{outer, inner * p.units_per_item};
}

template <int kWidth, int kUnits, int kLoads, int kBuffers>
__global__ void __launch_bounds__(kItemThreads, 1) register_copy(const __grid_constant__ Params<kBuffers> p) {
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t num_warps = gridDim.x * (kItemThreads / kWave);
  uint32_t number = blockIdx.x * (kItemThreads / kWave) + threadIdx.x / kWave;
  if (number >= p.num_items) return;
  Item item = item_at(p, number);
  UnitIndex index = fetch_index(p, item.first_unit, lane);
  while (true) {
    const Units units = locate(p, item.first_unit, BasesOf<kBuffers>{p, item.buffer}, index, lane);
    number += num_warps;
    const bool more = number < p.num_items;
    if (more) {
      item = item_at(p, number);
      index = fetch_index(p, item.first_unit, lane);
    }
    copy_item<kWidth, kUnits, kLoads>(p, units, lane);
    if (!more) return;
  }
}

template <int kBuffers>
struct Kernels {
  template <int kWidth, int kUnits, int kLoads>
  static auto kernel() {
    return &register_copy<kWidth, kUnits, kLoads, kBuffers>;
  }
};

template <int kBuffers>
void launch_buffers(const TransferRequest& request, const BufferGroup& group, const RegisterPlan& plan, int64_t first,
                    size_t first_buffer, size_t count, FaultRecord* fault, Stream stream) {
  Params<kBuffers> p;
  for (size_t b = 0; b < count; ++b) {
    p.dst_base[b] = group.dst_base[first_buffer + b];
    p.src_base[b] = group.src_base[first_buffer + b];
  }
  fill_unit_params(request, plan, first, fault, &p);
  p.cut = unit_cut(plan);
  p.units_per_item = static_cast<uint32_t>(plan.units_per_item);
  const uint32_t items_per_buffer = (p.num_units + p.units_per_item - 1) / p.units_per_item;
  p.num_items = items_per_buffer * static_cast<uint32_t>(count);
  p.inner_items = FastDivide(plan.buffers_innermost ? static_cast<uint32_t>(count) : items_per_buffer);
  const auto kernel = register_kernel_of<Kernels<kBuffers>>(plan.package_bytes, plan.split);
  // Not <<<>>>, whose outcome has to be asked of the runtime's last error, which an earlier call may have left.
  void* arguments[] = {&p};
  const Error launched =
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(plan.num_blocks)),
                       dim3(kItemThreads), arguments, 0, stream);
  check("transfer", "launching the register kernel", launched);
}

}  // namespace

void launch_register(const TransferRequest& request, const BufferGroup& group, int sm_count, int device,
                     Stream stream) {
  FaultRecord* fault = fault_record("transfer", device);
  const int64_t step = max_indices_per_launch(request, group);
  for (int64_t first = 0; first < request.num_indices; first += step) {
    const int64_t range = std::min(step, request.num_indices - first);
    const RegisterPlan plan = make_register_plan(request, group, range, sm_count, register_policy(kPlatform));
    const size_t buffers = group.dst_base.size();
    for (size_t b = 0; b < buffers; b += kMaxBuffers) {
      const size_t count = std::min<size_t>(kMaxBuffers, buffers - b);
      const auto launch = count <= kFewBuffers ? launch_buffers<kFewBuffers> : launch_buffers<kMaxBuffers>;
      launch(request, group, plan, first, b, count, fault, stream);
    }
  }
}

}  // namespace kvio::gpu
