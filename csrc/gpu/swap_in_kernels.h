// Launching what swap_in and copy_planned run on a GPU.
#pragma once

#include <vector>

#include "gpu/fault.h"
#include "gpu/platform.h"
#include "gpu/swap_in_resolve.h"
#include "plan/miss_copy_plan.h"
#include "request/swap_in_request.h"

namespace kvio::gpu {

constexpr int kMaxSwapInBuffers = 16;  // of one launch, and of one geometry
constexpr int kMaxFusedGroups = 2;     // geometries whose rows are copied by those who resolve

// What the CTAs that resolve a request copy as well: all misses of `groups`, whose buffers fit one launch; nothing
// without groups.
struct FusedCopy {
  std::vector<const BufferGroup*> groups;
  int64_t free_misses = 0;  // a request that has more waits until fewer than `turns` others are copying
  int64_t turns = 1;
};

// With which kernel a batch is resolved: `ctas` of a request, their workspaces as `layout` says.
struct ResolvePlan {
  const void* kernel = nullptr;
  int64_t ctas = 1;
  WorkspaceLayout layout{};
  int64_t scratch_bytes = 0;  // of device memory, for each row of the batch; 0: workspaces are in shared memory
  int64_t most_shared = 0;
  bool early = false;  // begins, as far as it can, before what is ahead in the stream has ended
};
ResolvePlan plan_resolve(const SwapInRequest& request, int64_t cluster_ctas, bool early, int device);

// Resolves every row of the batch.
void launch_resolve(const SwapInRequest& request, const ResolvePlan& plan, char* scratch, const FusedCopy& copy,
                    FaultRecord* fault, int device, Stream stream);

// Moves the misses of a plan that is in device memory. `early`: its launches begin, as far as they can, before what is
// ahead of each has ended.
void launch_copy_planned(const CopyPlannedRequest& request, const BufferGroup& group, const MissCopyPlan& plan,
                         bool early, FaultRecord* fault, Stream stream);

}  // namespace kvio::gpu
