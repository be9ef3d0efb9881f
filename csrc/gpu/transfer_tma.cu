// TMA ring: a few warps load, the others store. A loader brings a chunk of up to 36 KiB of one buffer into a stage of a
// ring in shared memory by bulk copies; the store warps write each stage out with 16-byte stores and release it.
//
// What shaped it (H200, PCIe gen5 x16):
// * A load from page-locked host memory takes 1.3 us and more, so a CTA must keep some 190 KiB in flight, the whole
//   ring: six stages of 32 KiB give 44 GB/s with one CTA, smaller rings less.
// * A bulk copy costs the copy unit the more the shorter it is: 512-byte copies one at a time reach 2.5 GB/s. So rows
//   that follow each other are one copy, found by the loader's lanes from the addresses alone (nothing depends on the
//   promise), and rows of a pool at a pitch are one tensor-map box.
// * The load side needs rows consecutive in the source only, the store side in the destination only: shared memory lies
//   between them.
// * Storing by bulk copies was measured slower to the device (37 against 44 GB/s with one CTA) and not faster to the
//   host, so stores are ordinary ones.
// * Working out the addresses of a chunk takes a warp about 1.3 us, a chunk of 32 KiB at 44 GB/s 0.7 us: one loader
//   warp held a CTA at 20 GB/s (512-byte rows) to 29 (1152). So loaders take chunks in turn.
// * What changed nothing: 10 store warps instead of 8, two or three groups of store warps taking stages in turn,
//   stages of 16 or 24 KiB, six loaders, boxes cut into shorter inner dims, L2 promotion of boxes.
// * A loader fetches the indices of its next chunk before it waits for a free stage, and uses them only after.

#include <algorithm>
#include <cstdint>

#include "gpu/bulk_copy.cuh"
#include "gpu/device_facts.h"
#include "gpu/driver.h"
#include "gpu/fault.h"
#include "gpu/primitives.cuh"
#include "gpu/transfer_tma.h"
#include "gpu/units.cuh"
#include "plan/register_plan.h"

namespace kvio::gpu {
namespace {

constexpr int kMaxThreads = 32 * (kTmaMaxLoaders + kTmaMaxStoreWarps);
constexpr int kFewBuffers = 8;
constexpr int kManyBuffers = kMaxBuffersPerLaunch;
constexpr int kManyMaps = 64;  // of 128 bytes each, in the launch's parameters
constexpr int kUnitsPerLane = 8;
constexpr uint32_t kAllLanes = 0xffffffffu;

template <int kMaps>
struct Maps {
  CUtensorMap of_buffer[kMaps];
};
template <>
struct Maps<0> {};

template <int kBuffers, bool kBoxes>
struct Params : UnitParams {
  Maps<kBoxes ? kBuffers : 0> maps;
  char* dst_base[kBuffers];
  const char* src_base[kBuffers];
  FastDivide inner_chunks;       // chunks are numbered outer * inner + inner
  FastDivide packages_per_unit;  // 16 bytes each
  uint32_t units_per_chunk;
  uint32_t num_chunks;
  uint32_t stage_bytes;
  uint32_t num_stages;
  uint32_t num_loaders;
};

// What the loader tells the store warps about a stage.
struct StageInfo {
  uint32_t units;
  uint32_t one_stretch;  // 1 when all of them follow each other in the destination
};

// The dynamic shared memory: stages, destination addresses, infos, barriers.
struct Ring {
  char* rows;
  char** dst;  // units_per_chunk addresses a stage, null for a unit that is not to be written
  StageInfo* info;
  Barrier* full;   // an arrival by every lane of the loader, and the bytes
  Barrier* empty;  // an arrival by every storing thread
};

template <class P>
__device__ __forceinline__ Ring ring_of(const P& p, char* shared) {
  Ring ring;
  ring.rows = shared;
  ring.dst = reinterpret_cast<char**>(shared + p.num_stages * p.stage_bytes);
  ring.info = reinterpret_cast<StageInfo*>(ring.dst + p.num_stages * p.units_per_chunk);
  ring.full = reinterpret_cast<Barrier*>(ring.info + p.num_stages);
  ring.empty = ring.full + p.num_stages;
  return ring;
}

struct Chunk {
  uint32_t buffer;
  uint32_t first_unit;
  uint32_t units;
};

template <class P>
__device__ __forceinline__ Chunk chunk_at(const P& p, uint32_t number) {
  const uint32_t outer = p.inner_chunks.quotient(number);
  const uint32_t inner = number - outer * p.inner_chunks.divisor;
  Chunk chunk;
  chunk.buffer = p.buffers_innermost ? inner : outer;
  chunk.first_unit = (p.buffers_innermost ? outer : inner) * p.units_per_chunk;
  chunk.units = min(p.units_per_chunk, p.num_units - chunk.first_unit);
  return chunk;
}

// Position in the ring: which stage, and the parity of the phase that it is in.
struct Cursor {
  uint32_t stage;
  uint32_t parity;

