#include "gpu/swap_in.h"

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
constexpr int64_t kStaticSharedBytes = 1024;  // what the kernel has besides its workspace, and the system's share

// Kernels number the pieces of a request's rows in 26 bits, those of 16 buffers in 30.
void check_pieces(const char* op, const SwapInPools& pools, int64_t misses) {
  for (const BufferGroup& group : pools.groups) {
    if (misses * group.dst.num_pieces < kMaxPiecesOfRequest) continue;
    fail(op, "device_buffer[", group.position[0], "] has rows of ", group.dst.num_pieces,
         " pieces; it needs fewer than ", kMaxPiecesOfRequest, " in all rows of a request");
  }
}

void translate_pools(const char* op, SwapInPools* pools) {
  if (!pools->moves_bytes()) return;
  HostSides host(op, SideNames{"device_buffer", "host_cache"}, pools->device, pools->host_device);
  accept_buffers(&host, *pools, [](BufferGroup& group, size_t b, char* dst, const char* src) {
    group.dst_base[b] = dst;
    group.src_base[b] = src;
  });
}

// Rows of one geometry in 16-byte packages (any rows, by the wave copy), few buffers, few requests: those who resolve
// can copy as well.
std::optional<FusedCopy> fused_copy_of(const SwapInRequest& request, int device) {
  if (!request.pools.moves_bytes() || request.batch > SwapInPolicy().fused_batch) return std::nullopt;
  if (request.pools.num_blocks > 0) return std::nullopt;
  const BufferGroup* only = nullptr;
  for (const BufferGroup& group : request.pools.groups) {
    if (group.dst.row_bytes() == 0) continue;
    if (only != nullptr || group.dst_base.size() > kMaxSwapInBuffers) return std::nullopt;
    only = &group;
  }
  FusedCopy copy{only, make_fused_copy_plan(*only, kPolicy), 1};
  if (copy.plan.package_bytes < 16) return std::nullopt;
  const bool has_clusters = gpu_facts("swap_in", device, nullptr, false).compute_major >= 9;
  copy.cluster_ctas = cluster_ctas_for(request.batch, sm_count("swap_in", device), has_clusters);
  return copy;
}

// A plan of the call's own, where the caller asked for none. The memory is the result.
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

void replay(const CopyPlannedRequest& request, FaultRecord* fault, Stream stream) {
  for (const BufferGroup& group : request.pools.groups) {
    if (group.dst.row_bytes() == 0) continue;
    launch_copy_planned(request, group, make_planned_copy_plan(group, kPolicy), fault, stream);
  }
}

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
  check_pieces(op, request->pools, request->top_k);
  translate_pools(op, &request->pools);
  const Stream stream = current_stream(op, device);
  FaultRecord* fault = fault_record(op, device);

  // Allocating spoils the graph that another thread captures, unless this thread says that it knows better.
  const RelaxedCapture relaxed;
  Scratch scratch;
  std::optional<torch::stable::Tensor> tables;
  const int64_t needed = workspace_bytes(request->top_k, request->hot_buffer_size, hash_bits_for(request->top_k));
  if (needed + kStaticSharedBytes > shared_memory_limit(op, device)) {
    tables = device_bytes(needed * request->batch, device);
    scratch = {static_cast<char*>(tables->data_ptr()), needed};
  }
  const std::optional<FusedCopy> fused = fused_copy_of(*request, device);
  std::optional<torch::stable::Tensor> plan;
  if (!fused && request->pools.moves_bytes() && !request->plan) plan = make_plan(request, device);
  launch_resolve(*request, scratch, fused ? &*fused : nullptr, fault, device, stream);
  if (!fused && request->pools.moves_bytes()) replay(replay_of(*request), fault, stream);
}

void copy_planned(CopyPlannedRequest* request) {
  constexpr const char* op = "copy_planned";
  const int device = request->pools.gpu_index;
  const DeviceGuard guard(op, device);
  raise_pending_fault(op, device);
  if (request->batch == 0 || !request->pools.moves_bytes()) return;
  check_pieces(op, request->pools, request->max_misses);
  translate_pools(op, &request->pools);
  replay(*request, fault_record(op, device), current_stream(op, device));
}

}  // namespace kvio::gpu
