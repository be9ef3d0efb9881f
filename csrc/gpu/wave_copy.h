// The row copy for waves of 32 or 64 lanes: one row by one lane group, the lane count a parameter. One source for HIP,
// CUDA and the CPU. It touches memory through `Memory` alone, so tests/native runs it lane by lane and sees every
// access. Lanes tell each other nothing; every byte of a row is read once and written once.
//
// What shaped it (numbers of its first authors, MI355X, waves of 64; this source has not been run on AMD hardware):
// * 16 bytes a lane only where they fill the wave: rows of 1,024 bytes gain 13-20% at small batch, rows of 512 leave
//   half of it idle and lose 14-22% against 8 bytes a lane. Hence the gate, and whole steps only.
// * A host row is read once and then used where it went: wide loads are non-temporal, stores are cached. Narrow loads
//   are cached, since two steps may share a line.
// * A load from the host takes longer than all else here, so what is left after the long loop (wide steps, words and
//   bytes) is loaded before any of it is stored: a row of 1,152 bytes is one trip, not two.
#pragma once

#include <cstdint>

#if defined(__HIP__)
#define KVIO_LANE __attribute__((device, always_inline)) inline
#define KVIO_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#include "gpu/primitives.cuh"
#define KVIO_LANE __device__ __forceinline__
#define KVIO_UNROLL _Pragma("unroll")
#else
#define KVIO_LANE inline
#define KVIO_UNROLL
#endif

namespace kvio::gpu {

constexpr int kWideBytes = 16;     // a lane and step, above the gate
constexpr int kNarrowBytes = 8;    // a lane and step at most, below it and after the wide steps
constexpr int kLoadsInFlight = 4;  // of a lane, where the row is long enough

// The gate: whether a row is moved 16 bytes a lane while these fill all lanes.
KVIO_LANE constexpr bool is_wide_row(uint64_t dst, uint64_t src, int64_t row_bytes, int lanes) {
  return (dst | src) % kWideBytes == 0 && row_bytes >= int64_t{lanes} * kWideBytes;
}

// Packages that a lane holds between reading and writing them: `kCount` at most, those of a lane `kLanes` packages
// apart. @warning load and store must be given the same stretch.
template <int kLanes, int kBytes, int kCount, class Memory>
struct LanePackages {
  typename Memory::template Package<kBytes> held[kCount] = {};

  static KVIO_LANE int64_t offset(uint32_t lane, int j) { return (int64_t{j} * kLanes + lane) * kBytes; }

  KVIO_LANE void load_one(const Memory& memory, int j, const char* src) {
    if constexpr (kBytes == kWideBytes) {
      held[j] = memory.template load_once<kBytes>(src);
    } else {
      held[j] = memory.template load<kBytes>(src);
    }
  }

  // Of a stretch that has kCount packages for every lane.
  KVIO_LANE void load_all(const Memory& memory, uint32_t lane, const char* src) {
    KVIO_UNROLL
    for (int j = 0; j < kCount; ++j) load_one(memory, j, src + offset(lane, j));
  }
  KVIO_LANE void store_all(const Memory& memory, uint32_t lane, char* dst) const {
    KVIO_UNROLL
    for (int j = 0; j < kCount; ++j) memory.template store<kBytes>(dst + offset(lane, j), held[j]);
  }

