#include "plan/layers_plan.h"

#include <algorithm>

#include "error.h"

namespace kvio {
namespace {

constexpr int64_t kMaxItems = int64_t{1} << 30;  // of a layer

uint64_t bits_of(const void* address) { return reinterpret_cast<uint64_t>(address); }

// Of the group's buffers in layers after the first: their addresses, or their distances from it.
uint64_t later_address_bits(const LoadLayersRequest& request, const BufferGroup& group) {
  uint64_t bits = 0;
  for (const int64_t position : group.position) {
    const size_t b = static_cast<size_t>(position);
    bits |= static_cast<uint64_t>(request.dst_step[b]) | static_cast<uint64_t>(request.src_step[b]);
    for (size_t at = b; at < request.dst_listed.size(); at += static_cast<size_t>(request.num_buffers)) {
      bits |= bits_of(request.dst_listed[at]) | bits_of(request.src_listed[at]);
    }
  }
  return bits;
}

LayerShape shape_of(const LoadLayersRequest& request, size_t group, int64_t num_sms, const RegisterPolicy& policy,
                    SharedPlan shared) {
  const BufferGroup& buffers = request.layer.groups[group];
  const int64_t most = max_indices_per_launch(request.layer, buffers);
  if (request.layer.num_indices > most) {
    fail("load_layers", "dst_indices has ", request.layer.num_indices, " entries; it needs at most ", most,
         " for rows of ", buffers.dst.row_bytes(), " bytes (several calls, each with flags of its own)");
  }
  shared.address_bits = later_address_bits(request, buffers);
  LayerShape shape;
  shape.group = group;
  shape.plan = make_register_plan(request.layer, buffers, request.layer.num_indices, num_sms, policy, shared);
  shape.items = (shape.plan.units + shape.plan.units_per_item - 1) / shape.plan.units_per_item;
  return shape;
}

// Shapes that differ are planned again, for the one kernel that serves them all.
void share_a_kernel(const LoadLayersRequest& request, int64_t num_sms, const RegisterPolicy& policy, LayersPlan* plan) {
  int64_t most_bytes = -1;
  for (size_t s = 0; s < plan->num_shapes; ++s) {
    const LayerShape& shape = plan->shapes[s];
    const BufferGroup& group = request.layer.groups[shape.group];
    const int64_t bytes = group.dst.row_bytes() * static_cast<int64_t>(group.dst_base.size());
    plan->package_bytes = std::min(plan->package_bytes, shape.plan.package_bytes);
    if (bytes <= most_bytes) continue;
    most_bytes = bytes;
    plan->kernel = shape.plan.split;
  }
  if (plan->num_shapes == 1) return;
  const LaneSplit kernel = plan->kernel;
  SharedPlan shared;
  shared.max_package_bytes = plan->package_bytes;
  shared.only = &kernel;
  for (size_t s = 0; s < plan->num_shapes; ++s) {
    plan->shapes[s] = shape_of(request, plan->shapes[s].group, num_sms, policy, shared);
  }
  plan->kernel = plan->shapes[0].plan.split;  // of one plan or another: they differ in lanes alone
}

}  // namespace

LayersPlan make_layers_plan(const LoadLayersRequest& request, int64_t num_sms, const RegisterPolicy& policy) {
  LayersPlan plan;
  for (size_t g = 0; g < request.layer.groups.size() && request.layer.num_indices > 0; ++g) {
    if (request.layer.groups[g].dst.row_bytes() == 0) continue;
    plan.shapes[plan.num_shapes++] = shape_of(request, g, num_sms, policy, SharedPlan());
  }
  if (plan.num_shapes == 0 || request.num_layers == 0) return plan;
  share_a_kernel(request, num_sms, policy, &plan);
  for (size_t s = 0; s < plan.num_shapes; ++s) {
    const LayerShape& shape = plan.shapes[s];
    const int64_t buffers = static_cast<int64_t>(request.layer.groups[shape.group].dst_base.size());
    plan.num_buffers += buffers;
    plan.items_per_layer += shape.items * buffers;
  }
  if (plan.items_per_layer > kMaxItems) {
    fail("load_layers", "dst_indices has ", request.layer.num_indices, " entries, which make ", plan.items_per_layer,
         " items of a layer; it needs at most ", kMaxItems, " (several calls, each with flags of its own)");
  }
  // Of all layers: blocks without an item of one layer have items of the next.
  const int64_t items = plan.items_per_layer * std::min(request.num_layers, kMaxItems / plan.items_per_layer);
  plan.num_blocks =
      std::min(plan.shapes[0].plan.wanted_blocks, (items + policy.warps_per_block - 1) / policy.warps_per_block);
  return plan;
}

}  // namespace kvio
