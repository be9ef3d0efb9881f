// gpu/wave_copy.h on a GPU, with nothing else of the library around it: tests/gpu/test_wave_copy.py hands tables of
// rows to these functions. CMake's target kvio_wave_copy compiles it, for CUDA or as HIP.
//
// Every launching function returns the runtime's error number, 0 when the kernel was launched.
#include <cstdint>

#include "gpu/copy_rows.cuh"
#include "gpu/platform.h"
#include "gpu/wave_copy.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace kvio::gpu {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kBlocks = 1024;
constexpr int kSeveral = kRowsAtOnce<16>;

// As the test lays them out: 64-bit words.
struct Row {
  char* dst;  // null: not to be written
  const char* src;
  int64_t bytes;
};
struct Wave {
  int64_t first;  // row
  int64_t count;
  int64_t lanes;  // of a row
};

// Threads of a group, 64 of CUDA's two warps among them, and which group this is.
template <int kLanes>
struct Group {
  uint32_t lane;
  int64_t number;
  int64_t of;
};

template <int kLanes>
__device__ __forceinline__ Group<kLanes> this_group() {
  constexpr int64_t kGroups = kThreads / kLanes;
  const uint32_t thread = threadIdx.x;
  return {thread % kLanes, blockIdx.x * kGroups + thread / kLanes, gridDim.x * kGroups};
}

// A row a group.
template <int kLanes>
__global__ void __launch_bounds__(kThreads, 1) copy_each(const Row* rows, int64_t count) {
  const Group<kLanes> group = this_group<kLanes>();
  for (int64_t row = group.number; row < count; row += group.of) {
    wave_copy<kLanes>(group.lane, rows[row].dst, rows[row].src, rows[row].bytes);
  }
}

// Rows that follow each other in the table, kSeveral a group, of one size and at multiples of 16.
template <int kLanes>
__global__ void __launch_bounds__(kThreads, 1) copy_several(const Row* rows, int64_t count) {
  const Group<kLanes> group = this_group<kLanes>();
  for (int64_t set = group.number; set < count / kSeveral; set += group.of) {
    LaneRows<kSeveral> held;
#pragma unroll
    for (int r = 0; r < kSeveral; ++r) {
      held.dst[r] = rows[set * kSeveral + r].dst;
      held.src[r] = rows[set * kSeveral + r].src;
    }
    wave_copy_aligned<kLanes>(GlobalMemory{}, group.lane, held, rows[set * kSeveral].bytes);
  }
}

// The loop over the rows of a wave, as kernels call it: a lane knows one row, and a lane without one an address that is
// nobody's.
template <int kAlignment>
__global__ void __launch_bounds__(kThreads, 1) copy_waves(const Wave* waves, int64_t count, const Row* rows) {
  const Group<static_cast<int>(kWave)> group = this_group<static_cast<int>(kWave)>();
  for (int64_t number = group.number; number < count; number += group.of) {
    const Wave wave = waves[number];
    char* const nobodys = reinterpret_cast<char*>(uint64_t{16});
    Units units{nobodys, nobodys, static_cast<uint32_t>(wave.count)};
    if (group.lane < units.count) {
      units.dst = rows[wave.first + group.lane].dst;
      units.src = rows[wave.first + group.lane].src;
    }
    sync_wave();
    const int64_t bytes = wave.count > 0 ? rows[wave.first].bytes : 0;
    wave_copy_units<kAlignment>(static_cast<uint32_t>(wave.lanes), units, bytes, group.lane);
    sync_wave();
  }
}

int launch(const void* kernel, void** arguments, void* stream) {
  return static_cast<int>(
      cudaLaunchKernel(kernel, dim3(kBlocks), dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

using RowsKernel = void (*)(const Row*, int64_t);
using WavesKernel = void (*)(const Wave*, int64_t, const Row*);

int launch(RowsKernel kernel, const Row* rows, int64_t count, void* stream) {
  if (kernel == nullptr) return static_cast<int>(cudaErrorInvalidValue);
  void* arguments[] = {&rows, &count};
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}

}  // namespace
}  // namespace kvio::gpu

using namespace kvio::gpu;

EXPORT int kvio_wave_copy_each(int lanes, const Row* rows, int64_t count, void* stream) {
  RowsKernel kernel = nullptr;
  if (lanes == 1) kernel = copy_each<1>;
  if (lanes == 2) kernel = copy_each<2>;
  if (lanes == 4) kernel = copy_each<4>;
  if (lanes == 8) kernel = copy_each<8>;
  if (lanes == 16) kernel = copy_each<16>;
  if (lanes == 32) kernel = copy_each<32>;
  if (lanes == 64) kernel = copy_each<64>;
  return launch(kernel, rows, count, stream);
}

// `count` is a multiple of kvio_wave_copy_rows_at_once().
EXPORT int kvio_wave_copy_several(int lanes, const Row* rows, int64_t count, void* stream) {
  RowsKernel kernel = nullptr;
  if (lanes == 32) kernel = copy_several<32>;
  if (lanes == 64) kernel = copy_several<64>;
  return launch(kernel, rows, count, stream);
}

// `alignment` is what all rows lie at multiples of.
EXPORT int kvio_wave_copy_waves(int alignment, const Wave* waves, int64_t count, const Row* rows, void* stream) {
  WavesKernel kernel = nullptr;
  if (alignment == 1) kernel = copy_waves<1>;
  if (alignment == 2) kernel = copy_waves<2>;
  if (alignment == 4) kernel = copy_waves<4>;
  if (alignment == 8) kernel = copy_waves<8>;
  if (alignment == 16) kernel = copy_waves<16>;
  if (kernel == nullptr) return static_cast<int>(cudaErrorInvalidValue);
  void* arguments[] = {&waves, &count, &rows};
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}

EXPORT int kvio_wave_copy_rows_at_once() { return kSeveral; }
EXPORT int kvio_wave_copy_wave_lanes() { return static_cast<int>(kWave); }
EXPORT const char* kvio_wave_copy_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