  // Of a stretch of `bytes`, whole packages. Between the two, `await`.
  KVIO_LANE void load_below(const Memory& memory, uint32_t lane, const char* src, int64_t bytes) {
    KVIO_UNROLL
    for (int j = 0; j < kCount; ++j) {
      if (offset(lane, j) < bytes) load_one(memory, j, src + offset(lane, j));
    }
  }
  KVIO_LANE void await(const Memory& memory) {
    KVIO_UNROLL
    for (int j = 0; j < kCount; ++j) memory.await(held[j]);
  }
  KVIO_LANE void store_below(const Memory& memory, uint32_t lane, char* dst, int64_t bytes) const {
    KVIO_UNROLL
    for (int j = 0; j < kCount; ++j) {
      if (offset(lane, j) < bytes) memory.template store<kBytes>(dst + offset(lane, j), held[j]);
    }
  }
};

// The bytes after the last whole package of kBytes.
template <int kLanes, int kBytes, class Memory>
using LaneTail = LanePackages<kLanes, 1, (kBytes - 1 + kLanes - 1) / kLanes, Memory>;

// Packages of kBytes, both rows at multiples of it, then the byte tail.
template <int kLanes, int kBytes, class Memory>
KVIO_LANE void copy_narrow(const Memory& memory, uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  constexpr int64_t kTrip = int64_t{kLanes} * kBytes * kLoadsInFlight;
  LanePackages<kLanes, kBytes, kLoadsInFlight, Memory> words;
  for (; row_bytes >= kTrip; row_bytes -= kTrip) {
    words.load_all(memory, lane, src);
    words.store_all(memory, lane, dst);
    src += kTrip;
    dst += kTrip;
  }
  const int64_t whole = row_bytes / kBytes * kBytes;
  words.load_below(memory, lane, src, whole);
  if constexpr (kBytes > 1) {
    LaneTail<kLanes, kBytes, Memory> tail;
    tail.load_below(memory, lane, src + whole, row_bytes - whole);
    words.await(memory);
    tail.await(memory);
    words.store_below(memory, lane, dst, whole);
    tail.store_below(memory, lane, dst + whole, row_bytes - whole);
  } else {
    words.await(memory);
    words.store_below(memory, lane, dst, whole);
  }
}

// Whole steps of 16 bytes a lane, then words (two steps at most), then the byte tail.
template <int kLanes, class Memory>
KVIO_LANE void copy_wide(const Memory& memory, uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  constexpr int64_t kStep = int64_t{kLanes} * kWideBytes;
  constexpr int64_t kTrip = kStep * kLoadsInFlight;
  for (; row_bytes >= kTrip; row_bytes -= kTrip) {
    LanePackages<kLanes, kWideBytes, kLoadsInFlight, Memory> wide;
    wide.load_all(memory, lane, src);
    wide.store_all(memory, lane, dst);
    src += kTrip;
    dst += kTrip;
  }
  const int64_t steps = row_bytes / kStep * kStep;
  const int64_t whole = row_bytes / kNarrowBytes * kNarrowBytes;
  LanePackages<kLanes, kWideBytes, kLoadsInFlight - 1, Memory> wide;
  LanePackages<kLanes, kNarrowBytes, kWideBytes / kNarrowBytes, Memory> words;
  LaneTail<kLanes, kNarrowBytes, Memory> tail;
  wide.load_below(memory, lane, src, steps);
  words.load_below(memory, lane, src + steps, whole - steps);
  tail.load_below(memory, lane, src + whole, row_bytes - whole);
  wide.await(memory);
  words.await(memory);
  tail.await(memory);
  wide.store_below(memory, lane, dst, steps);
  words.store_below(memory, lane, dst + steps, whole - steps);
  tail.store_below(memory, lane, dst + whole, row_bytes - whole);
}

// Copies `row_bytes` from `src` to `dst`, any number and any alignment of either. Called by each of kLanes lanes, a
// wave or a part of it, with the same rows; lanes need not be together, so on CUDA a group of 64 threads will do.
// @warning rows must not overlap, and nobody may write the source meanwhile; orders nothing: who reads the destination
// waits for all lanes first.
template <int kLanes, class Memory>
KVIO_LANE void wave_copy(const Memory& memory, uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  static_assert(kLanes >= 1 && kLanes <= 64 && (kLanes & (kLanes - 1)) == 0, "a wave, or a power of two of its lanes");
  const auto to = reinterpret_cast<uint64_t>(dst);
  const auto from = reinterpret_cast<uint64_t>(src);
  if (is_wide_row(to, from, row_bytes, kLanes)) return copy_wide<kLanes>(memory, lane, dst, src, row_bytes);
  const uint64_t bits = to | from;
  if (bits % 8 == 0) return copy_narrow<kLanes, 8>(memory, lane, dst, src, row_bytes);
  if (bits % 4 == 0) return copy_narrow<kLanes, 4>(memory, lane, dst, src, row_bytes);
  if (bits % 2 == 0) return copy_narrow<kLanes, 2>(memory, lane, dst, src, row_bytes);
  copy_narrow<kLanes, 1>(memory, lane, dst, src, row_bytes);
}

#if defined(__HIP__)

template <int kBytes>
struct Stored;
template <>
struct Stored<16> {
  typedef uint32_t type __attribute__((ext_vector_type(4), may_alias));
};
template <>
struct Stored<8> {
  typedef uint64_t type __attribute__((may_alias));
};
template <>
struct Stored<4> {
  typedef uint32_t type __attribute__((may_alias));
};
template <>
struct Stored<2> {
  typedef uint16_t type __attribute__((may_alias));
};
template <>
struct Stored<1> {
  typedef uint8_t type;
};

// Whole registers, which is what `await` can name.
template <int kBytes>
struct InRegisters {
  using type = typename Stored<kBytes>::type;
};
template <>
struct InRegisters<2> {
  using type = uint32_t;
};
template <>
struct InRegisters<1> {
  using type = uint32_t;
};

// Rows lie in device memory or in page-locked host memory: said so, because loads that might be of LDS wait for it too.
struct GlobalMemory {
  template <int kBytes>
  using Package = typename InRegisters<kBytes>::type;
  template <int kBytes>
  using Global = __attribute__((address_space(1))) typename Stored<kBytes>::type;

