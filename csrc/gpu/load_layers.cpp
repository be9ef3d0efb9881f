#include "gpu/load_layers.h"

#include <algorithm>
#include <optional>

#include "error.h"
#include "gpu/device_facts.h"
#include "gpu/device_guard.h"
#include "gpu/fault.h"
#include "gpu/host_sides.h"
#include "gpu/index_upload.h"
#include "gpu/load_layers_kernels.h"
#include "gpu/order_indices.h"
#include "gpu/stream.h"
#include "plan/order.h"

namespace kvio::gpu {
namespace {

// A graph that kept a number would raise, and find raised, the same epoch at every replay.
void check_epoch_of_capture(const char* op, const Epoch& epoch) {
  if (epoch.at != nullptr) return;
  fail(op, "epoch is the number ", epoch.number,
       " while the stream is being captured, which every replay would repeat; it needs an int64 tensor on the GPU that "
       "grows from replay to replay");
}

void check_capture(const LoadLayersRequest& request) {
  check_epoch_of_capture("load_layers", request.epoch);
  if (request.layer.index_device != DeviceKind::kCpu || request.layer.num_indices == 0) return;
  fail(
      "load_layers",
      "dst_indices is on the CPU while the stream is being captured; a graph needs indices on the GPU, whose values it "
      "reads at every replay");
}

// As of a transfer of one layer, but ordering is paid for once and serves all layers.
bool worth_ordering_once(const LoadLayersRequest& request) {
  if (request.layer.index_device == DeviceKind::kCpu) return worth_ordering(request.layer);
  OrderPolicy policy;
  policy.unseen_payload_bytes /= request.num_layers;
  return worth_ordering_unseen(request.layer, policy);
}

}  // namespace

void load_layers(LoadLayersRequest* request) {
  constexpr const char* op = "load_layers";
  TransferRequest* layer = &request->layer;
  const int device = layer->gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  const Stream stream = current_stream(op, device);
  if (is_capturing(stream)) check_capture(*request);
  if (request->num_layers == 0) return;
  LayersPlan plan;
  std::optional<torch::stable::Tensor> uploaded;
  std::optional<torch::stable::Tensor> permuted;
  if (!layer->empty()) {
    translate_host_layers(op, request);
    plan = make_layers_plan(*request, sm_count(op, device), register_policy(kPlatform));
    // Before the lists go over: it reads them.
    const bool in_order = worth_ordering_once(*request);
    if (layer->index_device == DeviceKind::kCpu) uploaded = upload_indices(op, layer, stream);
    if (in_order) permuted = order_indices(op, layer, stream);
  }
  launch_load_layers(*request, plan, fault_record(op, device), stream);
}

void wait_layer(const WaitLayerRequest& request) {
  constexpr const char* op = "wait_layer";
  const int device = request.gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  if (request.epoch.at == nullptr && request.epoch.number <= 0) return;  // raised from the start
  const Stream stream = current_stream(op, device);
  if (is_capturing(stream)) check_epoch_of_capture(op, request.epoch);
  launch_wait_layer(request, fault_record(op, device), stream);
}

}  // namespace kvio::gpu
