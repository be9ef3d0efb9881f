// primitives.cuh for AMD's GPUs: the same names and contracts in HIP, with compiler builtins only, so that no device
// library of ROCm's is needed to compile. Included by primitives.cuh alone.
#pragma once

#include <cstdint>

namespace kvio::gpu {

// ---- what CUDA has built in -----------------------------------------------------------------------------------------

struct ThreadIndex {
  struct X {
    __device__ __forceinline__ operator uint32_t() const { return __builtin_amdgcn_workitem_id_x(); }
  } x;
};
struct BlockIndex {
  struct X {
    __device__ __forceinline__ operator uint32_t() const { return __builtin_amdgcn_workgroup_id_x(); }
  } x;
};
struct GridSize {
  struct X {
    __device__ __forceinline__ operator uint32_t() const {
      return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
    }
  } x;
};
static constexpr ThreadIndex threadIdx{};
static constexpr BlockIndex blockIdx{};
static constexpr GridSize gridDim{};

template <class T>
__device__ __forceinline__ T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__device__ __forceinline__ T max(T a, T b) {
  return a < b ? b : a;
}

__device__ __forceinline__ uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

template <class T>
__device__ __forceinline__ T atomicAdd(T* at, T value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T, class Value>
__device__ __forceinline__ T atomicSub(T* at, Value value) {
  return atomicAdd(at, static_cast<T>(-static_cast<T>(value)));
}
template <class T>
__device__ __forceinline__ T atomicMin(T* at, T value) {
  return __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ __forceinline__ T atomicMax(T* at, T value) {
  return __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ __forceinline__ T atomicCAS(T* at, T expected, T value) {
  __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
__device__ __forceinline__ void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
__device__ __forceinline__ void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }

// ---- packages -------------------------------------------------------------------------------------------------------

using Words2 = uint32_t __attribute__((ext_vector_type(2)));
using Words4 = uint32_t __attribute__((ext_vector_type(4)));
using EightBytes = uint64_t;  // no vector: of an array of such clang 22 makes one long vector, most of which it spills

// Memory that kernels move is never shared memory; a generic address would be looked up there first.
template <class T>
using Global = __attribute__((address_space(1))) T;

template <class T>
__device__ __forceinline__ const Global<T>* as_global(const void* address) {
  return (const Global<T>*)address;
}
template <class T>
__device__ __forceinline__ Global<T>* as_global(void* address) {
  return (Global<T>*)address;
}

// Loads are non-temporal: what is read once need not stay in a cache. Stores are plain: the rows are read next.
template <class T>
__device__ __forceinline__ T load_once(const void* address) {
  return __builtin_nontemporal_load(as_global<T>(address));
}

template <class T>
__device__ __forceinline__ void load_once_if(bool wanted, T& value, const void* address) {
  if (wanted) value = load_once<T>(address);
}

__device__ __forceinline__ void load_word_if(bool wanted, uint32_t& word, const void* address) {
  if (wanted) word = *as_global<uint32_t>(address);
}

__device__ __forceinline__ void load_words_if(bool wanted, uint32_t& low, uint32_t& high, const void* address) {
  if (!wanted) return;
  const Words2 words = *as_global<Words2>(address);
  low = words.x;
  high = words.y;
}

template <class T>
__device__ __forceinline__ void await_loaded(T& value) {
  if constexpr (sizeof(T) >= 4) {
    asm volatile("" : "+v"(value));
  } else {
    uint32_t word = value;
    asm volatile("" : "+v"(word));
    value = static_cast<T>(word);
  }
}

template <class T>
__device__ __forceinline__ void store_once(void* address, const T& value) {
  *as_global<T>(address) = value;
}

template <class T>
__device__ __forceinline__ void store_once_if(bool wanted, void* address, const T& value) {
  if (wanted) store_once(address, value);
}

// ---- a wave ---------------------------------------------------------------------------------------------------------

// What lane `lane` holds.
__device__ __forceinline__ uint32_t shuffle_word(uint32_t word, uint32_t lane) {
  return static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), static_cast<int>(word)));
}

__device__ __forceinline__ uint32_t lane_number() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, uint32_t lane) {
  const uint64_t bits = reinterpret_cast<uint64_t>(pointer);
  const uint64_t low = shuffle_word(static_cast<uint32_t>(bits), lane);
  const uint64_t high = shuffle_word(static_cast<uint32_t>(bits >> 32), lane);
  return reinterpret_cast<T*>(high << 32 | low);
}

template <class T>
__device__ __forceinline__ T shuffle_up(T value, uint32_t step) {
  static_assert(sizeof(T) == 4, "a word");
  return static_cast<T>(shuffle_word(static_cast<uint32_t>(value), lane_number() - step));
}

__device__ __forceinline__ uint32_t shuffle(uint32_t value, uint32_t lane) { return shuffle_word(value, lane); }

// A ballot has the bits of lanes that are active, which all of them are.
__device__ __forceinline__ bool all_lanes(bool vote) {
  return __builtin_amdgcn_ballot_w64(vote) == __builtin_amdgcn_ballot_w64(true);
}

// A wave runs in lockstep: nothing but the compiler can part its lanes.
__device__ __forceinline__ void sync_wave() { __builtin_amdgcn_wave_barrier(); }

// There are no clusters, and a kernel begins when the one before has ended.
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_arrive_after_loads() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void pause() { __builtin_amdgcn_s_sleep(8); }
__device__ __forceinline__ void allow_next_launch() {}
__device__ __forceinline__ void await_previous_launch() {}

// ---- flags in device memory -----------------------------------------------------------------------------------------

__device__ __forceinline__ void store_release(int64_t* flag, int64_t value) {
  __hip_atomic_store(flag, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}

__device__ __forceinline__ int64_t load_acquire(const int64_t* flag) {
  return __hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}

// A counter of 100 MHz on every target.
__device__ __forceinline__ uint64_t clock_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }

}  // namespace kvio::gpu
