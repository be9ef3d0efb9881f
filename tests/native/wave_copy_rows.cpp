// gpu/wave_copy.h on the CPU, one lane after the other: every access is looked at, and the memory around both rows.
//
//   wave_copy_rows all|few [past-row|one-lane-twice|no-gate]
//
// `few` is for a build with a sanitizer, which then has to find accesses outside of rows. The second argument puts a
// fault in. Prints how many rows were copied, or what went wrong first; exit status 1 then.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
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

namespace {

#ifdef WITH_SANITIZER
constexpr bool kWatched = true;
#else
constexpr bool kWatched = false;
#endif

using kvio::gpu::kLoadsInFlight;

std::mt19937 rng(20);
std::string fault;

struct Rows {
  const char* src;
  char* dst;
  int64_t bytes;
};

struct Log {
  int64_t loads[17] = {};  // by size, ordinary ones
  int64_t loads_once[17] = {};
  int64_t stores[17] = {};
  int64_t trips = 0;  // of the current lane: loads with no store between them
  bool loading = false;
  const char* wrong = nullptr;
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
    ++log_->loads_once[kBytes];
    return read<kBytes>(address);
  }
  template <int kBytes>
  Bytes<kBytes> load(const char* address) const {
    ++log_->loads[kBytes];
    return read<kBytes>(address);
  }
  template <int kBytes>
  void store(char* address, const Bytes<kBytes>& value) const {
    ++log_->stores[kBytes];
    log_->loading = false;
    check(address, rows_.dst, kBytes, "a store outside of the destination row", "a misaligned store");
    std::memcpy(address, value.byte, kBytes);
  }
  template <class T>
  void await(T&) const {}

 private:
  template <int kBytes>
  Bytes<kBytes> read(const char* address) const {
    if (!log_->loading) ++log_->trips;
    log_->loading = true;
    check(address, rows_.src, kBytes, "a load outside of the source row", "a misaligned load");
    Bytes<kBytes> value;
    std::memcpy(value.byte, address, kBytes);
    return value;
  }

  void check(const char* address, const char* row, int64_t size, const char* outside, const char* misaligned) const {
    if (!kWatched && (address < row || address + size > row + rows_.bytes)) log_->wrong = outside;
    if (reinterpret_cast<uint64_t>(address) % static_cast<uint64_t>(size) != 0) log_->wrong = misaligned;
  }

  Rows rows_;
  Log* log_;
};

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

// The contract, told without the code: how many accesses of which size, and how many trips to memory.
template <int kLanes>
const char* judge(const Rows& rows, const Log& log, int64_t most_trips) {
  const uint64_t bits = reinterpret_cast<uint64_t>(rows.src) | reinterpret_cast<uint64_t>(rows.dst);
  int64_t want_once = 0;
  int64_t left = rows.bytes;
  if (bits % 16 == 0 && rows.bytes >= 16 * kLanes) {
    want_once = rows.bytes / (16 * kLanes) * kLanes;
    left -= 16 * want_once;
  }
  int64_t word = 8;
  while (bits % static_cast<uint64_t>(word) != 0) word /= 2;
  int64_t want[17] = {};
  want[word] += left / word;
  want[1] += left % word;
  for (const int size : {1, 2, 4, 8, 16}) {
    const int64_t once = size == 16 ? want_once : 0;
    if (log.loads_once[size] != once) return "not the 16-byte non-temporal loads that the gate asks for";
    if (log.loads[size] != want[size]) return "not the ordinary loads of words and bytes";
    if (log.stores[size] != want[size] + once) return "not a store of the same size for each load";
  }
  const int64_t trip = (want_once > 0 ? 16 : word) * kLanes * kLoadsInFlight;
  if (most_trips > rows.bytes / trip + 1) return "loads that could be in flight together are not";
  return nullptr;
}

template <int kLanes>
void copy_by_lane(const Rows& rows, Log* log, uint32_t lane) {
  const RecordingMemory memory(rows, log);
  const uint64_t bits = reinterpret_cast<uint64_t>(rows.src) | reinterpret_cast<uint64_t>(rows.dst);
  if (fault == "no-gate" && bits % 8 == 0) {
    return kvio::gpu::copy_narrow<kLanes, 8>(memory, lane, rows.dst, rows.src, rows.bytes);
  }
  if (fault == "one-lane-twice" && lane == 1) lane = 0;
  const int64_t bytes = fault == "past-row" ? rows.bytes + 1 : rows.bytes;
  kvio::gpu::wave_copy<kLanes>(memory, lane, rows.dst, rows.src, bytes);
}

int64_t rows_copied = 0;

