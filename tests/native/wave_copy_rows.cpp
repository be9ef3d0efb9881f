// gpu/wave_copy.h on the CPU, one lane after the other: every access is looked at, and the memory around both rows.
//
//   wave_copy_rows all|few [past-row|one-lane-twice|no-gate]
//
// `few` is for a build with a sanitizer, which then has to find accesses outside of rows. The second argument puts a
// fault in. Prints how many rows were copied, or what went wrong first; exit status 1 then.
#include "wave_copy_emulation.h"

namespace {

using namespace emulation;

template <int kLanes>
void copy_by_lane(Row& row, const RecordingMemory& memory, uint32_t lane) {
  const uint64_t bits = reinterpret_cast<uint64_t>(row.from.row()) | reinterpret_cast<uint64_t>(row.to.row());
  if (fault == "no-gate" && bits % 8 == 0) {
    const kvio::gpu::LaneRows<1> one = {{row.to.row()}, {row.from.row()}};
    return kvio::gpu::copy_narrow<kLanes, 8>(memory, lane, one, row.bytes);
  }
  if (fault == "one-lane-twice" && lane == 1) lane = 0;
  const int64_t bytes = fault == "past-row" ? row.bytes + 1 : row.bytes;
  kvio::gpu::wave_copy<kLanes>(memory, lane, row.to.row(), row.from.row(), bytes);
}

int64_t rows_copied = 0;

// Ends the program where the copy is not what it has to be.
template <int kLanes>
void copy_row(int64_t bytes, int64_t dst_offset, int64_t src_offset, bool shuffled) {
  Rows rows;
  rows.add(bytes, dst_offset, src_offset);
  Row& row = rows[0];
  Log log;
  const RecordingMemory memory(rows, &log);
  int64_t most_trips = 0;
  for (const uint32_t lane : order_of(kLanes, shuffled)) {
    log.next_lane();
    copy_by_lane<kLanes>(row, memory, lane);
    most_trips = std::max(most_trips, log.trips);
  }
  const char* wrong = log.wrong != nullptr ? log.wrong : judge<kLanes>(&row);
  if (wrong == nullptr && most_trips > trips_of<kLanes>(row)) {
    wrong = "loads that could be in flight together are not";
  }
  ++rows_copied;
  if (wrong == nullptr) return;
  std::printf("%s: %lld bytes, %d lanes %s, destination %lld, source %lld past a multiple of 16\n", wrong,
              static_cast<long long>(bytes), kLanes, shuffled ? "shuffled" : "in sequence",
              static_cast<long long>(dst_offset), static_cast<long long>(src_offset));
  std::exit(1);
}

template <int kLanes>
void copy_in_both_orders(int64_t bytes, int64_t dst_offset, int64_t src_offset) {
  copy_row<kLanes>(bytes, dst_offset, src_offset, false);
  copy_row<kLanes>(bytes, dst_offset, src_offset, true);
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
