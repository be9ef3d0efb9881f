#include "gpu/transfer.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <sstream>

#include "error.h"
#include "gpu/driver.h"
#include "gpu/fault.h"
#include "gpu/host_memory.h"
#include "gpu/index_upload.h"
#include "gpu/platform.h"
#include "gpu/stream.h"
#include "gpu/transfer_register.h"
#include "plan/register_plan.h"

namespace kvio::gpu {
namespace {

int sm_count(const char* op, int device) {
  static std::atomic<int> counts[kMaxDevices];
  std::atomic<int>& known = counts[device];
  int count = known.load(std::memory_order_relaxed);
  if (count == 0) {
    check(op, "reading the number of SMs", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    known.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Puts device-usable addresses in place of host ones; throws on a host tensor that is not page-locked.
void translate_host_buffers(const char* op, TransferRequest* request) {
  HostTranslator translator(op);
  for (BufferGroup& group : request->groups) {
    if (group.dst.row_bytes() == 0) continue;
    for (size_t b = 0; b < group.dst_base.size(); ++b) {
      if (request->dst_device == DeviceKind::kCpu) {
        group.dst_base[b] = translator.device_address("dst", group.position[b], group.dst_base[b], group.dst_extent);
      }
      if (request->src_device == DeviceKind::kCpu) {
        group.src_base[b] = translator.device_address("src", group.position[b], group.src_base[b], group.src_extent);
      }
    }
  }
}

}  // namespace

void transfer(TransferRequest* request) {
  constexpr const char* op = "transfer";
  const int device = request->gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  const Stream stream = current_stream(op, device);
  const bool cpu_indices = request->index_device == DeviceKind::kCpu;
  const bool capturing = cpu_indices && !request->empty() && is_capturing(stream);
  GpuFacts gpu;
  gpu.capturing = capturing;
  choose_backend(op, request->backend, facts_of(*request, gpu));
  if (request->empty()) return;
  translate_host_buffers(op, request);

  std::optional<torch::stable::Tensor> indices;
  if (cpu_indices) indices = upload_indices(op, request, stream);
  for (const BufferGroup& group : request->groups) {
    if (group.dst.row_bytes() == 0) continue;
    launch_register(*request, group, sm_count(op, device), device, stream);
  }
}

void memcpy_batch(const MemcpyBatchRequest& request) {
  constexpr const char* op = "memcpy_batch";
  if (request.copies.empty()) return;
  const DeviceGuard guard(op, request.gpu_index);
  raise_pending_fault(op, request.gpu_index);
  const Stream stream = current_stream(op, request.gpu_index);
  HostTranslator dst_translator(op);
  HostTranslator src_translator(op);
  const auto accept = [&](const ByteCopy& copy) {
    if (request.dst_device == DeviceKind::kCpu) {
      dst_translator.device_address("dst", copy.dst_position, copy.dst, copy.nbytes);
    }
    if (request.src_device == DeviceKind::kCpu) {
      src_translator.device_address("src", copy.src_position, copy.src, copy.nbytes);
    }
  };
  for (const ByteCopy& copy : request.copies) accept(copy);
  for (const ByteCopy& copy : request.copies) {
    accept(copy);
    for (int64_t done = 0; done < copy.nbytes;) {
      int64_t step = copy.nbytes - done;
      if (request.dst_device == DeviceKind::kCpu) step = std::min(step, dst_translator.bytes_in_chunk(copy.dst + done));
      if (request.src_device == DeviceKind::kCpu) step = std::min(step, src_translator.bytes_in_chunk(copy.src + done));
      check(op, "copying",
            cudaMemcpyAsync(copy.dst + done, copy.src + done, static_cast<size_t>(step), cudaMemcpyDefault, stream));
      done += step;
    }
  }
}

std::string explain(const TransferRequest& request) {
  constexpr const char* op = "explain";
  const DeviceGuard guard(op, request.gpu_index);
  const Stream stream = current_stream(op, request.gpu_index);
  GpuFacts gpu;
  gpu.capturing = is_capturing(stream);
  const BackendFacts facts = complete_facts_of(request, gpu);
  const BackendChoice choice = choose_backend(op, request.backend, facts);
  std::ostringstream text;
  text << describe(choice, facts);
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0 || request.num_indices == 0) continue;
    const int64_t range = std::min(max_indices_per_launch(request, group), request.num_indices);
    const RegisterPlan plan = make_register_plan(request, group, range, sm_count(op, request.gpu_index));
    text << "launch: " << group.dst_base.size() << " buffers, " << plan.num_blocks << " CTAs, " << plan.package_bytes
         << "-byte loads, " << plan.units << " units of " << plan.dst.piece_bytes << " bytes a buffer, "
         << plan.units_per_item << " a warp, " << plan.split.lanes_per_unit << " lanes a unit with "
         << plan.split.units_per_lane << "x" << plan.split.loads_per_unit << " loads in flight\n";
  }
  return text.str();
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
  cudaGetLastError();
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
