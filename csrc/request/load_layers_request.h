// The requests of kvio::load_layers and kvio::wait_layer: what a transfer of one layer moves, where the other layers
// lie, and the flags that say which layers are in place.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "request/request.h"

namespace kvio {

constexpr int64_t kMaxBuffersPerLayer = 16;  // K, V, their scales, an indexer's keys
constexpr int64_t kMaxShapesPerLayer = 4;    // among them: geometries of one launch

// The tensor `flags`, int64 [2, columns]. Row 0: the newest epoch whose rows of a layer are in place, 0 for none. Row
// 1: how many waves of a load in flight have finished a layer, 0 between loads.
struct LayerFlags {
  int64_t* raised = nullptr;
  int64_t* finished = nullptr;
  int64_t layers = 0;
};

// Which load it is: a number of the caller's, or one that lies in a tensor on the flags' device.
struct Epoch {
  int64_t number = 0;
  const int64_t* at = nullptr;  // null: `number`
};

struct LoadLayersRequest {
  // Layer 0, whose buffers every other layer has too. Its buffer b is the one of position b in its groups.
  TransferRequest layer;
  int64_t num_layers = 0;
  int64_t num_buffers = 0;  // of a layer
  // Stacked pools: bytes from a buffer to that of the next layer, by b.
  std::vector<int64_t> dst_step;
  std::vector<int64_t> src_step;
  // A tensor for every buffer of every layer: where each begins, layer * num_buffers + b. Empty for stacked pools.
  std::vector<char*> dst_listed;
  std::vector<const char*> src_listed;
  LayerFlags flags;
  Epoch epoch;

  bool is_stacked() const { return dst_listed.empty(); }
  // Layer `number` as a transfer of its own.
  TransferRequest layer_at(int64_t number) const;
};

struct LoadLayersTensors {
  std::vector<TensorView> dst;
  std::vector<TensorView> src;
  TensorView dst_indices;
  TensorView src_indices;
  TensorView flags;
  std::optional<TensorView> epoch;
};

struct LoadLayersOptions {
  int64_t epoch = 0;       // where no tensor has it
  int64_t num_layers = 0;  // 0: stacked buffers, whose first dimension is the layer
  TransferOptions transfer;
};

// Checks everything that can be checked without touching a value of any tensor.
LoadLayersRequest make_load_layers_request(const LoadLayersTensors& tensors, const LoadLayersOptions& options,
                                           DtypeName dtype_name);

struct WaitLayerRequest {
  LayerFlags flags;
  int64_t layer = 0;
  Epoch epoch;
  int64_t timeout_ms = 0;
  int32_t gpu_index = -1;  // where the flags are, -1 for the CPU
};

struct WaitLayerOptions {
  int64_t layer = 0;
  int64_t epoch = 0;  // where no tensor has it
  int64_t timeout_ms = 0;
};

WaitLayerRequest make_wait_layer_request(const TensorView& flags, const std::optional<TensorView>& epoch,
                                         const WaitLayerOptions& options, DtypeName dtype_name);

}  // namespace kvio
