// How the register kernel cuts a buffer group into work items. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/platform.h"
#include "request/request.h"

namespace kvio {

// How the lanes of a warp share units that do not follow each other: groups of `lanes_per_unit` lanes take a unit each,
// `units_per_lane` of them at a time, and every lane has `loads_per_unit` packages of each in flight.
struct LaneSplit {
  int64_t lanes_per_unit = 8;
  int64_t units_per_lane = 1;
  int64_t loads_per_unit = 16;
};

// The same for the wave copy, which has one kernel for all of them.
LaneSplit wave_copy_split(int64_t unit_bytes, int64_t package_bytes, int64_t wave_lanes);

constexpr int64_t kLineBytes = 128;  // what the link carries best: a read that cuts a line costs a request more

// What the split of a unit depends on.
struct UnitShape {
  int64_t packages = 0;
  int64_t package_bytes = 16;
  int64_t alignment = 16;  // units start at multiples of it, bytes, at most a line

  bool operator==(const UnitShape& o) const {
    return packages == o.packages && package_bytes == o.package_bytes && alignment == o.alignment;
  }
};

// Lane groups step through a unit from a multiple of this before its start, so that no step cuts a line: a line, or one
// step where that is shorter.
int64_t step_alignment(int64_t lanes, int64_t package_bytes);

// Packages that a group may step over before the unit starts.
int64_t max_skew(const UnitShape& unit, int64_t lanes);

// The split, among those that have a kernel, that keeps most lanes busy without cutting lines.
LaneSplit choose_lane_split(const UnitShape& unit, int64_t wave_lanes = 32);

// The same among `count` kernels, whose lanes_per_unit is of no matter.
LaneSplit choose_lane_split(const UnitShape& unit, const LaneSplit* kernels, size_t count, int64_t wave_lanes = 32);

// What one launch needs besides addresses. A unit is one piece of one slot; an item is up to `units_per_item`
// consecutive units of one buffer, and one warp moves it.
struct RegisterPlan {
  PoolView dst;
  PoolView src;
  int64_t slots_per_index = 1;
  int64_t package_bytes = 16;  // one load
  int64_t packages = 0;        // whole packages of one unit
  int64_t remainder = 0;       // bytes of a unit after them
  LaneSplit split;
  int64_t skew_alignment = 16;  // see step_alignment
  int64_t max_skew = 0;         // packages
  bool skew_by_dst = false;     // lines are those of the destination (host) side
  int64_t stretch_loads = 16;   // loads of a lane in flight where units follow each other: 16 or 18
  int64_t units = 0;            // of one buffer
  int64_t units_per_item = 32;
  int64_t wanted_blocks = 1;  // whatever the number of items
  int64_t num_blocks = 1;
  // Items of one slot range over all buffers come next to each other (true), or all items of one buffer do (false):
  // whichever keeps concurrent host addresses close together.
  bool buffers_innermost = false;
};

struct RegisterPolicy {
  int64_t wave_lanes = 32;
  int64_t warps_per_block = 16;
  int64_t bytes_per_warp_step = 8192;  // 32 lanes, 16 loads of 16 bytes in flight
  int64_t max_units_per_item = 32;     // one lane works out one unit's addresses
  int64_t long_piece_bytes = 8192;     // a longer piece is cut so that several warps share it
  int64_t read_blocks = 4;             // fill a host link for every layout measured
  int64_t write_blocks = 4;
  bool wave_copy = false;  // units that do not follow each other go by gpu/wave_copy.h
};

// A block has 512 threads whatever the width of a wave.
constexpr RegisterPolicy register_policy(Platform platform) {
  const PlatformPolicy of = policy_of(platform);
  RegisterPolicy policy;
  policy.wave_lanes = of.wave_lanes;
  policy.warps_per_block = 512 / of.wave_lanes;
  policy.bytes_per_warp_step = of.wave_lanes * 16 * 16;
  policy.max_units_per_item = of.wave_lanes;
  policy.long_piece_bytes = policy.bytes_per_warp_step;
  policy.read_blocks = of.read_blocks;
  policy.write_blocks = of.write_blocks;
  policy.wave_copy = of.wave_copy;
  return policy;
}

// What a plan has to share with others of its launch.
struct SharedPlan {
  uint64_t address_bits = 0;        // or-ed addresses of further buffers that the plan serves
  int64_t max_package_bytes = 16;   // one load
  const LaneSplit* only = nullptr;  // the kernel, where it is chosen already; lanes_per_unit is of no matter
};

// `num_sms` bounds device-to-device grids. `range` is the number of index positions this launch serves.
RegisterPlan make_register_plan(const TransferRequest& request, const BufferGroup& group, int64_t range,
                                int64_t num_sms, const RegisterPolicy& policy = register_policy(Platform::kCuda),
                                const SharedPlan& shared = SharedPlan());

constexpr int64_t kMaxBuffersPerLaunch = 256;  // 128 layers x K and V

// Most index positions one launch can serve: it counts units, and items over all buffers, in 31 bits.
int64_t max_indices_per_launch(const TransferRequest& request, const BufferGroup& group);

}  // namespace kvio
