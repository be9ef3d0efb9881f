// The GPU side of load_layers and wait_layer.
#pragma once

#include "request/load_layers_request.h"

namespace kvio::gpu {

// Replaces host addresses and CPU indices in `request` by what the GPU uses.
void load_layers(LoadLayersRequest* request);

void wait_layer(const WaitLayerRequest& request);

}  // namespace kvio::gpu
