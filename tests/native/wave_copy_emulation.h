// What the emulations of gpu/wave_copy.h share: memory that looks at every access, rows with canaries around them, and
// the contract of the copy, told without its code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/wave_copy.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define WITH_SANITIZER
#endif

namespace emulation {

// A sanitizer watches: it has to find accesses outside of rows, and nothing else looks for them.
#ifdef WITH_SANITIZER
constexpr bool kWatched = true;
#else
constexpr bool kWatched = false;
#endif

inline std::mt19937 rng(20);
inline std::string fault;  // put in on purpose

inline int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }

inline std::vector<uint32_t> order_of(int lanes, bool shuffled) {
  std::vector<uint32_t> order(static_cast<size_t>(lanes));
  std::iota(order.begin(), order.end(), 0u);
  if (shuffled) std::shuffle(order.begin(), order.end(), rng);
  return order;
}

constexpr int64_t kLongest = 4700;
constexpr int64_t kRowFive = 5140;  // row 5 of rows of 1,028 bytes: no multiple of 8

// Both sides of each gate and of each count of loads in flight, with all remainders of a word; sizes that engines have.
inline std::set<int64_t> chosen_sizes() {
  std::set<int64_t> sizes = {1, 2, 3, 4, 20, 512, 576, 656, 1024, 1028, 1032, 1040, 1152, 2304, 4608, kLongest};
  for (const int64_t edge : {256, 512, 1024, 1536, 2048, 4096}) {
    for (int64_t bytes = edge - 9; bytes <= edge + 9; ++bytes) sizes.insert(bytes);
  }
  for (int64_t bytes = 5; bytes < 80; bytes += 5) sizes.insert(bytes);
  return sizes;
}

// A row at a given distance from a multiple of 16, with canaries around it. What is behind the row belongs to nobody
// when a sanitizer watches.
class Room {
 public:
  Room(int64_t offset, int64_t bytes, char seed) {
    constexpr int64_t kBehind = kWatched ? 0 : 64;
    memory_.resize(static_cast<size_t>(offset + bytes + kBehind));
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<char>(static_cast<int>(i * 167 >> 3) + seed);
    offset_ = offset;
    before_ = memory_;
  }

  char* row() { return memory_.data() + offset_; }
  void expect(const char* bytes, int64_t count) {
    std::memcpy(before_.data() + offset_, bytes, static_cast<size_t>(count));
  }
  bool as_expected() const { return memory_ == before_; }

 private:
  std::vector<char> memory_;
  std::vector<char> before_;
  int64_t offset_;
};

// One row, and what was done with it.
struct Row {
  Room from;
  Room to;
  int64_t bytes;
  bool wanted = true;
  int64_t loads[17] = {};  // by size, ordinary ones
  int64_t loads_once[17] = {};
  int64_t stores[17] = {};

  Row(int64_t bytes, int64_t dst_offset, int64_t src_offset, int number = 0)
      : from(src_offset, bytes, static_cast<char>(1 + 5 * number)),
        to(dst_offset, bytes, static_cast<char>(77 + 3 * number)),
        bytes(bytes) {}
};

// Rows by address.
class Rows {
 public:
  void add(int64_t bytes, int64_t dst_offset, int64_t src_offset) {
    rows_.push_back(std::make_unique<Row>(bytes, dst_offset, src_offset, static_cast<int>(rows_.size())));
    Row* row = rows_.back().get();
    const auto put = [row](std::vector<Place>* places, const char* begin) {
      places->insert(std::upper_bound(places->begin(), places->end(), Place{begin, row}), Place{begin, row});
    };
    put(&by_src_, row->from.row());
    put(&by_dst_, row->to.row());
  }

  size_t size() const { return rows_.size(); }
  Row& operator[](size_t number) const { return *rows_[number]; }

  // The row in which an access of `size` bytes lies, else null. Without bounds where a sanitizer watches.
  Row* with_src(const char* address, int64_t size) const { return find(by_src_, address, size); }
  Row* with_dst(const char* address, int64_t size) const { return find(by_dst_, address, size); }

 private:
  struct Place {
    const char* begin;
    Row* row;

    bool operator<(const Place& other) const { return begin < other.begin; }
  };

  static Row* find(const std::vector<Place>& places, const char* address, int64_t size) {
    const auto after = std::upper_bound(places.begin(), places.end(), Place{address, nullptr});
    if (after == places.begin()) return nullptr;
    const Place& place = *(after - 1);
    if (!kWatched && address + size > place.begin + place.row->bytes) return nullptr;
    return place.row;
  }

