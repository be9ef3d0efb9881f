// Swap-in: one CTA resolves a request (gpu/swap_in_resolve.h), in shared memory where its tables fit; then the rows
// that are missing are copied, by the CTAs of its cluster where the batch is small, by a kernel over all requests
// otherwise.
//
// What shaped it (H200, PCIe gen5 x16):
// * This stands between the indexer and attention, so latency counts: a launch, one trip for sequence lengths, one for
//   the tables, one for a row from the host (1.3 us), and a barrier between steps. Host locations of all selected
//   tokens are fetched with the tables: only some are needed, but then the copying need not wait for them.
// * One CTA reads from the host at 44 GB/s at most, two reach the link.
// * Rows of many requests at once would be spread over the whole host pool, where address translation holds reads to a
//   third of the link. So a large batch is resolved first, and few CTAs then copy request by request.

#ifndef KVIO_ROCM
#include <cooperative_groups.h>
#endif

#include <algorithm>

#include "gpu/addressing.cuh"
#include "gpu/copy_rows.cuh"
#include "gpu/fault.h"
#include "gpu/fault_device.cuh"
#include "gpu/swap_in_kernels.h"
#include "gpu/swap_in_resolve.h"

namespace kvio::gpu {
namespace {

constexpr int kResolveThreads = 1024;
constexpr int kPlannedThreads = 512;
constexpr int64_t kMaxRequestsAtOnce = 2048;     // of which a CTA keeps the sums of misses
constexpr int64_t kMaxUnits = int64_t{1} << 26;  // of one buffer that are numbered together: 2^30 of all

// Where rows go and come from: one geometry, up to kMaxSwapInBuffers buffers.
struct Rooms {
  Side dst;  // without indices
  Side src;
  FastDivide pieces;
  UnitCut cut;
  char* dst_base[kMaxSwapInBuffers];
  const char* src_base[kMaxSwapInBuffers];
  uint32_t num_buffers;
};

struct DeviceEnv {
  FaultRecord* record;
  int64_t op;

