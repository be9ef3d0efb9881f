// How a wave moves rows that do not follow each other: copy_units.cuh, or wave_copy.h where the platform's policy says
// so.
#pragma once

#include <cstdint>

#include "gpu/copy_units.cuh"
#include "gpu/wave_copy.h"

namespace kvio::gpu {

struct DeviceWave {
  static constexpr int kLanes = static_cast<int>(kWave);

  template <class T>
  __device__ __forceinline__ T* shuffle(T* pointer, uint32_t lane) const {
    return shuffle_pointer(pointer, lane);
  }
};

// By groups of `lanes` lanes, a power of two. All units lie at multiples of kAlignment on both sides. All lanes of the
// wave call it.
template <int kAlignment = 1>
__device__ __forceinline__ void wave_copy_units(uint32_t lanes, const Units& units, int64_t unit_bytes, uint32_t lane) {
  wave_copy_rows<kAlignment>(lanes, DeviceWave{}, GlobalMemory{}, lane, units.count, units.dst, units.src, unit_bytes);
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
