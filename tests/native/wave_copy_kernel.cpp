// A kernel around gpu/wave_copy.h and nothing else, for the instructions that compilers make of it. HIP without any
// header of ROCm, or CUDA.
#include "gpu/wave_copy.h"

#if defined(__HIP__)
#define KERNEL extern "C" __attribute__((global)) void
#define THREAD __builtin_amdgcn_workitem_id_x()
#else
#define KERNEL extern "C" __global__ void
#define THREAD threadIdx.x
#endif

KERNEL rows_by_wave_of_32(char* dst, const char* src, int64_t row_bytes, int64_t dst_pitch, int64_t src_pitch) {
  const int64_t row = THREAD / 32;
  kvio::gpu::wave_copy<32>(THREAD % 32, dst + row * dst_pitch, src + row * src_pitch, row_bytes);
}

KERNEL rows_by_wave_of_64(char* dst, const char* src, int64_t row_bytes, int64_t dst_pitch, int64_t src_pitch) {
  const int64_t row = THREAD / 64;
  kvio::gpu::wave_copy<64>(THREAD % 64, dst + row * dst_pitch, src + row * src_pitch, row_bytes);
}
