#include "gpu/swap_in.h"

#include <algorithm>
#include <optional>

#include "error.h"
#include "gpu/device_facts.h"
#include "gpu/device_guard.h"
#include "gpu/device_memory.h"
#include "gpu/fault.h"
#include "gpu/host_sides.h"
#include "gpu/stream.h"
#include "gpu/swap_in_kernels.h"

namespace kvio::gpu {
namespace {

constexpr int64_t kMaxPiecesOfRequest = int64_t{1} << 26;
constexpr int64_t kMaxSteps = int64_t{1} << 31;

// Kernels number the pieces of a request's rows in 26 bits, those of 16 buffers in 30.
void check_pieces(const char* op, const SwapInPools& pools, int64_t misses) {
  for (const BufferGroup& group : pools.groups) {
    if (misses * group.dst.num_pieces < kMaxPiecesOfRequest) continue;
    fail(op, "device_buffer[", group.position[0], "] has rows of ", group.dst.num_pieces,
         " pieces; it needs fewer than ", kMaxPiecesOfRequest, " in all rows of a request");
  }
}

// Kernels multiply with row strides in bytes, of 32 bits.
void check_stride(const char* op, const char* name, int64_t stride, int64_t element_bytes) {
  const int64_t most = (int64_t{1} << 32) / element_bytes - 1;
  if (stride > most) fail(op, name, " has a stride of ", stride, " elements; it may be at most ", most);
}

template <class T>
void check_stride(const char* op, const char* name, const Rows<T>& rows) {
  check_stride(op, name, rows.stride, sizeof(T));
}

template <class Plan>
void check_plan_strides(const char* op, const Plan& plan) {
  check_stride(op, "miss_src", plan.miss_src);
  check_stride(op, "miss_dst", plan.miss_dst);
}

void check_strides(const char* op, const SwapInRequest& r) {
  check_stride(op, "top_k_tokens", r.top_k_tokens);
  check_stride(op, "device_buffer_tokens", r.device_buffer_tokens);
  check_stride(op, "device_buffer_locs", r.device_buffer_locs);
  check_stride(op, "req_pool_indices", r.req_pool_indices.stride, r.req_pool_indices.is_int64 ? 8 : 4);
  check_stride(op, "seq_lens", r.seq_lens.stride, r.seq_lens.is_int64 ? 8 : 4);
  check_stride(op, "host_cache_locs", r.host_cache_locs.stride, r.host_cache_locs.is_int64 ? 8 : 4);
  check_stride(op, "lru_slots", r.lru_slots);
  check_stride(op, "top_k_device_locs", r.top_k_device_locs);
  if (r.device_locs) check_stride(op, "device_locs", *r.device_locs);
  if (r.plan) check_plan_strides(op, *r.plan);
}

void translate_pools(const char* op, SwapInPools* pools) {
  if (!pools->moves_bytes()) return;
  HostSides host(op, SideNames{"device_buffer", "host_cache"}, pools->device, pools->host_device);
  accept_buffers(&host, *pools, [](BufferGroup& group, size_t b, char* dst, const char* src) {
    group.dst_base[b] = dst;
    group.src_base[b] = src;
  });
}

// What those who resolve copy: everything, or nothing where the caller says how many blocks copy, or where there are
// more buffers than one launch takes.
FusedCopy fused_copy_of(const SwapInRequest& request) {
  const SwapInPolicy policy;
  FusedCopy copy;
  if (!request.pools.moves_bytes() || request.pools.num_blocks > 0) return copy;
  int64_t row_bytes = 0;
  int64_t steps = 0;
  for (const BufferGroup& group : request.pools.groups) {
    if (group.dst.row_bytes() == 0) continue;
    if (copy.groups.size() == kMaxFusedGroups || group.dst_base.size() > kMaxSwapInBuffers) return FusedCopy();
    copy.groups.push_back(&group);
    const int64_t buffers = static_cast<int64_t>(group.dst_base.size());
    row_bytes += group.dst.row_bytes() * buffers;
    const int64_t units = request.top_k * group.dst.num_pieces * buffers;
    steps = std::max(steps, units * make_fused_copy_plan(group, kPolicy).steps);
  }
  if (steps >= kMaxSteps) return FusedCopy();
  copy.turns = policy.copying_ctas;
  copy.free_misses = request.batch <= copy.turns ? request.top_k : policy.free_bytes / row_bytes;
  return copy;
}

// A plan of the call's own. The memory is the result.
torch::stable::Tensor make_plan(SwapInRequest* request, int device) {
  const int64_t entries = request->batch * request->top_k;
  torch::stable::Tensor memory = device_bytes(entries * 12 + request->batch * 4, device);
  char* base = static_cast<char*>(memory.data_ptr());
  RecordedPlan plan;
  plan.miss_src = {reinterpret_cast<int64_t*>(base), request->top_k};
  plan.miss_dst = {reinterpret_cast<int32_t*>(base + entries * 8), request->top_k};
  plan.miss_count = {reinterpret_cast<int32_t*>(base + entries * 12), 1};
  request->plan = plan;
  return memory;
}

void replay(const CopyPlannedRequest& request, bool early, FaultRecord* fault, Stream stream) {
  for (const BufferGroup& group : request.pools.groups) {
    if (group.dst.row_bytes() == 0) continue;
    launch_copy_planned(request, group, make_planned_copy_plan(group, kPolicy), early, fault, stream);
  }
}

// Whether the GPU has launches that begin early, and clusters.
bool starts_early(const char* op, int device) { return gpu_facts(op, device, nullptr, false).compute_major >= 9; }

CopyPlannedRequest replay_of(const SwapInRequest& request) {
  CopyPlannedRequest copy;
  copy.pools = request.pools;
  copy.batch = request.batch;
  copy.max_misses = request.top_k;
  copy.plan.miss_src = {request.plan->miss_src.data, request.plan->miss_src.stride};
  copy.plan.miss_dst = {request.plan->miss_dst.data, request.plan->miss_dst.stride};
  copy.plan.miss_count = {request.plan->miss_count.data, request.plan->miss_count.stride};
  copy.num_real_reqs = request.num_real_reqs;
  return copy;
}

}  // namespace

void swap_in(SwapInRequest* request) {
  constexpr const char* op = "swap_in";
  const int device = request->pools.gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  if (request->batch == 0 || request->top_k == 0) return;
  check_strides(op, *request);
  check_pieces(op, request->pools, request->top_k);
  translate_pools(op, &request->pools);
  const Stream stream = current_stream(op, device);
  FaultRecord* fault = fault_record(op, device);

  // Allocating spoils the graph that another thread captures, unless this thread says that it knows better.
  const RelaxedCapture relaxed;
  const bool is_early = starts_early(op, device);
  const int64_t ctas = cluster_ctas_for(request->batch, sm_count(op, device), is_early);
  const ResolvePlan resolve = plan_resolve(*request, ctas, is_early, device);
  std::optional<torch::stable::Tensor> tables;
  if (resolve.scratch_bytes > 0) tables = device_bytes(resolve.scratch_bytes * request->batch, device);
  char* scratch = tables ? static_cast<char*>(tables->data_ptr()) : nullptr;
  const FusedCopy copy = fused_copy_of(*request);
  const bool replays = request->pools.moves_bytes() && copy.groups.empty();
  std::optional<torch::stable::Tensor> plan;
  if (replays && !request->plan) plan = make_plan(request, device);
  launch_resolve(*request, resolve, scratch, copy, fault, device, stream);
  if (replays) replay(replay_of(*request), is_early, fault, stream);
}

void copy_planned(CopyPlannedRequest* request) {
  constexpr const char* op = "copy_planned";
  const int device = request->pools.gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  if (request->batch == 0 || !request->pools.moves_bytes()) return;
  check_plan_strides(op, request->plan);
  check_pieces(op, request->pools, request->max_misses);
  translate_pools(op, &request->pools);
  replay(*request, starts_early(op, device), fault_record(op, device), current_stream(op, device));
}

}  // namespace kvio::gpu
