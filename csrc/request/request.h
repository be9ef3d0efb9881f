// Tensors in, checked request out: the one place where an argument is refused. Every backend consumes the request
// and trusts it. No GPU header, no torch header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "request/buffer_list.h"
#include "request/fault_subject.h"
#include "request/pool_view.h"
#include "request/tensor_view.h"

namespace kvio {

struct IndexList {
  const void* data = nullptr;
  int64_t stride = 1;  // elements
  bool is_int64 = false;

  int64_t entry_bytes() const { return is_int64 ? 8 : 4; }

  // The list without its first `position` entries.
  IndexList from(int64_t position) const {
    return {static_cast<const char*>(data) + position * stride * entry_bytes(), stride, is_int64};
  }

  int64_t at(int64_t position) const {
    const int64_t i = position * stride;
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// What `auto` is asked to favour: the rate, or the least disturbance of what runs beside the transfer.
enum class Prefer : uint8_t { kThroughput, kQuiet };

struct TransferOptions {
  int64_t row_ndim = 2;
  int64_t page_size = 1;
  std::string index_unit = "token";
  std::string backend = "auto";
  int64_t num_blocks = 0;
  std::string prefer = "throughput";
  bool one_index_device = true;  // else the two index lists may lie on different devices
  SideNames names{"dst", "src"};
};

struct TransferRequest {
  std::vector<BufferGroup> groups;
  IndexList dst_indices;
  IndexList src_indices;
  int64_t num_indices = 0;
  int64_t slots_per_index = 1;  // page_size for page indices, 1 for token indices
  int64_t page_size = 1;
  int64_t num_blocks = 0;
  std::string backend;
  Prefer prefer = Prefer::kThroughput;
  DeviceKind dst_device = DeviceKind::kCpu;
  DeviceKind src_device = DeviceKind::kCpu;
  DeviceKind index_device = DeviceKind::kCpu;  // of both lists, where they are on one
  DeviceKind dst_index_device = DeviceKind::kCpu;
  DeviceKind src_index_device = DeviceKind::kCpu;
  SideNames names{"dst", "src"};
  // What a fault of a kernel is called, and where in the caller's lists these begin.
  FaultOp fault_op = FaultOp::kTransfer;
  int64_t first_position = 0;
  // On the GPU: where each entry was in the caller's lists, null when they are as the caller gave them.
  const int32_t* caller_positions = nullptr;
  int32_t gpu_index = -1;  // the one GPU involved, -1 for none

  int64_t payload_bytes() const;
  int64_t num_buffers() const;
  // Nothing to move: no buffers, no indices, or rows of no bytes.
  bool empty() const { return payload_bytes() == 0; }
};

// Checks everything that can be checked without touching index values and groups the buffers.
TransferRequest make_transfer_request(const char* op, const std::vector<TensorView>& dst,
                                      const std::vector<TensorView>& src, const TensorView& dst_indices,
                                      const TensorView& src_indices, const TransferOptions& options,
                                      DtypeName dtype_name);

// Index lists on the CPU only: every entry inside both pools, else throws before a byte moves. With `with_conflicts`
// also throws on a destination that is named twice, or a row that is both read and written.
void check_cpu_indices(const char* op, const TransferRequest& request, bool with_conflicts);

// One copy of kvio::memcpy_batch, checked.
struct ByteCopy {
  char* dst;
  const char* src;
  int64_t nbytes;
  int64_t dst_position;  // of the tensors in the caller's lists
  int64_t src_position;
};

struct MemcpyBatchRequest {
  std::vector<ByteCopy> copies;
  DeviceKind dst_device = DeviceKind::kCpu;
  DeviceKind src_device = DeviceKind::kCpu;
  int32_t gpu_index = -1;
};

MemcpyBatchRequest make_memcpy_batch_request(const std::vector<TensorView>& dst, const std::vector<TensorView>& src,
                                             const std::vector<int64_t>& dst_offsets,
                                             const std::vector<int64_t>& src_offsets,
                                             const std::vector<int64_t>& nbytes);

// Throws unless the tensor's elements lie in memory in order without gaps.
void check_contiguous(const char* op, const std::string& argument, const TensorView& tensor);

}  // namespace kvio
