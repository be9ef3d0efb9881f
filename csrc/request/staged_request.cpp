#include "request/staged_request.h"

#include "error.h"

namespace kvio {
namespace {

void check_places(const char* op, const TransferRequest& request) {
  if (request.groups.empty()) return;
  const bool dst_on_host = request.dst_device == DeviceKind::kCpu;
  const bool src_on_host = request.src_device == DeviceKind::kCpu;
  const bool all_on_cpu = request.gpu_index < 0;
  if (!all_on_cpu && dst_on_host == src_on_host) {
    fail(op, "dst and src are both on the ", dst_on_host ? "CPU" : "GPU",
         "; it needs one pool on the host and one on the GPU (kvio::transfer serves the others)");
  }
  const DeviceKind host_list = dst_on_host ? request.dst_index_device : request.src_index_device;
  if (host_list != DeviceKind::kCpu) {
    fail(op, dst_on_host ? "dst_indices" : "src_indices",
         " is on the GPU but names rows of the host pool; it needs the CPU, where their addresses are worked out");
  }
}

void check_staging(const char* op, const TransferRequest& request, const TensorView& staging) {
  check_contiguous(op, "staging", staging);
  const DeviceKind wanted = request.gpu_index < 0 ? DeviceKind::kCpu : DeviceKind::kGpu;
  if (staging.device != wanted || (wanted == DeviceKind::kGpu && staging.device_index != request.gpu_index)) {
    fail(op, "staging is on ", device_name(staging.device, staging.device_index), "; it needs ",
         device_name(wanted, request.gpu_index), ", as the device pool");
  }
  if (extent_bytes(staging) > staging.storage_bytes) {
    fail(op, "staging spans ", extent_bytes(staging), " bytes but its storage has ", staging.storage_bytes,
         " from there on; it needs a storage that was not resized");
  }
  if (reinterpret_cast<uint64_t>(staging.data) % 16 != 0) {
    fail(op, "staging starts at an address that is no multiple of 16; it needs one that is");
  }
}

}  // namespace

StagedRequest make_staged_request(const char* op, const std::vector<TensorView>& dst,
                                  const std::vector<TensorView>& src, const TensorView& dst_indices,
                                  const TensorView& src_indices, const TensorView& staging,
                                  const TransferOptions& options, DtypeName dtype_name) {
  TransferOptions mixed = options;
  mixed.one_index_device = false;
  StagedRequest staged;
  staged.transfer = make_transfer_request(op, dst, src, dst_indices, src_indices, mixed, dtype_name);
  staged.transfer.fault_op = FaultOp::kTransferStaged;
  // Without buffers and with both lists on the CPU nothing else says where the device pool would be.
  if (dst.empty() && staged.transfer.gpu_index < 0 && staging.device == DeviceKind::kGpu) {
    staged.transfer.gpu_index = staging.device_index;
  }
  check_places(op, staged.transfer);
  check_staging(op, staged.transfer, staging);
  staged.staging = staging.data;
  staged.staging_bytes = extent_bytes(staging);
  return staged;
}

}  // namespace kvio