  __device__ __forceinline__ void advance(uint32_t steps, uint32_t num_stages) {
    stage += steps;
    if (stage >= num_stages) {
      stage -= num_stages;
      parity ^= 1;
    }
  }
};

// Index entries of a lane's units of one chunk, unit j * 32 + lane, as they were loaded: touching one waits for it.
struct Indices {
  IndexWords dst[kUnitsPerLane];
  IndexWords src[kUnitsPerLane];
};

template <bool kInt64, class P>
__device__ __forceinline__ void fetch_entries(const P& p, const Chunk& chunk, uint32_t lane, Indices& indices) {
#pragma unroll
  for (int j = 0; j < kUnitsPerLane; ++j) {
    if (j * 32 >= chunk.units) return;
    const uint32_t unit = j * 32 + lane;
    const bool wanted = unit < chunk.units;
    const uint32_t position = p.units_per_index.quotient(chunk.first_unit + unit);
    load_index_if<kInt64>(wanted, p.dst, position, indices.dst[j]);
    load_index_if<kInt64>(wanted, p.src, position, indices.src[j]);
  }
}

// One branch around all loads: each choosing its own width would wait for the one before.
template <class P>
__device__ __forceinline__ void fetch_indices(const P& p, const Chunk& chunk, uint32_t lane, Indices& indices) {
  p.is_int64 ? fetch_entries<true>(p, chunk, lane, indices) : fetch_entries<false>(p, chunk, lane, indices);
}

// Addresses of a lane's units, null where there is no unit or its index is outside its pool; and what all lanes know of
// the chunk.
struct Located {
  const char* src[kUnitsPerLane];
  char* dst[kUnitsPerLane];
  uint32_t present;    // units that are to be moved
  bool src_stretch;    // all units follow each other in the source
  bool dst_stretch;    // in the destination
  bool one_box;        // all units are the pieces of consecutive slots of one source page
  uint32_t box_token;  // coordinates of that box
  uint32_t box_page;
};

template <bool kBoxes, class P>
__device__ __forceinline__ void locate(const P& p, const Chunk& chunk, const Indices& indices, uint32_t lane,
                                       Located& out) {
  bool src_follows = true;
  bool dst_follows = true;
  bool box_follows = true;
  const char* src_end = nullptr;  // of the last unit of the 32 before
  const char* dst_end = nullptr;
  int64_t slot_end = -1;
  out.present = 0;
#pragma unroll
  for (int j = 0; j < kUnitsPerLane; ++j) {
    out.src[j] = nullptr;
    out.dst[j] = nullptr;
    if (j * 32 >= chunk.units) continue;
    const uint32_t number = j * 32 + lane;
    const bool is_unit = number < chunk.units;
    int64_t src_slot = 0;
    int64_t slot_key = -2;  // counts pieces: consecutive units of consecutive slots differ by one
    if (is_unit) {
      const int64_t dst_index = indices.dst[j].value(p.is_int64);
      const int64_t src_index = indices.src[j].value(p.is_int64);
      UnitPlace place;
      if (find_unit(p, chunk.first_unit + number, dst_index, src_index, &place)) {
        src_slot = place.src_slot;
        out.dst[j] = p.dst_base[chunk.buffer] + place.dst;
        out.src[j] = p.src_base[chunk.buffer] + place.src;
        slot_key = src_slot * p.pieces.divisor + place.piece;
      }
    }
    __syncwarp();
    out.present += __popc(__ballot_sync(kAllLanes, out.src[j] != nullptr));
    const uint32_t before = lane > 0 ? lane - 1 : 0;
    const char* src_before = shuffle_pointer(out.src[j] + p.unit_bytes, before);
    const char* dst_before = shuffle_pointer(out.dst[j] + p.unit_bytes, before);
    if (lane == 0) {
      src_before = src_end;
      dst_before = dst_end;
    }
    const bool is_first = number == 0;
    if (is_unit && !is_first) {
      src_follows = src_follows && out.src[j] == src_before;
      dst_follows = dst_follows && out.dst[j] == dst_before;
    }
    src_end = shuffle_pointer(out.src[j] + p.unit_bytes, 31);
    dst_end = shuffle_pointer(out.dst[j] + p.unit_bytes, 31);
    if constexpr (kBoxes) {
      const int64_t key_before = __shfl_sync(kAllLanes, slot_key, static_cast<int>(before));
      if (is_unit && !is_first) box_follows = box_follows && slot_key == (lane == 0 ? slot_end : key_before) + 1;
      slot_end = __shfl_sync(kAllLanes, slot_key, 31);
      if (j == 0) {
        const uint32_t first_slot = __shfl_sync(kAllLanes, static_cast<uint32_t>(src_slot), 0);
        out.box_page = p.src.flat ? 0 : p.src.page_slots.quotient(first_slot);
        out.box_token = first_slot - out.box_page * p.src.page_slots.divisor;
      }
    }
  }
  const bool all_present = out.present == chunk.units;
  out.src_stretch = __all_sync(kAllLanes, src_follows) && all_present;
  out.dst_stretch = __all_sync(kAllLanes, dst_follows) && all_present;
  if constexpr (kBoxes) {
    // A box must not run into the next page.
    const uint32_t tokens = p.pieces.quotient(chunk.units);
    const bool in_page = p.src.flat || out.box_token + tokens <= p.src.page_slots.divisor;
    out.one_box = __all_sync(kAllLanes, box_follows) && all_present && chunk.units == p.units_per_chunk && in_page;
  }
}

// Bulk copies of a chunk whose units do not all follow each other: one a run, each issued by the lane that holds the
// run's first unit; a run that may go on in the next 32 units is held back until its end is known.
template <class P>
__device__ __forceinline__ void load_runs(const P& p, const Chunk& chunk, const Located& located, uint32_t lane,
                                          char* stage, Barrier* full) {
  const char* held_src = nullptr;  // the same in all lanes
  uint32_t held_first = 0;
  uint32_t held_units = 0;
  const auto issue_held = [&] {
    if (lane == 0 && held_units > 0) {
      bulk_load(stage + held_first * p.unit_bytes, held_src, held_units * p.unit_bytes, full);
    }
    held_units = 0;
  };
#pragma unroll
  for (int j = 0; j < kUnitsPerLane; ++j) {
    if (j * 32 >= chunk.units) continue;
    const char* src = located.src[j];
    const char* before = shuffle_pointer(src + p.unit_bytes, lane > 0 ? lane - 1 : 0);
    if (lane == 0) before = held_units > 0 ? held_src + held_units * p.unit_bytes : nullptr;
    const bool follows = src != nullptr && src == before;
    const uint32_t going_on = __ballot_sync(kAllLanes, follows);
    const uint32_t starting = __ballot_sync(kAllLanes, src != nullptr && !follows);
    const uint32_t front = going_on == kAllLanes ? 32 : __ffs(~going_on) - 1;
    held_units += front;
    if (front < 32) issue_held();
    // Units of the run that starts at this lane: itself and those after it that go on.
    const uint32_t after = lane < 31 ? going_on >> (lane + 1) : 0;
    const uint32_t units = 1 + __ffs(~after) - 1;
    const bool starts = (starting >> lane & 1) != 0;
    const bool may_go_on = starts && lane + units == 32;
    if (starts && !may_go_on) {
      bulk_load(stage + (j * 32 + lane) * p.unit_bytes, src, units * p.unit_bytes, full);
    }
    const uint32_t last = __ballot_sync(kAllLanes, may_go_on);
    if (last != 0) {
      const uint32_t from = __ffs(last) - 1;
      held_src = shuffle_pointer(src, from);
      held_first = j * 32 + from;
      held_units = 32 - from;
    }
  }
  issue_held();
}

template <bool kBoxes, class P>
__device__ __forceinline__ void load_chunk(const P& p, const Chunk& chunk, const Located& located, uint32_t lane,
                                           char* stage, Barrier* full) {
  if (located.src_stretch) {
    if (lane == 0) bulk_load(stage, located.src[0], chunk.units * p.unit_bytes, full);
    return;
  }
  if constexpr (kBoxes) {
    if (located.one_box) {
      if (lane == 0) box_load(stage, &p.maps.of_buffer[chunk.buffer], located.box_token, located.box_page, full);
      return;
    }
  }
  load_runs(p, chunk, located, lane, stage, full);
}

// Loader `loader` takes chunks loader, loader + num_loaders, ... of its CTA. The ring has no fewer stages than loaders,
// so that none can be two phases ahead of a stage.
template <bool kBoxes, class P>
__device__ __forceinline__ void run_loader(const P& p, const Ring& ring, uint32_t loader, uint32_t lane) {
  uint32_t number = blockIdx.x + loader * gridDim.x;
  if (number >= p.num_chunks) return;
  Cursor cursor{loader, 0};
  Chunk chunk = chunk_at(p, number);
  Indices indices = {};
  fetch_indices(p, chunk, lane, indices);
  while (true) {
    Located located;
    locate<kBoxes>(p, chunk, indices, lane, located);
    const Chunk current = chunk;
    number += p.num_loaders * gridDim.x;
    const bool more = number < p.num_chunks;
    if (more) {
      chunk = chunk_at(p, number);
      fetch_indices(p, chunk, lane, indices);
    }
    wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
    char** dst = ring.dst + cursor.stage * p.units_per_chunk;
#pragma unroll
    for (int j = 0; j < kUnitsPerLane; ++j) {
      if (j * 32 + lane < current.units) dst[j * 32 + lane] = located.dst[j];
    }
    // Every lane has written addresses and arrives for itself.
    if (lane == 0) {
      ring.info[cursor.stage] = {current.units, located.dst_stretch ? 1u : 0u};
      arrive_expecting(&ring.full[cursor.stage], located.present * p.unit_bytes);
    } else {
      arrive(&ring.full[cursor.stage]);
    }
    __syncwarp();
    load_chunk<kBoxes>(p, current, located, lane, ring.rows + cursor.stage * p.stage_bytes, &ring.full[cursor.stage]);
    if (!more) return;
    cursor.advance(p.num_loaders, p.num_stages);
  }
}

constexpr uint32_t kStoresAtOnce = 4;

// All packages of a stage to one stretch of memory.
__device__ __forceinline__ void store_stretch(char* dst, const char* rows, uint32_t packages, uint32_t thread,
                                              uint32_t threads) {
  const uint4* from = reinterpret_cast<const uint4*>(rows);
  uint4* to = reinterpret_cast<uint4*>(dst);
  uint32_t at = thread;
  for (; at + (kStoresAtOnce - 1) * threads < packages; at += kStoresAtOnce * threads) {
    uint4 held[kStoresAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kStoresAtOnce; ++k) held[k] = from[at + k * threads];
#pragma unroll
    for (uint32_t k = 0; k < kStoresAtOnce; ++k) store_once(to + at + k * threads, held[k]);
  }
  for (; at < packages; at += threads) store_once(to + at, from[at]);
}

// Each unit to its own address; those with none stay.
template <class P>
__device__ __forceinline__ void store_units(const P& p, char* const* dst, const char* rows, uint32_t packages,
                                            uint32_t thread, uint32_t threads) {
  const uint4* from = reinterpret_cast<const uint4*>(rows);
  for (uint32_t at = thread; at < packages; at += kStoresAtOnce * threads) {
    uint4 held[kStoresAtOnce];
    char* to[kStoresAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kStoresAtOnce; ++k) {
      const uint32_t package = at + k * threads;
      to[k] = nullptr;
      if (package >= packages) continue;
      const uint32_t unit = p.packages_per_unit.quotient(package);
      char* base = dst[unit];
      if (base == nullptr) continue;
      to[k] = base + (package - unit * p.packages_per_unit.divisor) * 16;
      held[k] = from[package];
    }
#pragma unroll
    for (uint32_t k = 0; k < kStoresAtOnce; ++k) {
      if (to[k] != nullptr) store_once(to[k], held[k]);
    }
  }
}

template <class P>
__device__ __forceinline__ void run_storer(const P& p, const Ring& ring, uint32_t thread, uint32_t threads) {
  Cursor cursor{0, 0};
  for (uint32_t number = blockIdx.x; number < p.num_chunks; number += gridDim.x) {
    wait(&ring.full[cursor.stage], cursor.parity);
    const StageInfo info = ring.info[cursor.stage];
    const char* rows = ring.rows + cursor.stage * p.stage_bytes;
    char* const* dst = ring.dst + cursor.stage * p.units_per_chunk;
    const uint32_t packages = info.units * p.packages_per_unit.divisor;
    if (info.one_stretch != 0) {
      store_stretch(dst[0], rows, packages, thread, threads);
    } else {
      store_units(p, dst, rows, packages, thread, threads);
    }
    arrive(&ring.empty[cursor.stage]);
    cursor.advance(1, p.num_stages);
  }
}

template <int kBuffers, bool kBoxes>
__global__ void __launch_bounds__(kMaxThreads, 1) tma_copy(const __grid_constant__ Params<kBuffers, kBoxes> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  const Ring ring = ring_of(p, shared);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t store_warps = blockDim.x / 32 - p.num_loaders;
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < p.num_stages; ++stage) {
      init_barrier(&ring.full[stage], 32);
      init_barrier(&ring.empty[stage], store_warps * 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp < p.num_loaders) {
    run_loader<kBoxes>(p, ring, warp, threadIdx.x % 32);
  } else {
    run_storer(p, ring, threadIdx.x - p.num_loaders * 32, store_warps * 32);
  }
#endif
}

// ---- launching ------------------------------------------------------------------------------------------------------

template <int kBuffers, bool kBoxes>
bool encode_maps(const TmaPlan& plan, Params<kBuffers, kBoxes>* p, size_t count) {
  if constexpr (kBoxes) {
    const PoolView& src = plan.src;
    const int64_t tokens = src.is_flat() ? src.slots : src.page_slots;
    const BoxShape shape{src.piece_bytes,
                         {src.num_pieces, tokens, src.slots / tokens},
                         {src.num_pieces > 1 ? src.piece_stride : src.token_stride, src.token_stride, src.page_stride},
                         {src.num_pieces, plan.box_tokens}};
    for (size_t b = 0; b < count; ++b) {
      if (!encode_box_map(shape, p->src_base[b], &p->maps.of_buffer[b])) return false;
    }
  }
  return true;
}

struct Launch {
  const TransferRequest& request;
  const BufferGroup& group;
  const TmaPlan& plan;
  int64_t first;  // index position
  size_t first_buffer;
  size_t count;
  FaultRecord* fault;
  int device;
  int shared_limit;
  Stream stream;
};

// False when the driver cannot encode the boxes' maps; nothing was launched then.
template <int kBuffers, bool kBoxes>
bool launch_buffers(const Launch& launch) {
  const TmaPlan& plan = launch.plan;
  const size_t count = launch.count;
  alignas(64) Params<kBuffers, kBoxes> p;
  for (size_t b = 0; b < count; ++b) {
    p.dst_base[b] = launch.group.dst_base[launch.first_buffer + b];
    p.src_base[b] = launch.group.src_base[launch.first_buffer + b];
  }
  if (!encode_maps(plan, &p, count)) return false;
  fill_unit_params(launch.request, plan, launch.first, launch.fault, &p);
  p.packages_per_unit = FastDivide(static_cast<uint32_t>(plan.unit_bytes / 16));
  p.units_per_chunk = static_cast<uint32_t>(plan.units_per_chunk);
  const uint32_t chunks_per_buffer = (p.num_units + p.units_per_chunk - 1) / p.units_per_chunk;
  p.num_chunks = chunks_per_buffer * static_cast<uint32_t>(count);
  p.inner_chunks = FastDivide(plan.buffers_innermost ? static_cast<uint32_t>(count) : chunks_per_buffer);
  p.stage_bytes = static_cast<uint32_t>(plan.stage_bytes);
  p.num_stages = static_cast<uint32_t>(plan.stages);
  p.num_loaders = static_cast<uint32_t>(plan.loaders);

  const void* kernel = reinterpret_cast<const void*>(tma_copy<kBuffers, kBoxes>);
  allow_shared_memory("transfer", kernel, launch.device, launch.shared_limit);
  const int64_t shared = plan.stages * (plan.stage_bytes + tma_stage_overhead(plan.units_per_chunk));
  const int64_t blocks = std::min<int64_t>(plan.num_blocks, p.num_chunks);
  void* arguments[] = {&p};
  const Error launched = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                          dim3(static_cast<unsigned>(32 * (plan.loaders + plan.store_warps))),
                                          arguments, static_cast<size_t>(shared), launch.stream);
  check("transfer", "launching the tma kernel", launched);
  return true;
}

bool launch_range(const TransferRequest& request, const BufferGroup& group, const TmaPlan& plan, int64_t first,
                  int device, Stream stream) {
  const size_t buffers = group.dst_base.size();
  const size_t most = plan.box_tokens > 0 ? kManyMaps : kManyBuffers;
  for (size_t b = 0; b < buffers; b += most) {
    const size_t count = std::min(most, buffers - b);
    const Launch launch{request,
                        group,
                        plan,
                        first,
                        b,
                        count,
                        fault_record("transfer", device),
                        device,
                        shared_memory_limit("transfer", device),
                        stream};
    const bool few = count <= kFewBuffers;
    if (plan.box_tokens == 0) {
      few ? launch_buffers<kFewBuffers, false>(launch) : launch_buffers<kManyBuffers, false>(launch);
    } else if (!(few ? launch_buffers<kFewBuffers, true>(launch) : launch_buffers<kManyMaps, true>(launch))) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool has_bulk_code(int compute_major) {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch >= 900 && arch / 100 <= compute_major) return true;
  }
  return false;
}

TmaPolicy tma_policy(const char* op, int device) {
  TmaPolicy policy;
  policy.shared_bytes = shared_memory_limit(op, device) - 1024;
  return policy;
}

void launch_tma(const TransferRequest& request, const BufferGroup& group, int device, Stream stream) {
  const TmaPolicy policy = tma_policy("transfer", device);
  const int64_t step = max_indices_per_launch(request, group);
  for (int64_t first = 0; first < request.num_indices; first += step) {
    const int64_t range = std::min(step, request.num_indices - first);
    const TmaPlan plan = make_tma_plan(request, group, range, has_tensor_maps(), policy);
    if (launch_range(request, group, plan, first, device, stream)) continue;
    // The first group of buffers is refused or none is: all have the same strides.
    const TmaPlan rows = make_tma_plan(request, group, range, false, policy);
    launch_range(request, group, rows, first, device, stream);
  }
}

}  // namespace kvio::gpu
