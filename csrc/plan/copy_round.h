// The copy-round rule: what a lane group that shares a row moves in one step, and how many lanes that group has.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace kvio {

struct CopyRound {
  int64_t bytes = 0;          // of all lanes together; 0: the row takes the remainder path
  int64_t package_bytes = 0;  // of one lane
};

// The widest round of 128, 64, 32 or 16 bytes that divides the row and splits over `lanes` into packages of 4, 8 or 16
// bytes. Rows of 576 bytes are why 128 is not the only one: 4.5 lines, but nine rounds of 64. A row that no round
// serves is not refused: what cannot be moved in whole rounds is moved in words and bytes.
constexpr CopyRound copy_round(int64_t row_bytes, int64_t lanes) {
  if (row_bytes < 1 || lanes < 1) return {};
  for (int64_t round = 128; round >= 16; round /= 2) {
    if (row_bytes % round != 0 || round % lanes != 0) continue;
    const int64_t package = round / lanes;
    if (package == 4 || package == 8 || package == 16) return {round, package};
  }
  return {};
}

// How many of a wave's lanes share a row in gpu/wave_copy.h where a wave has several rows to move; a power of two.
//
// All, where one step of 16 bytes a lane, or exactly one of 8, keeps all busy. Else as few as move it in whole rounds
// with 16 bytes each, so that many rows are on their way at once: 4 for 576 bytes in a wave of 64. Rounds below 64
// bytes would leave a long row to one or two lanes: such rows, and those without a round, get a lane for every 8 bytes.
constexpr int64_t lanes_per_row(int64_t row_bytes, int64_t wave_lanes) {
  if (row_bytes >= 16 * wave_lanes || row_bytes == 8 * wave_lanes) return wave_lanes;
  for (const int64_t lanes : {8, 4}) {
    if (copy_round(row_bytes, lanes).package_bytes == 16) return lanes;
  }
  int64_t lanes = 1;
  while (lanes < wave_lanes && 8 * lanes < row_bytes) lanes *= 2;
  return lanes;
}

// What a lane of gpu/wave_copy.h has on its way: so many loads of a row, and so many rows where the kernel knows that
// all of them lie at multiples of `alignment`. One row of 512 bytes would leave a wave with one load a lane.
constexpr int kWaveCopyLoads = 4;
constexpr int rows_at_once(int64_t alignment) { return alignment % 16 == 0 ? 4 : 1; }

static_assert(copy_round(576, 4).bytes == 64 && lanes_per_row(576, 64) == 4);

}  // namespace kvio