// Ends the program where the copy is not what it has to be.
template <int kLanes>
void copy_rows(int64_t bytes, int64_t dst_offset, int64_t src_offset, bool shuffled) {
  Room from(src_offset, bytes, 1);
  Room to(dst_offset, bytes, 77);
  const Rows rows{from.row(), to.row(), bytes};
  std::vector<uint32_t> order(kLanes);
  std::iota(order.begin(), order.end(), 0u);
  if (shuffled) std::shuffle(order.begin(), order.end(), rng);

  Log log;
  int64_t most_trips = 0;
  for (const uint32_t lane : order) {
    log.trips = 0;
    log.loading = false;
    copy_by_lane<kLanes>(rows, &log, lane);
    most_trips = std::max(most_trips, log.trips);
  }
  to.expect(rows.src, bytes);
  const char* wrong = log.wrong;
  if (wrong == nullptr && !to.as_expected()) wrong = "wrong bytes in or around the destination row";
  if (wrong == nullptr && !from.as_expected()) wrong = "the source or what is around it was written";
  if (wrong == nullptr) wrong = judge<kLanes>(rows, log, most_trips);
  ++rows_copied;
  if (wrong == nullptr) return;
  std::printf("%s: %lld bytes, %d lanes %s, destination %lld, source %lld past a multiple of 16\n", wrong,
              static_cast<long long>(bytes), kLanes, shuffled ? "shuffled" : "in sequence",
              static_cast<long long>(dst_offset), static_cast<long long>(src_offset));
  std::exit(1);
}

template <int kLanes>
void copy_in_both_orders(int64_t bytes, int64_t dst_offset, int64_t src_offset) {
  copy_rows<kLanes>(bytes, dst_offset, src_offset, false);
  copy_rows<kLanes>(bytes, dst_offset, src_offset, true);
}

void copy_by_waves(int64_t bytes, int64_t dst_offset, int64_t src_offset) {
  copy_in_both_orders<32>(bytes, dst_offset, src_offset);
  copy_in_both_orders<64>(bytes, dst_offset, src_offset);
}

void copy_by_parts_of_waves(int64_t bytes, int64_t dst_offset, int64_t src_offset) {
  copy_in_both_orders<1>(bytes, dst_offset, src_offset);
  copy_in_both_orders<2>(bytes, dst_offset, src_offset);
  copy_in_both_orders<4>(bytes, dst_offset, src_offset);
  copy_in_both_orders<8>(bytes, dst_offset, src_offset);
  copy_in_both_orders<16>(bytes, dst_offset, src_offset);
}

int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }

constexpr int64_t kLongest = 4700;
constexpr int64_t kRowFive = 5140;  // row 5 of rows of 1,028 bytes: no multiple of 8

// Both sides of each gate and of each count of loads in flight, with all remainders of a word; sizes that engines have.
std::set<int64_t> chosen_sizes() {
  std::set<int64_t> sizes = {1, 2, 3, 4, 20, 512, 576, 656, 1024, 1028, 1032, 1040, 1152, 2304, 4608, kLongest};
  for (const int64_t edge : {256, 512, 1024, 1536, 2048, 4096}) {
    for (int64_t bytes = edge - 9; bytes <= edge + 9; ++bytes) sizes.insert(bytes);
  }
  for (int64_t bytes = 5; bytes < 80; bytes += 5) sizes.insert(bytes);
  return sizes;
}

void copy_all() {
  for (const int64_t bytes : chosen_sizes()) {
    for (int64_t pair = 0; pair < 256; ++pair) copy_by_waves(bytes, pair / 16, pair % 16);
    for (int64_t dst = 0; dst < 16; ++dst) copy_by_waves(bytes, dst, kRowFive);
  }
  for (int64_t bytes = 0; bytes <= kLongest; ++bytes) {
    copy_by_waves(bytes, 0, 0);
    copy_by_waves(bytes, 8 * below(2), 8 * below(2));
    copy_by_waves(bytes, 4 * below(4), 4 * below(4));
    // In 256 sizes that follow each other, each pair of alignments with each remainder of 16 bytes.
    for (int64_t dst = 0; dst < 16; ++dst) copy_by_waves(bytes, dst, (dst + bytes / 16) % 16);
    if (bytes > 1300) continue;
    copy_by_parts_of_waves(bytes, 0, 0);
    copy_by_parts_of_waves(bytes, below(16), below(16));
  }
}

void copy_few() {
  for (const int64_t bytes : chosen_sizes()) {
    copy_by_waves(bytes, 0, 0);
    copy_by_waves(bytes, below(16), kRowFive);
    for (int i = 0; i < 8; ++i) copy_by_waves(bytes, below(16), below(16));
    copy_by_parts_of_waves(bytes, 0, 0);
  }
  for (int64_t bytes = 4; bytes <= kLongest; bytes += 1 + below(50)) copy_by_waves(bytes, below(16), below(16));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) fault = argv[2];
  if (argc > 1 && std::string(argv[1]) == "few") {
    copy_few();
  } else {
    copy_all();
  }
  std::printf("%lld rows\n", static_cast<long long>(rows_copied));
}
