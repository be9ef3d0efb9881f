// The row copy for waves of 32 or 64 lanes: one row by one lane group, the lane count a parameter, and the loop over
// the rows of a wave. One source for HIP, CUDA and the CPU. It touches memory through `Memory` alone, so tests/native
// runs it lane by lane and sees every access. Lanes tell each other nothing but the addresses of rows; every byte of a
// row is read once and written once.
//
// What shaped it (numbers of its first authors, MI355X, waves of 64; this source has not been run on AMD hardware):
// * 16 bytes a lane only where they fill the wave: rows of 1,024 bytes gain 13-20% at small batch, rows of 512 leave
//   half of it idle and lose 14-22% against 8 bytes a lane. Hence the gate, and whole steps only.
// * A host row is read once and then used where it went: wide loads are non-temporal, stores are cached. Narrow loads
//   are cached, since two steps may share a line.
// * A load from the host takes longer than all else here, so what is left after the long loop (wide steps, words and
//   bytes) is loaded before any of it is stored: a row of 1,152 bytes is one trip, not two.
// * For the same reason several rows go together where a kernel has registers for them.
#pragma once

#include <cstdint>

#include "plan/copy_round.h"

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

constexpr int kWideBytes = 16;   // a lane and step, above the gate
constexpr int kNarrowBytes = 8;  // a lane and step at most, below it and after the wide steps

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
      memory.await(held[j]);  // in a register of its own: one shared with another zero is waited for and copied
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

// What a lane holds of the last trip of a row: packages of kBytes, then the byte tail.
template <int kLanes, int kBytes, class Memory>
struct NarrowEnd {
  static constexpr bool kHasTail = kBytes > 1;
  LanePackages<kLanes, kBytes, kWaveCopyLoads, Memory> words;
  LaneTail<kLanes, kHasTail ? kBytes : 2, Memory> tail;

  KVIO_LANE void load(const Memory& memory, uint32_t lane, const char* src, int64_t bytes) {
    const int64_t whole = bytes / kBytes * kBytes;
    words.load_below(memory, lane, src, whole);
    if constexpr (kHasTail) tail.load_below(memory, lane, src + whole, bytes - whole);
  }
  KVIO_LANE void await(const Memory& memory) {
    words.await(memory);
    if constexpr (kHasTail) tail.await(memory);
  }
  KVIO_LANE void store(const Memory& memory, uint32_t lane, char* dst, int64_t bytes) const {
    const int64_t whole = bytes / kBytes * kBytes;
    words.store_below(memory, lane, dst, whole);
    if constexpr (kHasTail) tail.store_below(memory, lane, dst + whole, bytes - whole);
  }
};

// The same of a wide row: whole steps of 16 bytes a lane, then words (two steps at most), then the byte tail.
template <int kLanes, class Memory>
struct WideEnd {
  static constexpr int64_t kStep = int64_t{kLanes} * kWideBytes;
  LanePackages<kLanes, kWideBytes, kWaveCopyLoads - 1, Memory> wide;
  LanePackages<kLanes, kNarrowBytes, kWideBytes / kNarrowBytes, Memory> words;
  LaneTail<kLanes, kNarrowBytes, Memory> tail;

  KVIO_LANE void load(const Memory& memory, uint32_t lane, const char* src, int64_t bytes) {
    const int64_t steps = bytes / kStep * kStep;
    const int64_t whole = bytes / kNarrowBytes * kNarrowBytes;
    wide.load_below(memory, lane, src, steps);
    words.load_below(memory, lane, src + steps, whole - steps);
    tail.load_below(memory, lane, src + whole, bytes - whole);
  }
  KVIO_LANE void await(const Memory& memory) {
    wide.await(memory);
    words.await(memory);
    tail.await(memory);
  }
  KVIO_LANE void store(const Memory& memory, uint32_t lane, char* dst, int64_t bytes) const {
    const int64_t steps = bytes / kStep * kStep;
    const int64_t whole = bytes / kNarrowBytes * kNarrowBytes;
    wide.store_below(memory, lane, dst, steps);
    words.store_below(memory, lane, dst + steps, whole - steps);
    tail.store_below(memory, lane, dst + whole, bytes - whole);
  }
};

// Rows that a lane group moves at once. Where there are several, `dst` is null for one that is not there.
template <int kRows>
struct LaneRows {
  char* dst[kRows];
  const char* src[kRows];

  KVIO_LANE bool has(int row) const { return kRows == 1 || dst[row] != nullptr; }
};

// Trips of kBytes a lane and load while the rows are that long, then what `End` holds.
template <int kLanes, int kBytes, class End, int kRows, class Memory>
KVIO_LANE void copy_in_trips(const Memory& memory, uint32_t lane, const LaneRows<kRows>& rows, int64_t row_bytes) {
  constexpr int64_t kTrip = int64_t{kLanes} * kBytes * kWaveCopyLoads;
  int64_t done = 0;
  for (; row_bytes - done >= kTrip; done += kTrip) {
    LanePackages<kLanes, kBytes, kWaveCopyLoads, Memory> held[kRows];
    KVIO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows.has(r)) held[r].load_all(memory, lane, rows.src[r] + done);
    }
    if constexpr (kRows > 1) {
      KVIO_UNROLL
      for (int r = 0; r < kRows; ++r) held[r].await(memory);
    }
    KVIO_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows.has(r)) held[r].store_all(memory, lane, rows.dst[r] + done);
    }
  }
  const int64_t left = row_bytes - done;
  End ends[kRows];
  KVIO_UNROLL
  for (int r = 0; r < kRows; ++r) ends[r].load(memory, lane, rows.src[r] + done, rows.has(r) ? left : 0);
  KVIO_UNROLL
  for (int r = 0; r < kRows; ++r) ends[r].await(memory);
  KVIO_UNROLL
  for (int r = 0; r < kRows; ++r) ends[r].store(memory, lane, rows.dst[r] + done, rows.has(r) ? left : 0);
}

