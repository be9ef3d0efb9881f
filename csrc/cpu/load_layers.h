// The CPU kernels of load_layers and wait_layer: a load is over when it returns, so a wait only looks.
#pragma once

#include "request/load_layers_request.h"

namespace kvio::cpu {

// Copies layer by layer and raises each one's flag behind it. Everything is on the CPU, indices have been checked.
// Throws, before a byte moves, where a flag is at the epoch already.
void load_layers(const LoadLayersRequest& request);

// Throws where the layer's flag is not raised for the epoch.
void wait_layer(const WaitLayerRequest& request);

}  // namespace kvio::cpu
