// Names of what a GPU kernel found outside its pool. Faults carry numbers: an op and argument, a position, a value.
#pragma once

#include <cstdint>
#include <string>

namespace kvio {

// The first number of each op; its arguments follow in the order of fault_subject.cpp.
enum class FaultOp : int64_t {
  kTransfer = 1,
  kTransferStaged = 3,
  kSwapIn = 5,
  kCopyPlanned = 11,
  kWriteBack = 13,
  kRestore = 15,
  kLoadLayers = 17,
  kWaitLayer = 20
};

struct FaultSubject {
  const char* op;
  const char* argument;
  bool is_matrix;  // a position is then row * 2^32 + column
  const char* consequence;
  bool is_too_old = false;  // the limit is then the least value that would do, not one more than the largest
};

// Of a fault's number; unknown ones are the last argument's.
FaultSubject fault_subject(int64_t number);

constexpr int64_t matrix_position(int64_t row, int64_t column) { return row << 32 | column; }

// "argument[position]" or "argument[row, column]".
std::string fault_place(const FaultSubject& subject, int64_t position);

// What a value would have needed to be: "0 to 7", or "8 or more".
std::string fault_need(const FaultSubject& subject, int64_t limit);

}  // namespace kvio
