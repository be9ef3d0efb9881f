// The row copy of swap-in: copy_units.cuh, or wave_copy.h where the platform's policy says so.
#pragma once

#include <cstdint>

#include "gpu/copy_units.cuh"
#include "gpu/wave_copy.h"

namespace kvio::gpu {

// Groups of kLanes lanes copy a unit each.
template <int kLanes>
__device__ __forceinline__ void wave_copy_units(const Units& units, int64_t unit_bytes, uint32_t lane) {
  constexpr uint32_t kGroups = kWave / kLanes;
  // What follows from the lane is worked out from here on. Kept through the kernel for every kLanes, it takes so many
  // registers that scratch memory is needed.
  GlobalMemory{}.await(lane);
  for (uint32_t first = 0; first < units.count; first += kGroups) {
    const uint32_t unit = first + lane / kLanes;
    const char* from = shuffle_pointer(units.src, unit);
    char* to = shuffle_pointer(units.dst, unit);
    if (unit < units.count && to != nullptr) wave_copy<kLanes>(lane % kLanes, to, from, unit_bytes);
  }
}

// The same, `lanes` a power of two.
template <int kLanes = static_cast<int>(kWave)>
__device__ __forceinline__ void wave_copy_units(uint32_t lanes, const Units& units, int64_t unit_bytes, uint32_t lane) {
  if (lanes == kLanes) return wave_copy_units<kLanes>(units, unit_bytes, lane);
  if constexpr (kLanes > 1) wave_copy_units<kLanes / 2>(lanes, units, unit_bytes, lane);
}

// All lanes of a wave call it. The template's arguments are of copy_units.
template <int kWidth, int kUnits, int kLoads>
__device__ __forceinline__ void copy_rows(const UnitCut& cut, const Units& units, uint32_t lane) {
  if constexpr (kPolicy.wave_copy) {
    wave_copy_units(cut.lanes_per_unit, units, int64_t{cut.packages} * kWidth + cut.remainder, lane);
  } else {
    copy_units<kWidth, kUnits, kLoads>(cut, units, lane);
    copy_rest<kWidth>(cut, units);
  }
}

}  // namespace kvio::gpu
