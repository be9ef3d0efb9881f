#include "gpu/transfer.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <sstream>

#include "error.h"
#include "gpu/copy_engine.h"
#include "gpu/device_facts.h"
#include "gpu/device_guard.h"
#include "gpu/driver.h"
#include "gpu/fault.h"
#include "gpu/host_sides.h"
#include "gpu/index_upload.h"
#include "gpu/order_indices.h"
#include "gpu/platform.h"
#include "gpu/stream.h"
#include "gpu/transfer_register.h"
#include "gpu/transfer_tma.h"
#include "plan/order.h"
#include "plan/register_plan.h"

namespace kvio::gpu {
namespace {

// Whether the call's rows are moved in the order of host addresses.
bool ordered(const TransferRequest& request) {
  return request.index_device == DeviceKind::kCpu ? worth_ordering(request) : worth_ordering_unseen(request);
}

}  // namespace

void transfer(const char* op, TransferRequest* request) {
  const int device = request->gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  const Stream stream = current_stream(op, device);
  const bool cpu_indices = request->index_device == DeviceKind::kCpu;
  const bool capturing = cpu_indices && !request->empty() && is_capturing(stream);
  const GpuFacts gpu = gpu_facts(op, device, stream, capturing);
  const BackendChoice choice = choose_backend(op, request->backend, facts_of(*request, gpu));
  if (request->empty()) return;
  if (choice.backend == Backend::kCopyEngine) {
    launch_copy_engine(op, *request, gpu, stream);
    return;
  }
  translate_host_buffers(op, request);

  // Before the lists go over: it reads them.
  const bool in_order = ordered(*request);
  std::optional<torch::stable::Tensor> uploaded;
  std::optional<torch::stable::Tensor> permuted;
  if (cpu_indices) uploaded = upload_indices(op, request, stream);
  if (in_order) permuted = order_indices(op, request, stream);
  for (const BufferGroup& group : request->groups) {
    if (group.dst.row_bytes() == 0) continue;
    if (choice.backend == Backend::kTma) {
      launch_tma(*request, group, device, stream);
    } else {
      launch_register(*request, group, sm_count(op, device), device, stream);
    }
  }
}

void memcpy_batch(const MemcpyBatchRequest& request) {
  constexpr const char* op = "memcpy_batch";
  if (request.copies.empty()) return;
  const DeviceGuard guard(op, request.gpu_index);
  raise_pending_fault(op, request.gpu_index);
  launch_byte_copies(op, request, current_stream(op, request.gpu_index));
}

namespace {

std::string describe_register(const TransferRequest& request, const BufferGroup& group, int device) {
  const int64_t range = std::min(max_indices_per_launch(request, group), request.num_indices);
  const RegisterPlan plan =
      make_register_plan(request, group, range, sm_count("explain", device), register_policy(kPlatform));
  std::ostringstream text;
  text << "launch: " << group.dst_base.size() << " buffers, " << plan.num_blocks << " CTAs, " << plan.package_bytes
       << "-byte loads, " << plan.units << " units of " << plan.dst.piece_bytes << " bytes a buffer, "
       << plan.units_per_item << " a warp, " << plan.split.lanes_per_unit << " lanes a unit with "
       << plan.split.units_per_lane << "x" << plan.split.loads_per_unit << " loads in flight\n";
  return text.str();
}

std::string describe_tma(const TransferRequest& request, const BufferGroup& group, int device) {
  const int64_t range = std::min(max_indices_per_launch(request, group), request.num_indices);
  const TmaPlan plan = make_tma_plan(request, group, range, has_tensor_maps(), tma_policy("explain", device));
  std::ostringstream text;
  text << "launch: " << group.dst_base.size() << " buffers, " << plan.num_blocks << " CTAs, "
       << plan.units_per_chunk * plan.unit_bytes << "-byte chunks, " << plan.stages << " stages, ";
  if (plan.box_tokens > 0) {
    text << "boxes of " << plan.box_tokens << " tokens";
  } else {
    text << "1-D bulk copies";
  }
  text << ", " << plan.loaders << " load and " << plan.store_warps << " store warps, " << plan.units << " units of "
       << plan.unit_bytes << " bytes a buffer\n";
  return text.str();
}

}  // namespace

std::string explain(const TransferRequest& request) {
  constexpr const char* op = "explain";
  const int device = request.gpu_index;
  const DeviceGuard guard(op, device);
  const Stream stream = current_stream(op, device);
  const GpuFacts gpu = gpu_facts(op, device, stream, is_capturing(stream));
  const BackendFacts facts = complete_facts_of(request, gpu);
  const BackendChoice choice = choose_backend(op, request.backend, facts);
  std::string text = describe(choice, facts) + describe_capture(request.backend, facts);
  if (choice.backend == Backend::kCopyEngine) return text + explain_copy_engine(op, request, gpu);
  if (ordered(request)) text += "order: by host address, coarsely\n";
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0 || request.num_indices == 0) continue;
    text += choice.backend == Backend::kTma ? describe_tma(request, group, device)
                                            : describe_register(request, group, device);
  }
  return text;
}

int resolve_device(const char* op, int64_t device_index) {
  const int device = current_or(op, device_index);
  if (device < 0) fail(op, "there is no GPU that torch can use; it needs one");
  return device;
}

int current_or(const char* op, int64_t device_index) {
  if (device_index < -1 || device_index >= kMaxDevices) {
    fail(op, "device_index is ", device_index, "; it needs -1 (the current device) to ", kMaxDevices - 1);
  }
  if (device_index >= 0) return static_cast<int>(device_index);
  int32_t device = -1;
  return aoti_torch_get_current_device_index(&device) == 0 ? device : -1;
}

std::string driver_info() {
  int driver = 0;
  int devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (driver > 0 && cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  (void)cudaGetLastError();
  std::ostringstream text;
  text << "\"driver\": " << driver << ", \"devices\": " << devices << ", \"entry_points\": {";
  const char* separator = "";
  for (const EntryPoint& point : entry_points()) {
    text << separator << "\"" << point.name << "\": " << (point.found ? "true" : "false");
    separator = ", ";
  }
  text << "}";
  return text.str();
}

}  // namespace kvio::gpu
