// Launching what load_layers and wait_layer run on a GPU.
#pragma once

#include "gpu/fault.h"
#include "gpu/platform.h"
#include "plan/layers_plan.h"
#include "request/load_layers_request.h"

namespace kvio::gpu {

// Moves every layer in order and raises its flag. One launch, except of listed buffers that are more than a launch can
// be told of. Base addresses and indices in `request` are device addresses.
void launch_load_layers(const LoadLayersRequest& request, const LayersPlan& plan, FaultRecord* fault, Stream stream);

// One thread that waits for a flag.
void launch_wait_layer(const WaitLayerRequest& request, FaultRecord* fault, Stream stream);

}  // namespace kvio::gpu
