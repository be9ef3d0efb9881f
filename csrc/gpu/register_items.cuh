// Items of the register copy: up to a wave's worth of consecutive units of one buffer, which one wave moves. What the
// kernels that walk over items share; which items a wave takes, and in what order, is theirs. All lanes of a wave call
// every function here. `P` is UnitParams with `units_per_item` and, to copy, `cut`.
#pragma once

#include <cstdint>

#include "gpu/copy_rows.cuh"
#include "gpu/units.cuh"
#include "plan/register_plan.h"

namespace kvio::gpu {

constexpr int kItemThreads = 512;  // of a block

// One unit's index entries, fetched an item ahead of their use.
struct UnitIndex {
  int64_t dst;
  int64_t src;
};

template <class P>
__device__ __forceinline__ UnitIndex fetch_index(const P& p, uint32_t first_unit, uint32_t lane) {
  const uint32_t unit = first_unit + lane;
  if (lane >= p.units_per_item || unit >= p.num_units) return {-1, -1};
  const uint32_t position = p.units_per_index.quotient(unit);
  return {load_index(p.dst, p.is_int64, position), load_index(p.src, p.is_int64, position)};
}

// `bases` has the item's buffers: `dst` and `src`.
template <class P, class Bases>
__device__ __forceinline__ Units locate(const P& p, uint32_t first_unit, const Bases& bases, const UnitIndex& index,
                                        uint32_t lane) {
  Units units;
  units.src = bases.src();
  units.dst = nullptr;
  units.count = min(p.units_per_item, p.num_units - first_unit);
  if (lane >= units.count) return units;
  UnitPlace place;
  if (find_unit(p, first_unit + lane, index.dst, index.src, &place)) {
    units.dst = bases.dst() + place.dst;
    units.src += place.src;
  }
  return units;
}

template <int kWidth, int kUnits, int kLoads, class P>
__device__ __forceinline__ void copy_item(const P& p, const Units& units, uint32_t lane) {
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
}

// The launch parameters of a plan's cut.
inline UnitCut unit_cut(const RegisterPlan& plan) {
  UnitCut cut;
  cut.packages = static_cast<uint32_t>(plan.packages);
  cut.remainder = static_cast<uint32_t>(plan.remainder);
  cut.lanes_per_unit = static_cast<uint32_t>(plan.split.lanes_per_unit);
  cut.skew_mask = static_cast<uint32_t>(plan.skew_alignment - 1);
  cut.max_skew = static_cast<uint32_t>(plan.max_skew);
  cut.skew_by_dst = plan.skew_by_dst;
  cut.stretch_loads = static_cast<uint32_t>(plan.stretch_loads);
  return cut;
}

// The kernel of `Family` that a plan needs: Family::kernel<width, units a lane, loads a unit>().
template <class Family, int kWidth>
auto register_kernel_of(const LaneSplit& split) {
  if constexpr (!kPolicy.wave_copy) {  // which has one shape
    if (split.units_per_lane == 8) return Family::template kernel<kWidth, 8, 2>();
    if (split.units_per_lane == 4) return Family::template kernel<kWidth, 4, 4>();
    if (split.units_per_lane == 2 && split.loads_per_unit == 9) return Family::template kernel<kWidth, 2, 9>();
    if (split.units_per_lane == 2) return Family::template kernel<kWidth, 2, 8>();
  }
  return Family::template kernel<kWidth, 1, 16>();
}

template <class Family>
auto register_kernel_of(int64_t package_bytes, const LaneSplit& split) {
  switch (package_bytes) {
    case 16:
      return register_kernel_of<Family, 16>(split);
    case 8:
      return register_kernel_of<Family, 8>(split);
    case 4:
      return register_kernel_of<Family, 4>(split);
    case 2:
      return register_kernel_of<Family, 2>(split);
    default:
      return register_kernel_of<Family, 1>(split);
  }
}

}  // namespace kvio::gpu