  template <int kBytes>
  KVIO_LANE Package<kBytes> load_once(const char* address) const {
    return __builtin_nontemporal_load((const Global<kBytes>*)address);
  }
  template <int kBytes>
  KVIO_LANE Package<kBytes> load(const char* address) const {
    return *(const Global<kBytes>*)address;
  }
  template <int kBytes>
  KVIO_LANE void store(char* address, Package<kBytes> value) const {
    *(Global<kBytes>*)address = static_cast<typename Stored<kBytes>::type>(value);
  }
  // Waits here, outside of all branches. A store inside a branch cannot tell how many loads and stores are on their way
  // and waits for all of them, the store before it included.
  template <class T>
  KVIO_LANE void await(T& value) const {
    asm volatile("" : "+v"(value));
  }
};

template <int kLanes>
KVIO_LANE void wave_copy(uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  wave_copy<kLanes>(GlobalMemory{}, lane, dst, src, row_bytes);
}

#elif defined(__CUDACC__)

struct GlobalMemory {
  template <int kBytes>
  using Package = typename PackageOf<kBytes>::type;

  template <int kBytes>
  KVIO_LANE Package<kBytes> load_once(const char* address) const {
    return kvio::gpu::load_once<Package<kBytes> >(address);
  }
  template <int kBytes>
  KVIO_LANE Package<kBytes> load(const char* address) const {
    return *reinterpret_cast<const Package<kBytes>*>(address);
  }
  template <int kBytes>
  KVIO_LANE void store(char* address, const Package<kBytes>& value) const {
    *reinterpret_cast<Package<kBytes>*>(address) = value;
  }
  template <class T>
  KVIO_LANE void await(T&) const {}
};

template <int kLanes>
KVIO_LANE void wave_copy(uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  __builtin_assume(__isGlobal(dst));
  __builtin_assume(__isGlobal(src));
  wave_copy<kLanes>(GlobalMemory{}, lane, dst, src, row_bytes);
}

#endif

}  // namespace kvio::gpu