  __device__ __forceinline__ int32_t claim(int32_t* at, int32_t expected, int32_t value) const {
    return atomicCAS(at, expected, value);
  }
  __device__ __forceinline__ void lower(int32_t* at, int32_t value) const { atomicMin(at, value); }
  __device__ __forceinline__ void fault(SwapInArgument argument, int64_t position, int64_t value, int64_t limit) const {
    record_fault(record, op + static_cast<int32_t>(argument), position, value, limit);
  }
};

// Which miss a unit belongs to, and its two locations; dst below 0 for one that is not to be written.
struct MissPlace {
  int64_t src;
  int32_t dst;
};

// Moves units number `first` to `first + count` - 1 of one buffer: pieces of misses, found by `find(miss)`.
template <int kWidth, int kUnits, int kLoads, class Find>
__device__ __forceinline__ void copy_misses(const Rooms& rooms, uint32_t buffer, uint32_t first, uint32_t count,
                                            uint32_t lane, const Find& find) {
  Units units;
  units.count = count;
  units.dst = nullptr;
  units.src = rooms.src_base[buffer];
  if (lane < count) {
    const uint32_t miss = rooms.pieces.quotient(first + lane);
    const uint32_t piece = first + lane - miss * rooms.pieces.divisor;
    const MissPlace place = find(miss);
    if (place.dst >= 0) {
      units.dst = rooms.dst_base[buffer] + offset_of(rooms.dst, place.dst, piece);
      units.src += offset_of(rooms.src, place.src, piece);
    }
  }
  sync_wave();
  copy_rows<kWidth, kUnits, kLoads>(rooms.cut, units, lane);
}

// Units of an item: as many as a warp takes at once, but fewer where there would not be an item for every warp.
__device__ __forceinline__ uint32_t units_per_item(uint32_t units, uint32_t warps) {
  uint32_t each = kWave;
  while (each > 1 && (units + each - 1) / each < 2 * warps) each /= 2;
  return each;
}

// ---- resolving ------------------------------------------------------------------------------------------------------

struct ResolveLaunch {
  ResolveParams p;
  Rooms rooms;
  FaultRecord* fault;
  int64_t fault_op;
  char* scratch;  // null: the workspace is in shared memory
  int64_t scratch_bytes;
  bool copies;
};

__device__ __forceinline__ Tally sum_of(const Tally& a, const Tally& b) {
  return {a.hits + b.hits, a.misses + b.misses};
}

__device__ __forceinline__ Tally inclusive_in_warp(Tally tally, uint32_t lane) {
#pragma unroll
  for (uint32_t step = 1; step < kWave; step *= 2) {
    const Tally before = {shuffle_up(tally.hits, step), shuffle_up(tally.misses, step)};
    if (lane >= step) tally = sum_of(tally, before);
  }
  return tally;
}

// Tallies of all threads before this one, and of all threads. Two barriers.
__device__ __forceinline__ Tally sum_before(const Tally& mine, Tally* all) {
  constexpr uint32_t kWarps = kResolveThreads / kWave;
  __shared__ Tally sums[kWarps];
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t warp = threadIdx.x / kWave;
  const Tally here = inclusive_in_warp(mine, lane);
  if (lane == kWave - 1) sums[warp] = here;
  __syncthreads();
  if (warp == 0) {
    // Of as many lanes as there are warps; all lanes must take part.
    const Tally sum = inclusive_in_warp(sums[lane % kWarps], lane);
    if (lane < kWarps) sums[lane] = sum;
  }
  __syncthreads();
  *all = sums[kWarps - 1];
  Tally before = {here.hits - mine.hits, here.misses - mine.misses};
  if (warp > 0) before = sum_of(before, sums[warp - 1]);
  return before;
}

__device__ __forceinline__ void answer_nothing(const ResolveParams& p, int32_t batch_row) {
  int32_t* out = row_of(p.top_k_device_locs, batch_row);
  for (int32_t i = threadIdx.x; i < p.top_k; i += kResolveThreads) out[i] = -1;
  if (threadIdx.x == 0) record_misses(p, batch_row, 0);
}

// Resolves a row of the batch; returns how many misses the workspace lists.
__device__ __forceinline__ int32_t resolve_row(const ResolveLaunch& launch, const Workspace& w, int32_t batch_row) {
  const ResolveParams& p = launch.p;
  DeviceEnv env{launch.fault, launch.fault_op};
  const int64_t request = entry_of(p.req_pool_indices, batch_row);
  const int64_t seq_len = entry_of(p.seq_lens, batch_row);
  const bool padding = p.num_real_reqs != nullptr && batch_row >= *p.num_real_reqs;
  const bool unknown = request < 0 || request >= p.pool_slots;
  if (padding || unknown) {
    if (!padding && threadIdx.x == 0) env.fault(SwapInArgument::kRequest, batch_row, request, p.pool_slots);
    answer_nothing(p, batch_row);
    return 0;
  }
  const Job job{batch_row, request, seq_len};
  const Thread t{static_cast<int32_t>(threadIdx.x), kResolveThreads};
  if (seq_len <= p.hot_slots && p.device_locs.data == nullptr) {
    int32_t* out = row_of(p.top_k_device_locs, batch_row);
    for (int32_t i = t.number; i < p.top_k; i += t.count) out[i] = direct_result(env, p, job, i);
    if (t.number == 0) record_misses(p, batch_row, 0);
    return 0;
  }
  stage(env, p, w, job, t);
  __syncthreads();
  insert(env, p, w, t);
  __syncthreads();
  mark(env, p, w, job, t);
  __syncthreads();
  Tally all;
  const Tally before = sum_before(count(env, p, w, job, t), &all);
  order(p, w, before, all, t);
  __syncthreads();
  assign(env, p, w, job, before, all, t);
  __syncthreads();
  finish(p, w, job, all, t);
  return all.misses;
}

// Rank 0 of a cluster resolves, all its CTAs copy.
template <int kUnits, int kLoads>
__global__ void __launch_bounds__(kResolveThreads, 1) swap_in_kernel(const __grid_constant__ ResolveLaunch launch) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t num_misses;
#if __CUDA_ARCH__ >= 900
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const uint32_t rank = cluster.block_rank();
  const uint32_t ranks = cluster.num_blocks();
#else
  const uint32_t rank = 0;
  const uint32_t ranks = 1;
#endif
  const int32_t batch_row = static_cast<int32_t>(blockIdx.x / ranks);
  char* base = launch.scratch != nullptr ? launch.scratch + batch_row * launch.scratch_bytes : shared;
  Workspace w = workspace_at(base, launch.p);
  if (rank == 0) {
    const int32_t misses = resolve_row(launch, w, batch_row);
    if (threadIdx.x == 0) num_misses = misses;
  }
  if (!launch.copies) return;
  const int32_t* misses = &num_misses;
#if __CUDA_ARCH__ >= 900
  if (ranks > 1) {
    __threadfence();  // a workspace that is not shared memory
    cluster.sync();
    misses = cluster.map_shared_rank(&num_misses, 0);
    if (launch.scratch == nullptr) {
      w.miss_src = cluster.map_shared_rank(w.miss_src, 0);
      w.miss_dst = cluster.map_shared_rank(w.miss_dst, 0);
    }
  } else {
    __syncthreads();
  }
#else
  __syncthreads();
#endif
  const Rooms& rooms = launch.rooms;
  const uint32_t units = static_cast<uint32_t>(*misses) * rooms.pieces.divisor;
  const uint32_t warps = ranks * (kResolveThreads / kWave);
  const uint32_t each = units_per_item(units * rooms.num_buffers, warps);
  const uint32_t items = (units + each - 1) / each;
  const auto find = [&](uint32_t miss) { return MissPlace{w.miss_src[miss], w.miss_dst[miss]}; };
  for (uint32_t item = (threadIdx.x / kWave) * ranks + rank; item < items * rooms.num_buffers; item += warps) {
    const uint32_t buffer = item / items;
    const uint32_t first = (item - buffer * items) * each;
    copy_misses<16, kUnits, kLoads>(rooms, buffer, first, min(each, units - first), threadIdx.x % kWave, find);
  }
#if __CUDA_ARCH__ >= 900
  // The others read rank 0's shared memory.
  if (ranks > 1) cluster.sync();
#endif
}

// ---- replaying a plan -----------------------------------------------------------------------------------------------

struct PlannedLaunch {
  Rooms rooms;
  Rows<const int64_t> miss_src;
  Rows<const int32_t> miss_dst;
  Strided<const int32_t> miss_count;
  const int32_t* num_real_reqs;
  FaultRecord* fault;
  int64_t fault_op;
  int64_t host_slots;
  int64_t device_slots;
  int32_t batch;
  int32_t max_misses;
  int32_t at_once;  // requests whose misses are numbered together
};

// Misses of requests `begin` to `end` - 1 before each of them: sums[i], and of all: the result. Counts outside the plan
// are cut to it.
__device__ __forceinline__ uint32_t sum_misses(const PlannedLaunch& launch, int32_t begin, int32_t end,
                                               uint32_t* sums) {
  __shared__ uint32_t of_warp[kPlannedThreads / kWave];
  __shared__ uint32_t carry;
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t warp = threadIdx.x / kWave;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (int32_t from = begin; from < end; from += kPlannedThreads) {
    const int32_t row = from + static_cast<int32_t>(threadIdx.x);
    int32_t mine = row < end ? launch.miss_count.data[row * launch.miss_count.stride] : 0;
    mine = max(0, min(mine, launch.max_misses));
    uint32_t here = static_cast<uint32_t>(mine);
#pragma unroll
    for (uint32_t step = 1; step < kWave; step *= 2) {
      const uint32_t before = shuffle_up(here, step);
      if (lane >= step) here += before;
    }
    if (lane == kWave - 1) of_warp[warp] = here;
    __syncthreads();
    uint32_t before = carry;
    for (uint32_t other = 0; other < warp; ++other) before += of_warp[other];
    if (row < end) sums[row - begin] = before + here - static_cast<uint32_t>(mine);
    __syncthreads();
    if (threadIdx.x == kPlannedThreads - 1) carry = before + here;
    __syncthreads();
  }
  return carry;
}

template <int kWidth, int kUnits, int kLoads>
__global__ void __launch_bounds__(kPlannedThreads, 1)
    copy_planned_kernel(const __grid_constant__ PlannedLaunch launch) {
  __shared__ uint32_t sums[kMaxRequestsAtOnce];
  const Rooms& rooms = launch.rooms;
  const uint32_t warps = gridDim.x * (kPlannedThreads / kWave);
  const uint32_t warp = blockIdx.x * (kPlannedThreads / kWave) + threadIdx.x / kWave;
  const int32_t real =
      launch.num_real_reqs != nullptr ? max(0, min(*launch.num_real_reqs, launch.batch)) : launch.batch;
  for (int32_t begin = 0; begin < real; begin += launch.at_once) {
    const int32_t end = min(real, begin + launch.at_once);
    __syncthreads();
    const uint32_t misses = sum_misses(launch, begin, end, sums);
    const uint32_t units = misses * rooms.pieces.divisor;
    const uint32_t each = units_per_item(units * rooms.num_buffers, warps);
    const uint32_t items = (units + each - 1) / each;
    const auto find = [&](uint32_t miss) {
      // The last request that begins at or before it.
      int32_t low = 0;
      int32_t high = end - begin;
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (sums[middle] <= miss ? low : high) = middle;
      }
      const int64_t row = begin + low;
      const uint32_t m = miss - sums[low];
      MissPlace place{row_of(launch.miss_src, row)[m], row_of(launch.miss_dst, row)[m]};
      const int64_t position = at_row(row, m);
      if (place.dst < 0) return place;  // left out when the plan was made
      if (place.dst >= launch.device_slots) {
        record_fault(launch.fault, launch.fault_op + 1, position, place.dst, launch.device_slots);
        place.dst = -1;
      } else if (place.src < 0 || place.src >= launch.host_slots) {
        record_fault(launch.fault, launch.fault_op, position, place.src, launch.host_slots);
        place.dst = -1;
      }
      return place;
    };
    // Items of one request come next to each other, all its buffers together.
    for (uint32_t item = warp; item < items * rooms.num_buffers; item += warps) {
      const uint32_t part = item / rooms.num_buffers;
      const uint32_t first = part * each;
      copy_misses<kWidth, kUnits, kLoads>(rooms, item - part * rooms.num_buffers, first, min(each, units - first),
                                          threadIdx.x % kWave, find);
    }
  }
}