// Packages of kBytes, all rows at multiples of it, then the byte tail.
template <int kLanes, int kBytes, int kRows, class Memory>
KVIO_LANE void copy_narrow(const Memory& memory, uint32_t lane, const LaneRows<kRows>& rows, int64_t row_bytes) {
  copy_in_trips<kLanes, kBytes, NarrowEnd<kLanes, kBytes, Memory> >(memory, lane, rows, row_bytes);
}

// Whole steps of 16 bytes a lane, then words, then the byte tail.
template <int kLanes, int kRows, class Memory>
KVIO_LANE void copy_wide(const Memory& memory, uint32_t lane, const LaneRows<kRows>& rows, int64_t row_bytes) {
  copy_in_trips<kLanes, kWideBytes, WideEnd<kLanes, Memory> >(memory, lane, rows, row_bytes);
}

// Copies `row_bytes` from `src` to `dst`, any number and any alignment of either; both lie at multiples of kAlignment,
// which spares code. Called by each of kLanes lanes, a wave or a part of it, with the same rows; lanes need not be
// together, so on CUDA a group of 64 threads will do.
// @warning rows must not overlap, and nobody may write the source meanwhile; orders nothing: who reads the destination
// waits for all lanes first.
template <int kLanes, int kAlignment = 1, class Memory>
KVIO_LANE void wave_copy(const Memory& memory, uint32_t lane, char* dst, const char* src, int64_t row_bytes) {
  static_assert(kLanes >= 1 && kLanes <= 64 && (kLanes & (kLanes - 1)) == 0, "a wave, or a power of two of its lanes");
  const auto to = reinterpret_cast<uint64_t>(dst);
  const auto from = reinterpret_cast<uint64_t>(src);
  const LaneRows<1> row = {{dst}, {src}};
  if (is_wide_row(to, from, row_bytes, kLanes)) return copy_wide<kLanes>(memory, lane, row, row_bytes);
  const uint64_t bits = to | from;
  if (kAlignment >= 8 || bits % 8 == 0) return copy_narrow<kLanes, 8>(memory, lane, row, row_bytes);
  if (kAlignment >= 4 || bits % 4 == 0) return copy_narrow<kLanes, 4>(memory, lane, row, row_bytes);
  if (kAlignment >= 2 || bits % 2 == 0) return copy_narrow<kLanes, 2>(memory, lane, row, row_bytes);
  copy_narrow<kLanes, 1>(memory, lane, row, row_bytes);
}

// The same of several rows of one size, whose loads are on their way together.
// @warning every row that is there lies at a multiple of 16, source and destination.
template <int kLanes, int kRows, class Memory>
KVIO_LANE void wave_copy_aligned(const Memory& memory, uint32_t lane, const LaneRows<kRows>& rows, int64_t row_bytes) {
  if (is_wide_row(0, 0, row_bytes, kLanes)) return copy_wide<kLanes>(memory, lane, rows, row_bytes);
  copy_narrow<kLanes, kNarrowBytes>(memory, lane, rows, row_bytes);
}

// Rows that a lane group moves at once where all rows lie at multiples of kAlignment.
template <int kAlignment>
constexpr int kRowsAtOnce = rows_at_once(kAlignment);

// Moves rows whose addresses the lanes of a wave hold, the first `count` of them, `dst` null in a lane whose row is not
// to be written. Groups of kLanes lanes take a row each, or several where kAlignment is 16; sources and destinations
// lie at multiples of kAlignment. All lanes of the wave call it. `Wave` has the number of them, and tells a lane what
// another one holds.
template <int kLanes, int kAlignment, class Wave, class Memory>
KVIO_LANE void wave_copy_rows(const Wave& wave, const Memory& memory, uint32_t lane, uint32_t count, char* dst,
                              const char* src, int64_t row_bytes) {
  constexpr uint32_t kGroups = Wave::kLanes / kLanes;
  constexpr int kRows = kRowsAtOnce<kAlignment>;
  // What follows from the lane is worked out from here on. Kept through the kernel for every kLanes, it takes so many
  // registers that scratch memory is needed.
  memory.await(lane);
  for (uint32_t first = 0; first < count; first += kGroups * kRows) {
    LaneRows<kRows> rows;
    KVIO_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint32_t row = first + r * kGroups + lane / kLanes;
      rows.src[r] = wave.shuffle(src, row % Wave::kLanes);
      char* to = wave.shuffle(dst, row % Wave::kLanes);
      rows.dst[r] = row < count ? to : nullptr;
    }
    if constexpr (kRows > 1) {
      wave_copy_aligned<kLanes>(memory, lane % kLanes, rows, row_bytes);
    } else if (rows.dst[0] != nullptr) {
      wave_copy<kLanes, kAlignment>(memory, lane % kLanes, rows.dst[0], rows.src[0], row_bytes);
    }
  }
}

// The same, `lanes` a power of two.
template <int kAlignment, class Wave, class Memory, int kLanes = Wave::kLanes>
KVIO_LANE void wave_copy_rows(uint32_t lanes, const Wave& wave, const Memory& memory, uint32_t lane, uint32_t count,
                              char* dst, const char* src, int64_t row_bytes) {
  if (lanes == kLanes) return wave_copy_rows<kLanes, kAlignment>(wave, memory, lane, count, dst, src, row_bytes);
  if constexpr (kLanes > 1) {
    wave_copy_rows<kAlignment, Wave, Memory, kLanes / 2>(lanes, wave, memory, lane, count, dst, src, row_bytes);
  }
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
