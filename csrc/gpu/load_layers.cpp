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

// Puts the addresses that the GPU uses in place of host ones. Device pools stay as they are.
void translate_sources(const char* op, LoadLayersRequest* request) {
  if (request->layer.src_device != DeviceKind::kCpu) return;
  HostSide host(op, "src", DeviceKind::kCpu);
  const int64_t more_layers = request->num_layers - 1;
  for (BufferGroup& group : request->layer.groups) {
    if (group.dst.row_bytes() == 0) continue;
    for (size_t i = 0; i < group.position.size(); ++i) {
      const int64_t b = group.position[i];
      for (size_t at = static_cast<size_t>(b); at < request->src_listed.size();
           at += static_cast<size_t>(request->num_buffers)) {
        request->src_listed[at] = host.accept(static_cast<int64_t>(at), request->src_listed[at], group.src_extent);
      }
      const int64_t span = group.src_extent + more_layers * request->src_step[static_cast<size_t>(b)];
      group.src_base[i] = host.accept(b, group.src_base[i], span);
    }
  }
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
    translate_sources(op, request);
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
