// Kernels around gpu/wave_copy.h and nothing else, for the machine code that compilers make of it: HIP without any
// header of ROCm, or CUDA. Rows come from memory, as they do from a table of buffers: nothing but the header itself can
// know then in which kind of memory they lie.
#include "gpu/wave_copy.h"

#if defined(__HIP__)
#define KERNEL extern "C" __attribute__((global)) void
#define THREAD __builtin_amdgcn_workitem_id_x()
#else
#define KERNEL extern "C" __global__ void
#define THREAD threadIdx.x
#endif

constexpr int kRows = kvio::gpu::kRowsAtOnce<16>;

template <int kLanes>
KVIO_LANE void copy_several(char* const* dst, const char* const* src, int64_t row_bytes) {
  kvio::gpu::LaneRows<kRows> rows;
  KVIO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    rows.dst[r] = dst[THREAD / kLanes + r * 64];
    rows.src[r] = src[THREAD / kLanes + r * 64];
  }
  // Addresses are there before the rows are, as where lanes tell each other.
  KVIO_UNROLL
  for (int r = 0; r < kRows; ++r) {
    kvio::gpu::GlobalMemory{}.await(rows.dst[r]);
    kvio::gpu::GlobalMemory{}.await(rows.src[r]);
  }
  kvio::gpu::wave_copy_aligned<kLanes>(kvio::gpu::GlobalMemory{}, THREAD % kLanes, rows, row_bytes);
}

KERNEL rows_by_wave_of_32(char* const* dst, const char* const* src, int64_t row_bytes) {
  kvio::gpu::wave_copy<32>(THREAD % 32, dst[THREAD / 32], src[THREAD / 32], row_bytes);
}

KERNEL rows_by_wave_of_64(char* const* dst, const char* const* src, int64_t row_bytes) {
  kvio::gpu::wave_copy<64>(THREAD % 64, dst[THREAD / 64], src[THREAD / 64], row_bytes);
}

KERNEL several_by_wave_of_32(char* const* dst, const char* const* src, int64_t row_bytes) {
  copy_several<32>(dst, src, row_bytes);
}

KERNEL several_by_wave_of_64(char* const* dst, const char* const* src, int64_t row_bytes) {
  copy_several<64>(dst, src, row_bytes);
}
