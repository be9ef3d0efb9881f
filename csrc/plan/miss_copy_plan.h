// How missing rows of a swap-in are cut and shared out on a GPU. Pure host code.
#pragma once

#include <cstdint>

#include "plan/register_plan.h"
#include "request/swap_in_request.h"

namespace kvio {

// The rows of one buffer group as warps move them.
struct MissCopyPlan {
  int64_t package_bytes = 16;  // one load
  int64_t packages = 0;        // whole packages of a unit, a piece of a row
  int64_t remainder = 0;       // bytes of a unit after them
  LaneSplit split;
  int64_t steps = 1;  // of a unit, where those who resolve copy it: its lanes have one package each in a step
  int64_t skew_alignment = 16;
  int64_t max_skew = 0;  // packages
};

struct SwapInPolicy {
  int64_t cluster_ctas = 4;       // of one request, at most
  int64_t copying_ctas = 16;      // that copy at a time: they fill the link; more slow each other down
  int64_t free_bytes = 32 << 10;  // a request that has no more to copy does not wait for its turn
};

// Fused: for those who resolve, a line a step. Planned: for copy_planned, whose kernels for packages of 16 bytes exist
// in the shapes of plan/register_plan.h; narrower packages are moved by one lane a package run. The wave copy has one
// shape and finds the packages of a row itself: a plan for it has 16-byte ones whatever the alignment, and lanes by
// plan/copy_round.h.
MissCopyPlan make_fused_copy_plan(const BufferGroup& group, const PlatformPolicy& policy);
MissCopyPlan make_planned_copy_plan(const BufferGroup& group, const PlatformPolicy& policy);

// CTAs of one request: a power of two, 1 where clusters do not exist (before sm_90) or the batch is large.
int64_t cluster_ctas_for(int64_t batch, int64_t num_sms, bool has_clusters,
                         const SwapInPolicy& policy = SwapInPolicy());

}  // namespace kvio
