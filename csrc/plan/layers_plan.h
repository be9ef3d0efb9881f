// How load_layers cuts a layer into work items of the register kernel. Every layer is cut alike, and items are numbered
// layer by layer, so that waves which have no item of a layer left go on with the next one. Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/register_plan.h"
#include "request/load_layers_request.h"

namespace kvio {

// One shape of rows among a layer's buffers.
struct LayerShape {
  size_t group = 0;  // of LoadLayersRequest::layer
  RegisterPlan plan;
  int64_t items = 0;  // of one buffer in one layer
};

struct LayersPlan {
  LayerShape shapes[kMaxShapesPerLayer];
  size_t num_shapes = 0;    // those with bytes to move
  int64_t num_buffers = 0;  // of a layer, with bytes to move
  // One kernel serves all shapes: the narrowest load among them, and the lane split of those with most bytes.
  int64_t package_bytes = 16;
  LaneSplit kernel;
  int64_t items_per_layer = 0;
  int64_t num_blocks = 1;
};

// Base addresses in `request` are those that the kernel uses. Throws where a layer has more items than it can count.
LayersPlan make_layers_plan(const LoadLayersRequest& request, int64_t num_sms, const RegisterPolicy& policy);

}  // namespace kvio
