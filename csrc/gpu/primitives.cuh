// Copy primitives, and what the lanes of a wave do together. Kernel bodies above this header contain no inline assembly
// and no vendor's intrinsics.
#pragma once

#include <cstdint>

#include "gpu/platform.h"
#ifdef KVIO_ROCM
#include "gpu/primitives_hip.cuh"
#endif

namespace kvio::gpu {

#ifndef KVIO_ROCM
using Words2 = uint2;
using Words4 = uint4;
using EightBytes = Words2;
#endif

template <int kBytes>
struct PackageOf;
template <>
struct PackageOf<16> {
  using type = Words4;
};
template <>
struct PackageOf<8> {
  using type = EightBytes;
};
template <>
struct PackageOf<4> {
  using type = uint32_t;
};
template <>
struct PackageOf<2> {
  using type = uint16_t;
};
template <>
struct PackageOf<1> {
  using type = uint8_t;
};

#ifndef KVIO_ROCM

// Reads a package that this kernel reads once, so that it does not displace other lines from L1. The address must be a
// multiple of the package size. @warning orders nothing; the bytes must not be written by the same kernel.
template <class T>
__device__ __forceinline__ T load_once(const void* address) {
  T value;
  if constexpr (sizeof(T) == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
  } else {
    value = *static_cast<const volatile T*>(address);
  }
  return value;
}

// As load_once, if `wanted`; else `value` stays. It must hold something before: a load that may not happen into an
// undefined register is given a second register by the assembler, and then the loads of a loop wait for one another.
template <class T>
__device__ __forceinline__ void load_once_if(bool wanted, T& value, const void* address) {
  const int predicate = wanted;
  if constexpr (sizeof(T) == 16) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(address), "r"(predicate));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(value.x), "+r"(value.y)
                 : "l"(address), "r"(predicate));
  } else if (wanted) {
    value = *static_cast<const volatile T*>(address);
  }
}

// Starts loading a word if `wanted`; else it stays. For values that are used much later. @warning two such loads into
// one register, even under predicates that exclude each other, wait for one another.
__device__ __forceinline__ void load_word_if(bool wanted, uint32_t& word, const void* address) {
  const int predicate = wanted;
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p ld.global.u32 %0, [%1];\n}"
               : "+r"(word)
               : "l"(address), "r"(predicate));
}

// The same of two words that follow each other, at a multiple of 8.
__device__ __forceinline__ void load_words_if(bool wanted, uint32_t& low, uint32_t& high, const void* address) {
  const int predicate = wanted;
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p ld.global.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(low), "+r"(high)
               : "l"(address), "r"(predicate));
}

// Called for all that was loaded before stores that depend on conditions, outside of these: AMD's compilers cannot know
// inside of one what is on its way, and each store would wait for the one before it. Nothing on CUDA.
template <class T>
__device__ __forceinline__ void await_loaded(T&) {}

template <class T>
__device__ __forceinline__ void store_once(void* address, const T& value) {
  if constexpr (sizeof(T) == 16) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y)
                 : "memory");
  } else {
    *static_cast<volatile T*>(address) = value;
  }
}

// As store_once, if `wanted`.
template <class T>
__device__ __forceinline__ void store_once_if(bool wanted, void* address, const T& value) {
  const int predicate = wanted;
  if constexpr (sizeof(T) == 16) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n @p st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::
            "l"(address),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(predicate)
        : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};\n}" ::"l"(
            address),
        "r"(value.x), "r"(value.y), "r"(predicate)
        : "memory");
  } else if (wanted) {
    *static_cast<volatile T*>(address) = value;
  }
}

// Begins to copy 16 bytes to shared memory, past L1; needs no registers while they are on their way.
__device__ __forceinline__ void begin_copy_to_shared(void* shared, const void* address) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(address)
      : "memory");
}

// Waits for all that this thread began to copy, and sees it from here on.
__device__ __forceinline__ void await_copies_to_shared() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Every lane gets the pointer that lane `lane` holds. All lanes of the wave must call, here and below.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, uint32_t lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), static_cast<int>(lane)));
}

// Every lane gets what the lane `step` before it holds; the first `step` lanes get anything.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, uint32_t step) {
  return __shfl_up_sync(0xffffffffu, value, step);
}

// Every lane gets what lane `lane` holds.
__device__ __forceinline__ uint32_t shuffle(uint32_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}

__device__ __forceinline__ bool all_lanes(bool vote) { return __all_sync(0xffffffffu, vote); }

__device__ __forceinline__ void sync_wave() { __syncwarp(); }

// All threads of a cluster's blocks arrive, and wait until all have arrived. Nothing before sm_90.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Says no more than that what this thread has loaded and used was loaded; does not wait for what it has begun.
__device__ __forceinline__ void cluster_arrive_after_loads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Lets others run while this thread looks again and again for something that they do.
__device__ __forceinline__ void pause() { __nanosleep(200); }

// A kernel that was launched early begins once all blocks of the one before have called the first, and has its memory
// behind the second. Nothing before sm_90.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- flags in device memory ----------------------------------------------------------------------------------------

// Stores a flag after everything that this thread has written, or has seen written, on this GPU.
__device__ __forceinline__ void store_release(int64_t* flag, int64_t value) {
  asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Reads a flag; what was written before it was stored is visible to this thread, and to what is ordered after it.
__device__ __forceinline__ int64_t load_acquire(const int64_t* flag) {
  int64_t value;
  asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Nanoseconds of a clock that all threads share; only differences mean anything.
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

#endif  // KVIO_ROCM

// The bytes of a piece beyond its whole packages, `bytes` < kWidth, both addresses multiples of kWidth: each halving of
// the width is used at most once, so nothing is truncated and nothing beyond the piece is touched.
template <int kWidth>
__device__ __forceinline__ void copy_remainder(char* dst, const char* src, uint32_t bytes) {
  if constexpr (kWidth > 1) {
    constexpr int kHalf = kWidth / 2;
    if (bytes >= kHalf) {
      using Package = typename PackageOf<kHalf>::type;
      store_once(dst, load_once<Package>(src));
      dst += kHalf;
      src += kHalf;
      bytes -= kHalf;
    }
    copy_remainder<kHalf>(dst, src, bytes);
  }
}

// Division of numbers below 2^31 by a launch-time constant: one multiply and a shift.
struct FastDivide {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDivide() = default;
  explicit FastDivide(uint32_t d) : divisor(d) {
    if (d <= 1) return;
    uint32_t log = 0;
    while (log < 32 && (uint64_t{1} << log) < d) ++log;
    const uint32_t power = 31 + log;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << power) + d - 1) / d);
    shift = power - 32;
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return divisor > 1 ? __umulhi(n, multiplier) >> shift : n;
  }
};

}  // namespace kvio::gpu
