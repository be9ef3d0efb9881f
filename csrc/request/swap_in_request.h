// The requests of kvio::swap_in and kvio::copy_planned: state tensors as typed rows, buffers as pool views.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "request/request.h"

namespace kvio {

constexpr int64_t kMaxHotSlots = 32767;  // slots are int16 in lru_slots

// A 2-D tensor whose rows are contiguous. `T` is const where the op only reads.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;  // elements from row to row: any value, also 0 where the tensor is only read

  T* row(int64_t r) const { return data + r * stride; }
  T& at(int64_t r, int64_t column) const { return row(r)[column]; }
};

// Locations in a host pool, int32 or int64.
struct HostLocs {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  bool is_int64 = false;

  int64_t at(int64_t r, int64_t column) const {
    const int64_t i = r * stride + column;
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// A 1-D tensor with any stride.
template <class T>
struct Strided {
  T* data = nullptr;
  int64_t stride = 1;  // elements

  T& at(int64_t i) const { return data[i * stride]; }
};

// What replays a swap-in: of row b, miss_count[b] pairs (miss_src[b, m], miss_dst[b, m]), a host and a device location.
template <class Src, class Dst>
struct PlanRows {
  Rows<Src> miss_src;
  Rows<Dst> miss_dst;
  Strided<Dst> miss_count;
};
using RecordedPlan = PlanRows<int64_t, int32_t>;
using ReplayedPlan = PlanRows<const int64_t, const int32_t>;

// Where the rows are: the same for both ops. In a group, `dst` is the device buffer and `src` the host cache.
struct SwapInPools {
  std::vector<BufferGroup> groups;
  SlotLimit host_limit;    // locations in host_cache are below host_limit.slots; INT64_MAX without buffers
  SlotLimit device_limit;  // locations in device_buffer likewise
  DeviceKind device = DeviceKind::kCpu;       // of the device buffer and of every state tensor
  DeviceKind host_device = DeviceKind::kCpu;  // of the host cache: the CPU, or the GPU of the rest
  int32_t gpu_index = -1;                     // the one GPU involved, -1 for none
  bool skip_io = false;                       // everything but the bytes of rows
  int64_t num_blocks = 0;

  // Nothing to move: no buffers, rows of no bytes, or told not to.
  bool moves_bytes() const;
};

struct SwapInRequest {
  SwapInPools pools;
  int64_t batch = 0;            // rows of the batch, padding included
  int64_t top_k = 0;            // entries of a row
  int64_t hot_buffer_size = 0;  // B: slots 0 to B-1 are managed, column B is the newest token's
  int64_t pool_slots = 0;       // requests that state tensors have rows for
  int64_t max_len = 0;          // token positions that host_cache_locs (and device_locs) have columns for

  Rows<const int32_t> top_k_tokens;                // [batch, top_k]
  Rows<int32_t> device_buffer_tokens;              // [pool_slots, B or more]
  Rows<const int32_t> device_buffer_locs;          // [pool_slots, B + 1 or more]
  HostLocs host_cache_locs;                        // [pool_slots, max_len]
  Rows<int16_t> lru_slots;                         // [pool_slots, B]
  Rows<int32_t> top_k_device_locs;                 // [batch, top_k]
  IndexList req_pool_indices;                      // [batch]
  IndexList seq_lens;                              // [batch]
  const int32_t* num_real_reqs = nullptr;          // one entry; null: every row of the batch is real
  std::optional<Rows<const int32_t>> device_locs;  // [pool_slots, max_len]; none: no pass-through
  std::optional<RecordedPlan> plan;                // none: nothing is recorded
};

struct CopyPlannedRequest {
  SwapInPools pools;
  int64_t batch = 0;
  int64_t max_misses = 0;  // columns of miss_src and miss_dst
  ReplayedPlan plan;
  const int32_t* num_real_reqs = nullptr;  // one entry
};

// The tensors of a call as they are given.
struct SwapInTensors {
  TensorView top_k_tokens;
  TensorView device_buffer_tokens;
  TensorView device_buffer_locs;
  TensorView host_cache_locs;
  TensorView lru_slots;
  std::vector<TensorView> host_cache;
  std::vector<TensorView> device_buffer;
  TensorView top_k_device_locs;
  TensorView req_pool_indices;
  TensorView seq_lens;
  std::optional<TensorView> num_real_reqs;
  std::optional<TensorView> device_locs;
  std::optional<TensorView> miss_src;
  std::optional<TensorView> miss_dst;
  std::optional<TensorView> miss_count;
};

struct CopyPlannedTensors {
  std::vector<TensorView> host_cache;
  std::vector<TensorView> device_buffer;
  TensorView miss_src;
  TensorView miss_dst;
  TensorView miss_count;
  TensorView num_real_reqs;
};

struct SwapInOptions {
  int64_t hot_buffer_size = 0;  // swap_in only
  bool skip_io = false;
  int64_t row_ndim = 2;
  int64_t num_blocks = 0;
};

// Check everything that can be checked without touching a value of any tensor: dtypes, shapes, strides, devices,
// memory that is written and shared.
SwapInRequest make_swap_in_request(const SwapInTensors& tensors, const SwapInOptions& options, DtypeName dtype_name);
CopyPlannedRequest make_copy_planned_request(const CopyPlannedTensors& tensors, const SwapInOptions& options,
                                             DtypeName dtype_name);

// Requests on the CPU only: how many rows of the batch are real. Throws where the number is none of the batch.
int64_t real_rows(const char* op, const int32_t* num_real_reqs, int64_t batch);

}  // namespace kvio