  std::vector<std::unique_ptr<Row>> rows_;
  std::vector<Place> by_src_;
  std::vector<Place> by_dst_;
};

struct Log {
  int64_t trips = 0;  // of the current lane: loads with no store between them
  bool loading = false;
  const char* wrong = nullptr;

  void next_lane() {
    trips = 0;
    loading = false;
  }
};

template <int kBytes>
struct Bytes {
  char byte[kBytes];
};

class RecordingMemory {
 public:
  RecordingMemory(const Rows& rows, Log* log) : rows_(rows), log_(log) {}

  template <int kBytes>
  using Package = Bytes<kBytes>;

  template <int kBytes>
  Bytes<kBytes> load_once(const char* address) const {
    return read<kBytes>(address, &Row::loads_once);
  }
  template <int kBytes>
  Bytes<kBytes> load(const char* address) const {
    return read<kBytes>(address, &Row::loads);
  }
  template <int kBytes>
  void store(char* address, const Bytes<kBytes>& value) const {
    log_->loading = false;
    if (!look_at(rows_.with_dst(address, kBytes), address, kBytes, &Row::stores,
                 "a store outside of the destination row", "a misaligned store")) {
      return;
    }
    std::memcpy(address, value.byte, kBytes);
  }
  template <class T>
  void await(T&) const {}

 private:
  using Counts = int64_t (Row::*)[17];

  template <int kBytes>
  Bytes<kBytes> read(const char* address, Counts counts) const {
    if (!log_->loading) ++log_->trips;
    log_->loading = true;
    Bytes<kBytes> value = {};
    if (look_at(rows_.with_src(address, kBytes), address, kBytes, counts, "a load outside of the source row",
                "a misaligned load")) {
      std::memcpy(value.byte, address, kBytes);
    }
    return value;
  }

  // False where the access cannot be made.
  bool look_at(Row* row, const char* address, int64_t size, Counts counts, const char* outside,
               const char* misaligned) const {
    if (reinterpret_cast<uint64_t>(address) % static_cast<uint64_t>(size) != 0) log_->wrong = misaligned;
    if (row == nullptr) {
      log_->wrong = outside;
      return false;
    }
    ++(row->*counts)[size];
    return true;
  }

  const Rows& rows_;
  Log* log_;
};

// What is wrong with the bytes of a row and the accesses to it, else null: their number and sizes follow from its
// place.
template <int kLanes>
const char* judge(Row* row) {
  if (row->wanted) row->to.expect(row->from.row(), row->bytes);
  if (!row->to.as_expected()) return "wrong bytes in or around the destination row";
  if (!row->from.as_expected()) return "the source or what is around it was written";

  const uint64_t bits = reinterpret_cast<uint64_t>(row->from.row()) | reinterpret_cast<uint64_t>(row->to.row());
  int64_t want_once = 0;
  int64_t left = row->wanted ? row->bytes : 0;
  if (bits % 16 == 0 && left >= 16 * kLanes) {
    want_once = left / (16 * kLanes) * kLanes;
    left -= 16 * want_once;
  }
  int64_t word = 8;
  while (bits % static_cast<uint64_t>(word) != 0) word /= 2;
  int64_t want[17] = {};
  want[word] += left / word;
  want[1] += left % word;
  for (const int size : {1, 2, 4, 8, 16}) {
    const int64_t once = size == 16 ? want_once : 0;
    if (row->loads_once[size] != once) return "not the 16-byte non-temporal loads that the gate asks for";
    if (row->loads[size] != want[size]) return "not the ordinary loads of words and bytes";
    if (row->stores[size] != want[size] + once) return "not a store of the same size for each load";
  }
  return nullptr;
}

// Most trips to memory that a lane may make for a row.
template <int kLanes>
int64_t trips_of(Row& row) {
  const uint64_t bits = reinterpret_cast<uint64_t>(row.from.row()) | reinterpret_cast<uint64_t>(row.to.row());
  int64_t width = bits % 16 == 0 && row.bytes >= 16 * kLanes ? 16 : 8;
  while (bits % static_cast<uint64_t>(width) != 0) width /= 2;
  return row.bytes / (width * kLanes * kvio::kWaveCopyLoads) + 1;
}

}  // namespace emulation
