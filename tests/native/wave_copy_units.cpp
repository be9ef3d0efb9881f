// The loop over the rows of a wave in gpu/wave_copy.h (wave_copy_rows) on the CPU: lane groups of every size, one or
// several rows a group at a time, fewer rows than groups, rows that are not to be written. Every access is looked at,
// and the memory around all rows.
//
//   wave_copy_units all|few [past-row|wrong-lane|count-ignored|null-written|one-by-one]
//
// `few` is for a build with a sanitizer, which then has to find accesses outside of rows. The second argument puts a
// fault in. Prints how many waves copied how many rows, or what went wrong first; exit status 1 then.
#include "wave_copy_emulation.h"

namespace {

using namespace emulation;

// What the lanes of a wave hold. A lane asks as often as any other: else lanes would wait for each other, or worse.
template <int kWave>
class EmulatedWave {
 public:
  static constexpr int kLanes = kWave;

  char* dst[kWave];
  const char* src[kWave];
  Log* log;
  mutable std::string asked;  // by the current lane: d or s a question

  char* shuffle(char* pointer, uint32_t lane) const { return answer(pointer, dst, 'd', lane); }
  const char* shuffle(const char* pointer, uint32_t lane) const { return answer(pointer, src, 's', lane); }

  void next_lane(uint32_t lane) {
    end_lane();
    current_ = lane;
  }
  // After the last one too.
  void end_lane() {
    if (lanes_ == 1) first_asked_ = asked;
    if (asked != first_asked_) log->wrong = "lanes that do not ask each other together";
    asked.clear();
    ++lanes_;
  }

 private:
  template <class T>
  T answer(T pointer, const T* held, char kind, uint32_t lane) const {
    asked += kind;
    if (lane >= kWave) {
      log->wrong = "a lane asked that is none of the wave's";
      return nullptr;
    }
    if (pointer != held[current_]) log->wrong = "a lane that offers what it does not hold";
    return held[fault == "wrong-lane" ? (lane ^ 1) : lane];
  }

  uint32_t current_ = 0;
  int lanes_ = 0;  // that have ended, the one before the first included
  std::string first_asked_;
};

// Where no row may be moved: beside everything, and no pointer of anyone.
char* const kNobodys = reinterpret_cast<char*>(uint64_t{16});

struct Shape {
  int64_t bytes;
  uint32_t count;      // rows of the wave
  int64_t alignment;   // of both sides, kAlignment at least
  int64_t null_every;  // one in so many rows is not to be written; 0: all are
  bool shuffled;
};

int64_t waves_run = 0;
int64_t rows_copied = 0;

// Ends the program where the copy is not what it has to be.
template <int kWave, int kLanes, int kAlignment>
void copy_wave(const Shape& shape) {
  constexpr int kRows = kvio::gpu::kRowsAtOnce<kAlignment>;
  Rows rows;
  for (uint32_t row = 0; row < shape.count; ++row) {
    const int64_t places = 16 / shape.alignment;
    const int64_t dst = shape.alignment * below(places);
    const int64_t src = below(8) == 0 && shape.alignment <= 4 ? kRowFive : shape.alignment * below(places);
    rows.add(shape.bytes, dst, src);
    if (shape.null_every > 0 && below(shape.null_every) == 0) rows[row].wanted = false;
  }

  Log log;
  EmulatedWave<kWave> wave;
  wave.log = &log;
  for (uint32_t lane = 0; lane < kWave; ++lane) {
    const bool has_row = lane < shape.count;
    wave.src[lane] = has_row ? rows[lane].from.row() : kNobodys;
    wave.dst[lane] = has_row ? (rows[lane].wanted ? rows[lane].to.row() : nullptr) : kNobodys;
    if (has_row && fault == "null-written") wave.dst[lane] = rows[lane].to.row();
  }
  const uint32_t count = fault == "count-ignored" ? kWave : shape.count;
  const int64_t bytes = fault == "past-row" ? shape.bytes + 1 : shape.bytes;
  int64_t most_trips = 0;
  const RecordingMemory memory(rows, &log);
  for (const uint32_t lane : order_of(kWave, shape.shuffled)) {
    log.next_lane();
    wave.next_lane(lane);
    if (fault == "one-by-one") {
      kvio::gpu::wave_copy_rows<1>(kLanes, wave, memory, lane, count, wave.dst[lane], wave.src[lane], bytes);
    } else {
      kvio::gpu::wave_copy_rows<kAlignment>(kLanes, wave, memory, lane, count, wave.dst[lane], wave.src[lane], bytes);
    }
    most_trips = std::max(most_trips, log.trips);
  }
  wave.end_lane();

  const char* wrong = log.wrong;
  int64_t trips_of_one = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (wrong == nullptr) wrong = judge<kLanes>(&rows[row]);
    trips_of_one = std::max(trips_of_one, trips_of<kLanes>(rows[row]));
  }
  const int64_t at_once = kWave / kLanes * kRows;
  if (wrong == nullptr && most_trips > (shape.count + at_once - 1) / at_once * trips_of_one) {
    wrong = "rows that could be on their way together are not";
  }
  ++waves_run;
  rows_copied += shape.count;
  if (wrong == nullptr) return;
  std::printf("%s: %u rows of %lld bytes at multiples of %lld, wave of %d %s, %d lanes a row, %d rows at a time\n",
              wrong, shape.count, static_cast<long long>(shape.bytes), static_cast<long long>(shape.alignment), kWave,
              shape.shuffled ? "shuffled" : "in sequence", kLanes, kRows);
  std::exit(1);
}

