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

// What the CTAs that resolve a request copy as well: misses of `groups`, whose buffers fit one launch, of requests that
// have no more than `up_to_misses`. How many misses the others have goes to `left`, one entry for each row of the batch
// (null where none has more).
struct FusedCopy {
  std::vector<const BufferGroup*> groups;
  int64_t up_to_misses = 0;
  int64_t cluster_ctas = 1;
  int32_t* left = nullptr;
};

// Most bytes of a workspace in shared memory.
int64_t most_workspace_bytes(int device);

// Resolves every row of the batch. `scratch` has layout.bytes for each of them, null for shared memory.
void launch_resolve(const SwapInRequest& request, const WorkspaceLayout& layout, char* scratch, const FusedCopy& copy,
                    FaultRecord* fault, int device, Stream stream);

// Moves the misses of a plan that is in device memory. `follows_resolve`: launch_resolve is what the stream did last.
void launch_copy_planned(const CopyPlannedRequest& request, const BufferGroup& group, const MissCopyPlan& plan,
                         bool follows_resolve, FaultRecord* fault, Stream stream);

}  // namespace kvio::gpu