// ---- launching ------------------------------------------------------------------------------------------------------

Rooms make_rooms(const BufferGroup& group, size_t first, const MissCopyPlan& plan) {
  Rooms rooms{};
  const IndexList none;
  rooms.dst = make_side(group.dst, none, 0, 1);
  rooms.src = make_side(group.src, none, 0, 1);
  rooms.pieces = FastDivide(static_cast<uint32_t>(group.dst.num_pieces));
  rooms.cut.packages = static_cast<uint32_t>(plan.packages);
  rooms.cut.remainder = static_cast<uint32_t>(plan.remainder);
  rooms.cut.lanes_per_unit = static_cast<uint32_t>(plan.split.lanes_per_unit);
  rooms.cut.skew_mask = static_cast<uint32_t>(plan.skew_alignment - 1);
  rooms.cut.max_skew = static_cast<uint32_t>(plan.max_skew);
  rooms.cut.skew_by_dst = false;
  const size_t count = std::min<size_t>(kMaxSwapInBuffers, group.dst_base.size() - first);
  for (size_t b = 0; b < count; ++b) {
    rooms.dst_base[b] = group.dst_base[first + b];
    rooms.src_base[b] = group.src_base[first + b];
  }
  rooms.num_buffers = static_cast<uint32_t>(count);
  return rooms;
}

