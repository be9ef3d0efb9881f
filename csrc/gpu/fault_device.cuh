// Device side of fault.h.
#pragma once

#include "gpu/fault.h"
#include "gpu/primitives.cuh"

namespace kvio::gpu {

// Records the first fault since the host last took one. Cheap to call from many threads: all but one lose the claim.
// Works from a replayed graph too, since the generation is read from the record and not baked into parameters.
static __device__ KVIO_COLD void record_fault(FaultRecord* record, int64_t op, int64_t position, int64_t value,
                                              int64_t limit) {
  volatile FaultRecord* out = record;
  const unsigned long long generation = out->generation;
  if (atomicMax(record->claimed, generation) >= generation) return;
  out->op = op;
  out->position = position;
  out->value = value;
  out->limit = limit;
  __threadfence_system();
  out->recorded = generation;
}

}  // namespace kvio::gpu
