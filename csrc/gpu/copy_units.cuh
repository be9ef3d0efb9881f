// How a warp moves units whose addresses its lanes hold: as one stretch of memory, or by groups of lanes, a unit a
// group, cut as plan/register_plan.h says. All lanes of it call every function here.
#pragma once

#include <cstdint>

#include "gpu/primitives.cuh"

namespace kvio::gpu {

// How units are cut into packages and shared by lanes: launch parameters.
struct UnitCut {
  uint32_t packages;        // whole packages of a unit
  uint32_t remainder;       // bytes of a unit after its packages
  uint32_t lanes_per_unit;  // power of two
  uint32_t skew_mask;
  uint32_t max_skew;       // packages
  uint32_t stretch_loads;  // of a lane in flight where units follow each other
  bool skew_by_dst;
};

// What a warp knows of its current item: per lane the addresses of one unit, dst null where there is none or its index
// is outside its pool.
struct Units {
  const char* src;
  char* dst;
  uint32_t count;
};

// True for all lanes when the units follow each other without a gap on both sides and all may be written.
__device__ __forceinline__ bool is_stretch(const Units& units, uint32_t unit_bytes, uint32_t lane) {
  const uint32_t before = lane > 0 ? lane - 1 : 0;
  const char* src_before = shuffle_pointer(units.src, before);
  const char* dst_before = shuffle_pointer(units.dst, before);
  const bool follows = lane == 0 || (units.src == src_before + unit_bytes && units.dst == dst_before + unit_bytes);
  return all_lanes(lane >= units.count || (units.dst != nullptr && follows));
}

template <int kWidth, int kStretchLoads>
__device__ __forceinline__ void copy_stretch(const Units& units, uint32_t packages, uint32_t lane) {
  using Package = typename PackageOf<kWidth>::type;
  const uint32_t total = units.count * packages;
  const char* src = shuffle_pointer(units.src, 0) + lane * kWidth;
  char* dst = shuffle_pointer(units.dst, 0) + lane * kWidth;
  constexpr uint32_t kRound = kWave * kStretchLoads;
  uint32_t done = 0;
  for (; done + kRound <= total; done += kRound) {
    Package held[kStretchLoads];
#pragma unroll
    for (int j = 0; j < kStretchLoads; ++j) held[j] = load_once<Package>(src + uint64_t{done + j * kWave} * kWidth);
#pragma unroll
    for (int j = 0; j < kStretchLoads; ++j) store_once(dst + uint64_t{done + j * kWave} * kWidth, held[j]);
  }
  if (done == total) return;
  Package held[kStretchLoads] = {};
#pragma unroll
  for (int j = 0; j < kStretchLoads; ++j) {
    load_once_if(done + j * kWave + lane < total, held[j], src + uint64_t{done + j * kWave} * kWidth);
  }
#pragma unroll
  for (int j = 0; j < kStretchLoads; ++j) await_loaded(held[j]);
#pragma unroll
  for (int j = 0; j < kStretchLoads; ++j) {
    store_once_if(done + j * kWave + lane < total, dst + uint64_t{done + j * kWave} * kWidth, held[j]);
  }
}

// Groups of `lanes` lanes move a unit each, kUnits of them at a time, kLoads packages a lane and unit in flight. A
// group starts up to `max_skew` packages before its unit, where a line starts, so that no step cuts a line of the
// host's.
template <int kWidth, int kUnits, int kLoads>
__device__ __forceinline__ void copy_units(const UnitCut& p, const Units& units, uint32_t lane) {
  using Package = typename PackageOf<kWidth>::type;
  const uint32_t lanes = p.lanes_per_unit;
  const uint32_t groups = kWave / lanes;
  const uint32_t group = lane / lanes;
  const uint32_t column = lane % lanes;
  for (uint32_t first = 0; first < units.count; first += groups * kUnits) {
    const char* from[kUnits];
    uint32_t start[kUnits];  // this lane's first package; wraps below 0 where it starts before the unit
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const uint32_t unit = first + k * groups + group;
      from[k] = shuffle_pointer(units.src, unit % kWave);
      const char* to = shuffle_pointer(units.dst, unit % kWave);
      const uint32_t low = static_cast<uint32_t>(reinterpret_cast<uint64_t>(p.skew_by_dst ? to : from[k]));
      start[k] = column - (low & p.skew_mask) / kWidth;
      // No unit, or none to be written: no package of it is inside.
      if (unit >= units.count || to == nullptr) start[k] = p.packages + p.max_skew;
    }
    for (uint32_t step = 0; step < p.packages + p.max_skew; step += lanes * kLoads) {
      Package held[kUnits][kLoads] = {};
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const uint32_t at = start[k] + step + j * lanes;
          load_once_if(at < p.packages, held[k][j], from[k] + uint64_t{at} * kWidth);
        }
      }
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        // Fetched again rather than kept: the registers are needed by what is in flight.
        char* to = shuffle_pointer(units.dst, (first + k * groups + group) % kWave);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const uint32_t at = start[k] + step + j * lanes;
          store_once_if(at < p.packages, to + uint64_t{at} * kWidth, held[k][j]);
        }
      }
    }
  }
}

// The bytes of each lane's unit after its whole packages.
template <int kWidth>
__device__ __forceinline__ void copy_rest(const UnitCut& cut, const Units& units) {
  if (cut.remainder == 0 || units.dst == nullptr) return;
  copy_remainder<kWidth>(units.dst + cut.packages * kWidth, units.src + cut.packages * kWidth, cut.remainder);
}

}  // namespace kvio::gpu
