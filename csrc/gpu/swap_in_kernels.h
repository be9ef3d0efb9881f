// Launching what swap_in and copy_planned run on a GPU.
#pragma once

#include "gpu/fault.h"
#include "gpu/platform.h"
#include "gpu/swap_in_resolve.h"
#include "plan/miss_copy_plan.h"
#include "request/swap_in_request.h"

namespace kvio::gpu {

constexpr int kMaxSwapInBuffers = 16;  // of one launch

// Where the tables of a request are: shared memory, or `bytes` of `data` for every row of the batch.
struct Scratch {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Resolves every row of the batch. With `copy` also moves the misses of group `copy->group`, whose rows are cut into
// 16-byte packages and whose buffers fit one launch.
struct FusedCopy {
  const BufferGroup* group;
  MissCopyPlan plan;
  int64_t cluster_ctas;
};
void launch_resolve(const SwapInRequest& request, const Scratch& scratch, const FusedCopy* copy, FaultRecord* fault,
                    int device, Stream stream);

// Moves the misses of a plan that is in device memory, for buffers `first` to `first + count` - 1 of a group.
void launch_copy_planned(const CopyPlannedRequest& request, const BufferGroup& group, const MissCopyPlan& plan,
                         FaultRecord* fault, Stream stream);

}  // namespace kvio::gpu
