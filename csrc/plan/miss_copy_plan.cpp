#include "plan/miss_copy_plan.h"

#include <algorithm>

#include "plan/copy_round.h"
#include "plan/copy_width.h"

namespace kvio {
namespace {

constexpr LaneSplit kNarrow[] = {{0, 1, 16}};

MissCopyPlan make_wave_copy_plan(int64_t unit_bytes, int64_t wave_lanes) {
  MissCopyPlan plan;
  plan.packages = unit_bytes / plan.package_bytes;
  plan.remainder = unit_bytes % plan.package_bytes;
  plan.split = {lanes_per_row(unit_bytes, wave_lanes), 1, 1};
  return plan;
}

MissCopyPlan make_plan(const BufferGroup& group, const PlatformPolicy& policy, bool fused) {
  const int64_t wave_lanes = policy.wave_lanes;
  if (policy.wave_copy) return make_wave_copy_plan(group.dst.piece_bytes, wave_lanes);
  const uint64_t bits = address_bits(group);
  MissCopyPlan plan;
  plan.package_bytes = copy_width(group.dst, group.src, bits);
  plan.packages = group.dst.piece_bytes / plan.package_bytes;
  plan.remainder = group.dst.piece_bytes % plan.package_bytes;
  const UnitShape unit{plan.packages, plan.package_bytes, address_alignment(group.dst, group.src, bits)};
  if (fused) {
    // A line a step, so that few rows are spread over many lanes.
    int64_t lanes = 1;
    while (lanes < wave_lanes && lanes * plan.package_bytes < kLineBytes && lanes < plan.packages) lanes *= 2;
    plan.split = {lanes, 1, 1};
  } else if (plan.package_bytes < 16) {
    plan.split = choose_lane_split(unit, kNarrow, std::size(kNarrow), wave_lanes);
  } else {
    plan.split = choose_lane_split(unit, wave_lanes);
  }
  plan.skew_alignment = step_alignment(plan.split.lanes_per_unit, plan.package_bytes);
  plan.max_skew = max_skew(unit, plan.split.lanes_per_unit);
  // One more package where a lane behind the last one takes the remainder.
  const int64_t packages = plan.max_skew + plan.packages + (plan.remainder > 0 ? 1 : 0);
  plan.steps = (packages + plan.split.lanes_per_unit - 1) / plan.split.lanes_per_unit;
  return plan;
}

}  // namespace

MissCopyPlan make_fused_copy_plan(const BufferGroup& group, const PlatformPolicy& policy) {
  return make_plan(group, policy, true);
}
MissCopyPlan make_planned_copy_plan(const BufferGroup& group, const PlatformPolicy& policy) {
  return make_plan(group, policy, false);
}

int64_t cluster_ctas_for(int64_t batch, int64_t num_sms, bool has_clusters, const SwapInPolicy& policy) {
  int64_t ctas = has_clusters ? policy.cluster_ctas : 1;
  while (ctas > 1 && batch * ctas > std::min(num_sms, policy.copying_ctas)) ctas /= 2;
  return ctas;
}

}  // namespace kvio
