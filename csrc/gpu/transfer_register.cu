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

#include "gpu/copy_rows.cuh"
#include "gpu/fault.h"
#include "gpu/transfer_register.h"
#include "gpu/units.cuh"

namespace kvio::gpu {
namespace {

constexpr int kThreads = 512;
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

// One unit's index entries, fetched an item ahead of their use.
struct UnitIndex {
  int64_t dst;
  int64_t src;
};

template <class P>
__device__ __forceinline__ UnitIndex fetch_index(const P& p, const Item& item, uint32_t lane) {
  const uint32_t unit = item.first_unit + lane;
  if (lane >= p.units_per_item || unit >= p.num_units) return {-1, -1};
  const uint32_t position = p.units_per_index.quotient(unit);
  return {load_index(p.dst, p.is_int64, position), load_index(p.src, p.is_int64, position)};
}

template <class P>
__device__ __forceinline__ Units locate(const P& p, const Item& item, const UnitIndex& index, uint32_t lane) {
  Units units;
  units.src = p.src_base[item.buffer];
  units.dst = nullptr;
  units.count = min(p.units_per_item, p.num_units - item.first_unit);
  if (lane >= units.count) return units;
  UnitPlace place;
  if (find_unit(p, item.first_unit + lane, index.dst, index.src, &place)) {
    units.dst = p.dst_base[item.buffer] + place.dst;
    units.src += place.src;
  }
  return units;
}

template <int kWidth, int kUnits, int kLoads, int kBuffers>
__global__ void __launch_bounds__(kThreads, 1) register_copy(const __grid_constant__ Params<kBuffers> p) {
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t num_warps = gridDim.x * (kThreads / kWave);
  uint32_t number = blockIdx.x * (kThreads / kWave) + threadIdx.x / kWave;
  if (number >= p.num_items) return;
  Item item = item_at(p, number);
  UnitIndex index = fetch_index(p, item, lane);
  while (true) {
    const Units units = locate(p, item, index, lane);
    number += num_warps;
    const bool more = number < p.num_items;
    if (more) {
      item = item_at(p, number);
      index = fetch_index(p, item, lane);
    }
    const bool stretch = is_stretch(units, p.unit_bytes, lane);
    if (stretch) {
      if (p.cut.stretch_loads == 18) {
        copy_stretch<kWidth, 18>(units, p.cut.packages, lane);
      } else {
        copy_stretch<kWidth, 16>(units, p.cut.packages, lane);
      }
    } else if constexpr (kPolicy.wave_copy) {
      wave_copy_units<kWidth>(p.cut.lanes_per_unit, units, p.unit_bytes, lane);
    } else {
      copy_units<kWidth, kUnits, kLoads>(p.cut, units, lane);
    }
    // After either, but the wave copy moves all of a unit: a single unit counts as a stretch and may have one.
    if (stretch || !kPolicy.wave_copy) copy_rest<kWidth>(p.cut, units);
    if (!more) return;
  }
}

template <int kBuffers>
using Kernel = void (*)(Params<kBuffers>);

template <int kWidth, int kBuffers>
Kernel<kBuffers> kernel_of(const LaneSplit& split) {
  if constexpr (!kPolicy.wave_copy) {  // which has one shape
    if (split.units_per_lane == 8) return register_copy<kWidth, 8, 2, kBuffers>;
    if (split.units_per_lane == 4) return register_copy<kWidth, 4, 4, kBuffers>;
    if (split.units_per_lane == 2 && split.loads_per_unit == 9) return register_copy<kWidth, 2, 9, kBuffers>;
    if (split.units_per_lane == 2) return register_copy<kWidth, 2, 8, kBuffers>;
  }
  return register_copy<kWidth, 1, 16, kBuffers>;
}

template <int kBuffers>
Kernel<kBuffers> kernel_of(int64_t package_bytes, const LaneSplit& split) {
  switch (package_bytes) {
    case 16:
      return kernel_of<16, kBuffers>(split);
    case 8:
      return kernel_of<8, kBuffers>(split);
    case 4:
      return kernel_of<4, kBuffers>(split);
    case 2:
      return kernel_of<2, kBuffers>(split);
    default:
      return kernel_of<1, kBuffers>(split);
  }
}

template <int kBuffers>
void launch_buffers(const TransferRequest& request, const BufferGroup& group, const RegisterPlan& plan, int64_t first,
                    size_t first_buffer, size_t count, FaultRecord* fault, Stream stream) {
  Params<kBuffers> p;
  for (size_t b = 0; b < count; ++b) {
    p.dst_base[b] = group.dst_base[first_buffer + b];
    p.src_base[b] = group.src_base[first_buffer + b];
  }
  fill_unit_params(request, plan, first, fault, &p);
  p.cut.packages = static_cast<uint32_t>(plan.packages);
  p.cut.remainder = static_cast<uint32_t>(plan.remainder);
  p.cut.lanes_per_unit = static_cast<uint32_t>(plan.split.lanes_per_unit);
  p.cut.skew_mask = static_cast<uint32_t>(plan.skew_alignment - 1);
  p.cut.max_skew = static_cast<uint32_t>(plan.max_skew);
  p.cut.skew_by_dst = plan.skew_by_dst;
  p.cut.stretch_loads = static_cast<uint32_t>(plan.stretch_loads);
  p.units_per_item = static_cast<uint32_t>(plan.units_per_item);
  const uint32_t items_per_buffer = (p.num_units + p.units_per_item - 1) / p.units_per_item;
  p.num_items = items_per_buffer * static_cast<uint32_t>(count);
  p.inner_items = FastDivide(plan.buffers_innermost ? static_cast<uint32_t>(count) : items_per_buffer);
  const Kernel<kBuffers> kernel = kernel_of<kBuffers>(plan.package_bytes, plan.split);
  // Not <<<>>>, whose outcome has to be asked of the runtime's last error, which an earlier call may have left.
  void* arguments[] = {&p};
  const Error launched =
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(plan.num_blocks)),
                       dim3(kThreads), arguments, 0, stream);
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