// No row, one, and around what the groups move at once; the whole wave.
template <int kWave, int kLanes, int kAlignment>
std::vector<uint32_t> counts() {
  constexpr uint32_t kGroups = kWave / kLanes;
  constexpr uint32_t kAtOnce = kGroups * kvio::gpu::kRowsAtOnce<kAlignment>;
  std::vector<uint32_t> found;
  for (const uint32_t count :
       {0u, 1u, kGroups - 1, kGroups, kGroups + 1, kAtOnce - 1, kAtOnce + 1, kWave - 1u, uint32_t{kWave}}) {
    if (count <= kWave) found.push_back(count);
  }
  return found;
}

int64_t turn = 0;  // every shape takes the next of each list

// Of any number of rows, some of them null, or none.
template <int kWave, int kLanes, int kAlignment>
void copy_some(int64_t bytes) {
  ++turn;
  const auto numbers = counts<kWave, kLanes, kAlignment>();
  const uint32_t count = numbers[static_cast<size_t>(below(static_cast<int64_t>(numbers.size())))];
  const int64_t alignment = std::max<int64_t>(kAlignment, int64_t{1} << turn % 5);
  copy_wave<kWave, kLanes, kAlignment>({bytes, count, alignment, turn % 3 == 0 ? 0 : 1 + below(5), below(2) == 0});
}

// Each number of rows, with fewer or more of them null.
template <int kWave, int kLanes, int kAlignment>
void copy_every_count(int64_t bytes) {
  for (const uint32_t count : counts<kWave, kLanes, kAlignment>()) {
    for (const int64_t null_every : {0, 1, 2, 3}) {
      copy_wave<kWave, kLanes, kAlignment>({bytes, count, std::max(4, kAlignment), null_every, count % 2 == 0});
    }
  }
}

// What is known of the rows' alignment: nothing, words, or what several rows at once need.
template <int kWave, int kLanes = kWave>
void copy_some_by_groups(int64_t bytes) {
  copy_some<kWave, kLanes, 1>(bytes);
  copy_some<kWave, kLanes, 8>(bytes);
  copy_some<kWave, kLanes, 16>(bytes);
  if constexpr (kLanes > 1) copy_some_by_groups<kWave, kLanes / 2>(bytes);
}

template <int kWave, int kLanes = kWave>
void copy_every_count_by_groups(int64_t bytes) {
  copy_every_count<kWave, kLanes, 1>(bytes);
  copy_every_count<kWave, kLanes, 16>(bytes);
  if constexpr (kLanes > 1) copy_every_count_by_groups<kWave, kLanes / 2>(bytes);
}

void copy_sizes(int times) {
  for (const int64_t bytes : chosen_sizes()) {
    for (int time = 0; time < times; ++time) {
      copy_some_by_groups<32>(bytes);
      copy_some_by_groups<64>(bytes);
    }
  }
  for (const int64_t bytes : {20, 1028}) {
    copy_every_count_by_groups<32>(bytes);
    copy_every_count_by_groups<64>(bytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) fault = argv[2];
  copy_sizes(argc > 1 && std::string(argv[1]) == "few" ? 1 : 6);
  std::printf("%lld waves, %lld rows\n", static_cast<long long>(waves_run), static_cast<long long>(rows_copied));
}
