// What a kernel does about a bad index: it skips the row and leaves one record per device, which the next call or
// check() reports. The context stays alive.
#pragma once

#include <cstdint>

#include "gpu/platform.h"

namespace kvio::gpu {

// Lives in page-locked host memory, one a device; the kernel writes it, the host reads it without a sync.
struct FaultRecord {
  unsigned long long generation;  // host: counts records taken, so that only the first fault since then is kept
  unsigned long long recorded;    // kernel: generation of the record below, 0 for none
  int64_t op;                     // see request/fault_subject.h
  int64_t position;
  int64_t value;
  int64_t limit;
  unsigned long long* claimed;  // device memory: newest generation that some thread of the GPU may write
};

struct Fault {
  int64_t op = 0;
  int64_t position = 0;
  int64_t value = 0;
  int64_t limit = 0;
};

// Device address of `device`'s record, made on first use (also during stream capture). `device` is the current one.
FaultRecord* fault_record(const char* op, int device);

// Where kernels of the current device claim the record: one word for all of them, whichever file they are in.
unsigned long long* fault_claim(const char* op);

// True and fills `out` when a kernel that has finished left a record on `device`; clears it. Does not synchronize.
bool take_fault(int device, Fault* out);

// Throws when a kernel that has finished left a record on `device`.
void raise_pending_fault(const char* op, int device);

}  // namespace kvio::gpu
