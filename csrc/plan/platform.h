// What differs between the platforms this library is compiled for, in one table. Pure host code.
#pragma once

#include <cstdint>

namespace kvio {

enum class Platform : uint8_t { kCuda, kRocm };

// Read at every call, and overridden by its num_blocks.
struct PlatformPolicy {
  int64_t wave_lanes;      // lanes that run together: a warp, or a wave
  int64_t read_blocks;     // of the register kernel, from the host
  int64_t write_blocks;    // of the register kernel, to the host
  int64_t planned_blocks;  // of copy_planned, over all requests
  bool wave_copy;          // rows that do not follow each other: by gpu/wave_copy.h, or gpu/copy_units.cuh
};

// CUDA: measured on an H200, where 4 blocks fill the link for every layout, and 8 stay close together in host memory.
// ROCm: 16 blocks for what reads from the host, as serving engines give reads of one layer there; nothing was measured.
constexpr PlatformPolicy kPlatformPolicies[] = {{32, 4, 4, 8, false}, {64, 16, 4, 16, true}};

constexpr PlatformPolicy policy_of(Platform platform) { return kPlatformPolicies[static_cast<int>(platform)]; }

}  // namespace kvio
