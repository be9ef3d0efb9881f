#include "plan/register_plan.h"

#include <algorithm>

#include "plan/copy_round.h"
#include "plan/copy_width.h"
#include "plan/units.h"

namespace kvio {
namespace {

constexpr int64_t kMaxUnits = int64_t{1} << 30;

// Cuts a long contiguous piece into equal parts that several warps can share.
void cut_long_pieces(RegisterPlan* plan, const RegisterPolicy& policy) {
  const int64_t piece = plan->dst.piece_bytes;
  if (plan->dst.num_pieces != 1 || plan->src.num_pieces != 1 || piece <= policy.long_piece_bytes) return;
  if (piece % plan->package_bytes != 0) return;
  const int64_t packages = piece / plan->package_bytes;
  const int64_t most = policy.bytes_per_warp_step / plan->package_bytes;
  int64_t part = most;
  while (part > 1 && packages % part != 0) --part;
  if (part * 4 < most) return;  // only very short parts divide it: leave it whole
  cut_piece(&plan->dst, &plan->src, packages / part);
}

}  // namespace

int64_t step_alignment(int64_t lanes, int64_t package_bytes) { return std::min(kLineBytes, lanes * package_bytes); }

int64_t max_skew(const UnitShape& unit, int64_t lanes) {
  const int64_t step = step_alignment(lanes, unit.package_bytes);
  return unit.alignment < step ? (step - unit.alignment) / unit.package_bytes : 0;
}

LaneSplit choose_lane_split(const UnitShape& unit, int64_t wave_lanes) {
  constexpr LaneSplit kKernels[] = {{0, 1, 16}, {0, 2, 8}, {0, 2, 9}, {0, 4, 4}, {0, 8, 2}};
  return choose_lane_split(unit, kKernels, std::size(kKernels), wave_lanes);
}

LaneSplit choose_lane_split(const UnitShape& unit, const LaneSplit* kernels, size_t count, int64_t wave_lanes) {
  const int64_t unit_bytes = unit.packages * unit.package_bytes;
  LaneSplit best = kernels[0];
  double best_busy = 0;
  for (int64_t lanes = 1; lanes <= wave_lanes; lanes *= 2) {
    const int64_t step_bytes = lanes * unit.package_bytes;
    if (lanes < wave_lanes && step_bytes < kLineBytes && step_bytes < unit_bytes) continue;
    const int64_t loads = (unit.packages + max_skew(unit, lanes) + lanes - 1) / lanes;
    for (size_t k = 0; k < count; ++k) {
      const LaneSplit& kernel = kernels[k];
      const int64_t rounds = (loads + kernel.loads_per_unit - 1) / kernel.loads_per_unit;
      const double busy =
          static_cast<double>(unit.packages) / static_cast<double>(rounds * kernel.loads_per_unit * lanes);
      // Among equals the fewest lanes: more rows at once hide more of a scattered row's address translation.
      if (busy > best_busy * 1.001) {
        best_busy = busy;
        best = kernel;
        best.lanes_per_unit = lanes;
      }
    }
  }
  return best;
}

LaneSplit wave_copy_split(int64_t unit_bytes, int64_t package_bytes, int64_t wave_lanes) {
  return {lanes_per_row(unit_bytes, wave_lanes), rows_at_once(package_bytes), kWaveCopyLoads};
}

namespace {

// An engine calls with one shape over and over, and choosing costs more than the rest of the plan.
LaneSplit remembered_split(const UnitShape& unit, int64_t wave_lanes) {
  thread_local UnitShape last;
  thread_local int64_t last_wave_lanes = 0;
  thread_local LaneSplit split;
  if (!(last == unit) || last_wave_lanes != wave_lanes) {
    split = choose_lane_split(unit, wave_lanes);
    last = unit;
    last_wave_lanes = wave_lanes;
  }
  return split;
}

}  // namespace

int64_t max_indices_per_launch(const TransferRequest& request, const BufferGroup& group) {
  const int64_t piece_parts = std::max<int64_t>(1, group.dst.piece_bytes / 16);
  const int64_t buffers = std::min<int64_t>(kMaxBuffersPerLaunch, static_cast<int64_t>(group.dst_base.size()));
  const int64_t per_index = request.slots_per_index * group.dst.num_pieces;
  return std::max<int64_t>(1, kMaxUnits / piece_parts / buffers / per_index);
}

RegisterPlan make_register_plan(const TransferRequest& request, const BufferGroup& group, int64_t range,
                                int64_t num_sms, const RegisterPolicy& policy, const SharedPlan& shared) {
  RegisterPlan plan;
  plan.dst = group.dst;
  plan.src = group.src;
  plan.slots_per_index = request.slots_per_index;
  join_pages(&plan.dst, &plan.src, &plan.slots_per_index);
  const uint64_t bits = address_bits(group) | shared.address_bits;
  plan.package_bytes = std::min(shared.max_package_bytes, copy_width(plan.dst, plan.src, bits));
  cut_long_pieces(&plan, policy);

  const int64_t piece = plan.dst.piece_bytes;
  plan.packages = piece / plan.package_bytes;
  plan.remainder = piece % plan.package_bytes;
  if (policy.wave_copy) {
    plan.split = wave_copy_split(piece, plan.package_bytes, policy.wave_lanes);
  } else {
    const UnitShape unit{plan.packages, plan.package_bytes, address_alignment(plan.dst, plan.src, bits)};
    plan.split = shared.only != nullptr ? choose_lane_split(unit, shared.only, 1, policy.wave_lanes)
                                        : remembered_split(unit, policy.wave_lanes);
    plan.skew_alignment = step_alignment(plan.split.lanes_per_unit, plan.package_bytes);
    plan.max_skew = max_skew(unit, plan.split.lanes_per_unit);
  }
  plan.skew_by_dst = request.dst_device == DeviceKind::kCpu;
  plan.units = range * plan.slots_per_index * plan.dst.num_pieces;
  plan.buffers_innermost = buffers_share_pages(group);

  const bool device_to_device = request.dst_device == DeviceKind::kGpu && request.src_device == DeviceKind::kGpu;
  const int64_t link_blocks = plan.skew_by_dst ? policy.write_blocks : policy.read_blocks;
  const int64_t wanted_blocks =
      request.num_blocks > 0 ? request.num_blocks : (device_to_device ? num_sms : link_blocks);

  // Fewer units an item while there are too few items for the warps, but never less than one warp step of bytes.
  const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
  const int64_t warps = wanted_blocks * policy.warps_per_block;
  int64_t per_item = policy.max_units_per_item;
  while (per_item > 1 && per_item / 2 * piece >= policy.bytes_per_warp_step &&
         (plan.units + per_item - 1) / per_item * buffers < 2 * warps) {
    per_item /= 2;
  }
  plan.units_per_item = per_item;
  plan.wanted_blocks = wanted_blocks;
  const int64_t loads = (per_item * plan.packages + policy.wave_lanes - 1) / policy.wave_lanes;
  plan.stretch_loads = (loads + 17) / 18 < (loads + 15) / 16 ? 18 : 16;
  const int64_t items = (plan.units + per_item - 1) / per_item * buffers;
  plan.num_blocks =
      std::max<int64_t>(1, std::min(wanted_blocks, (items + policy.warps_per_block - 1) / policy.warps_per_block));
  return plan;
}

}  // namespace kvio