using ResolveKernel = void (*)(ResolveLaunch);
using PlannedKernel = void (*)(PlannedLaunch);

#ifdef KVIO_ROCM
static_assert(kPolicy.wave_copy, "kernels have one shape: the wave copy takes any row");
ResolveKernel resolve_kernel_of(const LaneSplit&) { return swap_in_kernel<1, 1>; }
PlannedKernel planned_kernel_of(const MissCopyPlan&) { return copy_planned_kernel<16, 1, 1>; }
#else
ResolveKernel resolve_kernel_of(const LaneSplit& split) {
  if (split.units_per_lane == 4) return swap_in_kernel<4, 1>;
  if (split.units_per_lane == 2) return swap_in_kernel<2, 2>;
  return swap_in_kernel<1, 4>;
}

PlannedKernel planned_kernel_of(const MissCopyPlan& plan) {
  switch (plan.package_bytes) {
    case 8:
      return copy_planned_kernel<8, 1, 16>;
    case 4:
      return copy_planned_kernel<4, 1, 16>;
    case 2:
      return copy_planned_kernel<2, 1, 16>;
    case 1:
      return copy_planned_kernel<1, 1, 16>;
    default:
      break;
  }
  if (plan.split.units_per_lane == 8) return copy_planned_kernel<16, 8, 2>;
  if (plan.split.units_per_lane == 4) return copy_planned_kernel<16, 4, 4>;
  if (plan.split.units_per_lane == 2 && plan.split.loads_per_unit == 9) return copy_planned_kernel<16, 2, 9>;
  if (plan.split.units_per_lane == 2) return copy_planned_kernel<16, 2, 8>;
  return copy_planned_kernel<16, 1, 16>;
}
#endif

ResolveParams resolve_params(const SwapInRequest& r) {
  ResolveParams p{};
  p.top_k_tokens = r.top_k_tokens;
  p.device_buffer_tokens = r.device_buffer_tokens;
  p.device_buffer_locs = r.device_buffer_locs;
  p.host_cache_locs = r.host_cache_locs;
  p.lru_slots = r.lru_slots;
  p.top_k_device_locs = r.top_k_device_locs;
  p.req_pool_indices = r.req_pool_indices;
  p.seq_lens = r.seq_lens;
  p.num_real_reqs = r.num_real_reqs;
  if (r.device_locs) p.device_locs = *r.device_locs;
  if (r.plan) p.plan = *r.plan;
  p.pool_slots = r.pool_slots;
  p.max_len = r.max_len;
  p.host_slots = r.pools.host_limit.slots;
  p.device_slots = r.pools.device_limit.slots;
  p.top_k = static_cast<int32_t>(r.top_k);
  p.hot_slots = static_cast<int32_t>(r.hot_buffer_size);
  p.hash_bits = hash_bits_for(r.top_k);
  return p;
}

}  // namespace

void launch_resolve(const SwapInRequest& request, const Scratch& scratch, const FusedCopy* copy, FaultRecord* fault,
                    int device, Stream stream) {
  ResolveLaunch launch{};
  launch.p = resolve_params(request);
  launch.fault = fault;
  launch.fault_op = static_cast<int64_t>(FaultOp::kSwapIn);
  launch.scratch = scratch.data;
  launch.scratch_bytes = scratch.bytes;
  launch.copies = copy != nullptr;
  if (copy != nullptr) launch.rooms = make_rooms(*copy->group, 0, copy->plan);
  const ResolveKernel kernel = resolve_kernel_of(copy != nullptr ? copy->plan.split : LaneSplit{0, 1, 4});
  const int64_t shared =
      scratch.data != nullptr ? 0 : workspace_bytes(request.top_k, request.hot_buffer_size, launch.p.hash_bits);
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared > (48 << 10)) {
    const RelaxedCapture relaxed;  // it loads the kernel
    check("swap_in", "raising the kernel's shared memory",
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  const unsigned ctas = copy != nullptr ? static_cast<unsigned>(copy->cluster_ctas) : 1;
  void* arguments[] = {&launch};
  check("swap_in", "launching the swap-in kernel",
        launch_kernel(function, static_cast<unsigned>(request.batch) * ctas, kResolveThreads, arguments,
                      static_cast<size_t>(shared), stream, ctas));
}

void launch_copy_planned(const CopyPlannedRequest& request, const BufferGroup& group, const MissCopyPlan& plan,
                         FaultRecord* fault, Stream stream) {
  PlannedLaunch launch{};
  launch.miss_src = request.plan.miss_src;
  launch.miss_dst = request.plan.miss_dst;
  launch.miss_count = request.plan.miss_count;
  launch.num_real_reqs = request.num_real_reqs;
  launch.fault = fault;
  launch.fault_op = static_cast<int64_t>(FaultOp::kCopyPlanned);
  launch.host_slots = request.pools.host_limit.slots;
  launch.device_slots = request.pools.device_limit.slots;
  launch.batch = static_cast<int32_t>(request.batch);
  launch.max_misses = static_cast<int32_t>(request.max_misses);
  const int64_t units_of_one = std::max<int64_t>(1, request.max_misses * group.dst.num_pieces);
  launch.at_once = static_cast<int32_t>(std::clamp<int64_t>(kMaxUnits / units_of_one, 1, kMaxRequestsAtOnce));
  const int64_t blocks = request.pools.num_blocks > 0 ? request.pools.num_blocks : kPolicy.planned_blocks;
  for (size_t first = 0; first < group.dst_base.size(); first += kMaxSwapInBuffers) {
    launch.rooms = make_rooms(group, first, plan);
    void* arguments[] = {&launch};
    check("copy_planned", "launching the copy kernel",
          cudaLaunchKernel(reinterpret_cast<const void*>(planned_kernel_of(plan)), dim3(static_cast<unsigned>(blocks)),
                           dim3(kPlannedThreads), arguments, 0, stream));
  }
}

}  // namespace kvio::gpu
