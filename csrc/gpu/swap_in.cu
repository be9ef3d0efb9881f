// Swap-in: one CTA resolves a request (gpu/swap_in_resolve.h), in shared memory where its tables fit, and copies the
// rows that are missing; few requests have several CTAs each, which all resolve and share the copying. What that does
// not serve is left to the kernel of copy_planned, over all requests.
//
// What shaped it (H200, PCIe gen5 x16):
// * This stands between the indexer and attention, so latency counts: a launch (1.8 us), loads of the request, of its
//   state, of host locations of misses, a row from the host (2 us where it lies anywhere in 1 GiB), and 10,000 cycles
//   of one SM before that can begin. Giving out slots takes 3,500 more, while the first rows are on their way.
// * One CTA reads from the host at 44 GB/s at most, two reach the link, 40 at once get less of it than 16.
// * Rows of many requests at once would be spread over the whole host pool, where address translation holds reads to a
//   third of the link. So requests take turns at copying.

#include <algorithm>

#include "gpu/addressing.cuh"
#include "gpu/copy_rows.cuh"
#include "gpu/device_facts.h"
#include "gpu/fault.h"
#include "gpu/fault_device.cuh"
#include "gpu/swap_in_kernels.h"
#include "gpu/swap_in_resolve.h"

namespace kvio::gpu {
namespace {

constexpr int kResolveThreads = 1024;
constexpr int kPlannedThreads = 512;
constexpr int64_t kStagedBytes = kPolicy.wave_copy ? 0 : 16 * kMaxFusedGroups;  // of a thread, before slots are given
constexpr int64_t kMaxRequestsAtOnce = 2048;     // of which a CTA keeps the sums of misses
constexpr int64_t kMaxUnits = int64_t{1} << 26;  // of one buffer that are numbered together: 2^30 of all

// Where rows go and come from: one geometry, up to kMaxSwapInBuffers buffers.
struct Rooms {
  Side dst;  // without indices
  Side src;
  FastDivide pieces;
  FastDivide steps;  // of a unit, by those who resolve
  UnitCut cut;
  char* dst_base[kMaxSwapInBuffers];
  const char* src_base[kMaxSwapInBuffers];
  uint32_t num_buffers;
  uint32_t width;      // of a package, bytes
  uint32_t lane_bits;  // 2^lane_bits lanes take a unit
};

struct DeviceEnv {
  // The last fault of this thread, which is passed on at the end: that takes few instructions where it is noted.
  int32_t argument = -1;
  int32_t column = 0;
  int64_t value = 0;

  __device__ __forceinline__ int32_t claim(int32_t* at, int32_t expected, int32_t value) const {
    return atomicCAS(at, expected, value);
  }
  __device__ __forceinline__ void raise(int32_t* at, int32_t most) const { atomicMax(at, most); }
  __device__ __forceinline__ void note(SwapInArgument which, int32_t where, int64_t what) {
    argument = static_cast<int32_t>(which);
    column = where;
    value = what;
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

// Units of an item: so many that all warps have equally many items, and no item leaves lanes without a unit that could
// have had one. `pass`: units that a warp has in flight.
__device__ __forceinline__ uint32_t units_per_item(uint32_t units, uint32_t warps, uint32_t pass) {
  const uint32_t rounds = (units + kWave * warps - 1) / (kWave * warps);
  const uint32_t each = max(1u, (units + rounds * warps - 1) / (rounds * warps));
  return each <= pass ? each : min(kWave, (each + pass - 1) / pass * pass);
}

// ---- resolving ------------------------------------------------------------------------------------------------------

struct ResolveLaunch {
  ResolveParams p;
  Rooms rooms[kMaxFusedGroups];
  FaultRecord* fault;
  int64_t fault_op;
  char* scratch;  // null: the workspace is in shared memory
  int32_t num_rooms;
  int32_t free_misses;  // a request that has more waits for its turn to copy them
  int32_t turns;        // requests that copy at a time
};

// Sums of a wave's values up to each lane's own.
__device__ __forceinline__ uint32_t sum_up_to(uint32_t value, uint32_t lane, uint32_t lanes) {
#pragma unroll
  for (uint32_t step = 1; step < lanes; step *= 2) {
    const uint32_t before = shuffle_up(value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// Of all threads before this one, and of all. One barrier.
struct Sums {
  int32_t before;
  int32_t all;
};
__device__ __forceinline__ Sums sum_of_threads(int32_t mine) {
  constexpr uint32_t kWaves = kResolveThreads / kWave;
  __shared__ uint32_t sums[kWaves];
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t wave = threadIdx.x / kWave;
  const uint32_t own = static_cast<uint32_t>(mine);
  const uint32_t in_wave = sum_up_to(own, lane, kWave);
  if (lane == kWave - 1) sums[wave] = in_wave;
  __syncthreads();
  const uint32_t of_waves = sum_up_to(lane < kWaves ? sums[lane] : 0, lane, kWaves);
  const uint32_t before = (wave > 0 ? shuffle(of_waves, wave - 1) : 0) + in_wave - own;
  return {static_cast<int32_t>(before), static_cast<int32_t>(shuffle(of_waves, kWaves - 1))};
}

// What a CTA knows of its request once it knows what is missing.
struct Found {
  bool resolves;   // else all is answered
  int32_t misses;  // that the workspace lists
  int32_t before;  // of those, in entries of the threads before this one
};

// Finds out which rows of a request are missing, and answers what is known by then. A barrier has to follow.
__device__ __forceinline__ Found find_row(const ResolveLaunch& launch, const Workspace& w, const Thread& t,
                                          int32_t batch_row, bool records, DeviceEnv* env, Job* job, First* first) {
  const ResolveParams& p = launch.p;
  const uint32_t row = static_cast<uint32_t>(batch_row);
  clear(p, w, t);
  await_previous_launch();
  const EntryWords request_words = load_entry(p.req_pool_indices, row);
  const EntryWords length_words = load_entry(p.seq_lens, row);
  const int32_t real = p.num_real_reqs != nullptr ? *p.num_real_reqs : batch_row + 1;
  begin(p, batch_row, t, first);
  // What is loaded is not looked at before.
  __syncthreads();
  const uint32_t request = request_words.low;
  const bool unknown =
      request >= static_cast<uint32_t>(p.pool_slots) || (p.req_pool_indices.is_int64 && request_words.high != 0);
  const int32_t seq_len = short_value_of(length_words, p.seq_lens.is_int64);
  const bool padding = batch_row >= real;
  *job = make_job(p, batch_row, unknown ? 0 : request, seq_len, records);
  Found found{!padding && !unknown && is_long(p, seq_len), 0, 0};
  if (found.resolves) {
    fetch(p, *job, t, first);
    insert(*env, p, w, *job, t, *first);
    __syncthreads();
    if (KVIO_RARELY(*w.repeated != 0)) {
      settle(*env, p, w, t);
      __syncthreads();
    }
    mark(*env, p, w, *job, t, *first);
    __syncthreads();
    const Sums misses = sum_of_threads(find_misses(*env, p, w, *job, t));
    found.misses = misses.all;
    found.before = misses.before;
    list_misses(p, w, t, misses.before);
  } else if (records) {
    KVIO_ROLLED for (int32_t i = t.number; i < p.top_k; i += t.count) {
      job->out[i] = padding || unknown ? -1 : direct_result(*env, p, *job, i);
    }
    if (t.number == 0) record_misses(p, batch_row, 0);
    if (t.number == 0 && !padding && unknown) {
      env->note(SwapInArgument::kRequest, batch_row, value_of(request_words, p.req_pool_indices.is_int64));
    }
  }
  return found;
}

// Gives slots to what is missing. CTAs of a cluster do the same, and the first of them records it when all have read. A
// barrier has to follow.
template <int kRanks>
__device__ __forceinline__ void finish_row(const ResolveParams& p, const Workspace& w, const Thread& t,
                                           const Found& found, const Job& job, const First& first, DeviceEnv* env) {
  const int32_t mine = count_hits(*env, p, w, job, t, first);
  // From here on the first CTA writes what the others have read.
  if (kRanks > 1) cluster_arrive_after_loads();
  const Sums hits = sum_of_threads(mine);
  const Use use = use_of(p, hits.all, found.misses);
  place(p, w, t, hits.before, use);
  if (kRanks > 1) cluster_wait();
  __syncthreads();
  assign(*env, p, w, job, t, found.misses, use);
  if (KVIO_RARELY(*w.repeated != 0)) {
    __syncthreads();
    tell(p, w, t, found.before);
    __syncthreads();
    if (job.records) repeat(p, w, job, t);
  }
}

// Passes on the last fault that this thread noted.
__device__ __forceinline__ void pass_on_fault(const ResolveLaunch& launch, const Job& job, const DeviceEnv& env) {
  if (!KVIO_RARELY(env.argument >= 0) || !job.records) return;
  const SwapInArgument argument = static_cast<SwapInArgument>(env.argument);
  record_fault(launch.fault, launch.fault_op + env.argument, fault_position(job, argument, env.column), env.value,
               fault_limit(launch.p, job, argument));
}

#ifndef KVIO_ROCM
// What a lane moves in one step: a package of a unit.
struct Step {
  const char* from;
  uint32_t miss;
  uint32_t buffer;
  uint32_t piece;
  uint32_t at;  // the lane's package; wraps below 0 where it is before the unit
};

// The steps of a request's misses, and how its groups of lanes share them.
struct Steps {
  uint32_t of_buffer;
  uint32_t all;
  uint32_t groups;
  uint32_t group;   // of this thread
  uint32_t column;  // of this thread in its group
};

__device__ __forceinline__ Steps share_steps(const Rooms& rooms, uint32_t misses, uint32_t rank, uint32_t ranks) {
  Steps steps;
  steps.of_buffer = misses * rooms.pieces.divisor * rooms.steps.divisor;
  steps.all = steps.of_buffer * rooms.num_buffers;
  steps.groups = (kResolveThreads >> rooms.lane_bits) * ranks;
  steps.group = (threadIdx.x >> rooms.lane_bits) * ranks + rank;
  steps.column = threadIdx.x & (rooms.cut.lanes_per_unit - 1);
  return steps;
}

template <int kWidth>
__device__ __forceinline__ Step step_of(const Rooms& rooms, const Steps& steps, const Workspace& w, uint32_t number) {
  const UnitCut& cut = rooms.cut;
  Step step;
  step.buffer = 0;
  while (number >= steps.of_buffer) {
    number -= steps.of_buffer;
    ++step.buffer;
  }
  const uint32_t unit = rooms.steps.quotient(number);
  step.miss = rooms.pieces.quotient(unit);
  step.piece = unit - step.miss * rooms.pieces.divisor;
  step.from = rooms.src_base[step.buffer] + offset_of(rooms.src, w.miss_src[step.miss], step.piece);
  step.at = (number - unit * rooms.steps.divisor) * cut.lanes_per_unit + steps.column;
  step.at -= (static_cast<uint32_t>(reinterpret_cast<uint64_t>(step.from)) & cut.skew_mask) / kWidth;
  return step;
}

template <int kWidth, class Package>
__device__ __forceinline__ void store_step(const Rooms& rooms, const Step& step, int32_t dst, const Package& held) {
  const UnitCut& cut = rooms.cut;
  if (dst < 0) return;
  char* to = rooms.dst_base[step.buffer] + offset_of(rooms.dst, dst, step.piece) + uint64_t{step.at} * kWidth;
  store_once_if(step.at < cut.packages, to, held);
  // The lane behind the last package.
  if (step.at == cut.packages && cut.remainder != 0) {
    copy_remainder<kWidth>(to, step.from + uint64_t{step.at} * kWidth, cut.remainder);
  }
}

// Moves a group's steps from steps.group on, kLoads of them at a time.
template <int kWidth, int kLoads>
__device__ __forceinline__ void copy_steps(const Rooms& rooms, const Workspace& w, const Steps& steps) {
  using Package = typename PackageOf<kWidth>::type;
  const UnitCut& cut = rooms.cut;
  for (uint32_t begin = steps.group; begin < steps.all; begin += steps.groups * kLoads) {
    Package held[kLoads] = {};
    const char* from[kLoads] = {};
    char* to[kLoads] = {};
    uint32_t at[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      at[k] = cut.packages + 1;
      const uint32_t number = begin + k * steps.groups;
      if (number >= steps.all) continue;
      const Step step = step_of<kWidth>(rooms, steps, w, number);
      const int32_t dst = w.miss_dst[step.miss];
      if (dst < 0) continue;
      from[k] = step.from;
      to[k] = rooms.dst_base[step.buffer] + offset_of(rooms.dst, dst, step.piece);
      at[k] = step.at;
      load_once_if(at[k] < cut.packages, held[k], from[k] + uint64_t{at[k]} * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      store_once_if(at[k] < cut.packages, to[k] + uint64_t{at[k]} * kWidth, held[k]);
    }
    if (cut.remainder == 0) continue;
    // The lane behind the last package.
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (at[k] != cut.packages) continue;
      copy_remainder<kWidth>(to[k] + uint64_t{at[k]} * kWidth, from[k] + uint64_t{at[k]} * kWidth, cut.remainder);
    }
  }
}

// The copying of a request's misses. A step of every group is loaded into shared memory, where the table's keys were,
// before slots are given out.
class MissCopy {
 public:
  // `stages`: there is such memory, and the request need not wait for its turn.
  __device__ __forceinline__ MissCopy(const ResolveLaunch& launch, const Workspace& w, uint32_t misses, uint32_t rank,
                                      uint32_t ranks, bool stages)
      : launch_(launch), w_(w), misses_(misses), rank_(rank), ranks_(ranks), stages_(stages) {
    KVIO_ROLLED for (int32_t r = 0; r < launch_.num_rooms; ++r) {
      const Rooms& rooms = launch_.rooms[r];
      const Steps steps = steps_of(r);
      if (!is_staged(rooms) || steps.group >= steps.all) continue;
      const Step step = step_of<16>(rooms, steps, w_, steps.group);
      if (step.at < rooms.cut.packages) begin_copy_to_shared(stage(r), step.from + uint64_t{step.at} * 16);
    }
  }

  __device__ __forceinline__ void finish() const {
    if (stages_) await_copies_to_shared();
    KVIO_ROLLED for (int32_t r = 0; r < launch_.num_rooms; ++r) {
      const Rooms& rooms = launch_.rooms[r];
      Steps steps = steps_of(r);
      if (steps.group >= steps.all) continue;
      if (is_staged(rooms)) {
        const Step step = step_of<16>(rooms, steps, w_, steps.group);
        store_step<16>(rooms, step, w_.miss_dst[step.miss], *stage(r));
        steps.group += steps.groups;
      }
      if (steps.group < steps.all) copy_rest(rooms, steps);
    }
  }

 private:
  __device__ __forceinline__ Steps steps_of(int32_t r) const {
    Steps steps = share_steps(launch_.rooms[r], misses_, rank_, ranks_);
    // Few rows of two kinds are under way at once.
    if (r % 2 == 1) steps.group = steps.groups - 1 - steps.group;
    return steps;
  }

  __device__ __forceinline__ bool is_staged(const Rooms& rooms) const { return stages_ && rooms.width == 16; }

  // A thread's own room for a package of geometry r.
  __device__ __forceinline__ uint4* stage(int32_t r) const {
    return reinterpret_cast<uint4*>(w_.keys) + r * kResolveThreads + threadIdx.x;
  }

  // Moves the steps from steps.group on.
  __device__ __forceinline__ void copy_rest(const Rooms& rooms, const Steps& steps) const {
    switch (rooms.width) {
      case 16:
        copy_steps<16, 4>(rooms, w_, steps);
        break;
      case 8:
        copy_steps<8, 4>(rooms, w_, steps);
        break;
      case 4:
        copy_steps<4, 4>(rooms, w_, steps);
        break;
      case 2:
        copy_steps<2, 4>(rooms, w_, steps);
        break;
      default:
        copy_steps<1, 4>(rooms, w_, steps);
        break;
    }
  }

  const ResolveLaunch& launch_;
  const Workspace& w_;
  uint32_t misses_;
  uint32_t rank_;
  uint32_t ranks_;
  bool stages_;
};
#else
class MissCopy {
 public:
  __device__ __forceinline__ MissCopy(const ResolveLaunch& launch, const Workspace& w, uint32_t misses, uint32_t rank,
                                      uint32_t ranks, bool)
      : launch_(launch), w_(w), misses_(misses), rank_(rank), ranks_(ranks) {}

  __device__ __forceinline__ void finish() const {
    const auto find = [&](uint32_t miss) { return MissPlace{w_.miss_src[miss], w_.miss_dst[miss]}; };
    const uint32_t warps = ranks_ * (kResolveThreads / kWave);
    for (int32_t r = 0; r < launch_.num_rooms; ++r) {
      const Rooms& rooms = launch_.rooms[r];
      const uint32_t units = misses_ * rooms.pieces.divisor;
      const uint32_t each = units_per_item(units * rooms.num_buffers, warps, kWave / rooms.cut.lanes_per_unit);
      const uint32_t items = (units + each - 1) / each;
      for (uint32_t item = (threadIdx.x / kWave) * ranks_ + rank_; item < items * rooms.num_buffers; item += warps) {
        const uint32_t buffer = item / items;
        const uint32_t first = (item - buffer * items) * each;
        copy_misses<16, 1, 1>(rooms, buffer, first, min(each, units - first), threadIdx.x % kWave, find);
      }
    }
  }

 private:
  const ResolveLaunch& launch_;
  const Workspace& w_;
  uint32_t misses_;
  uint32_t rank_;
  uint32_t ranks_;
};
#endif

// A barrier of all threads of a request.
template <int kRanks>
__device__ __forceinline__ void sync_ranks() {
  if constexpr (kRanks == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
}

// How many requests copy rows right now, of all streams of a device.
__device__ uint32_t copying_requests;

// Waits until fewer than `turns` requests are copying, and is one of them.
__device__ __forceinline__ void take_turn(uint32_t turns) {
  volatile uint32_t* now = &copying_requests;
  while (true) {
    const uint32_t copying = *now;
    if (copying < turns && atomicCAS(&copying_requests, copying, copying + 1) == copying) return;
    pause();
  }
}

// kRanks: CTAs of a request. kShared: the workspace is in shared memory.
template <int kRanks, bool kShared>
__global__ void __launch_bounds__(kResolveThreads, 1) swap_in_kernel(const __grid_constant__ ResolveLaunch launch) {
  extern __shared__ __align__(16) char shared[];
  allow_next_launch();
  const int32_t batch_row = static_cast<int32_t>(blockIdx.x / kRanks);
  const uint32_t rank = blockIdx.x % kRanks;
  Workspace w;
  if constexpr (kShared) {
    w = workspace_at(shared, launch.p.layout);
  } else {
    w = workspace_at(launch.scratch + int64_t{batch_row} * launch.p.layout.bytes, launch.p.layout);
  }
  const Thread t{static_cast<int32_t>(threadIdx.x), kResolveThreads};
  DeviceEnv env;
  Job job;
  First first;
  const Found found = find_row(launch, w, t, batch_row, rank == 0, &env, &job, &first);
  __syncthreads();
  const bool copies = found.misses > 0 && launch.num_rooms > 0;
  const bool waits = found.misses > launch.free_misses;
  MissCopy copy(launch, w, static_cast<uint32_t>(found.misses), rank, kRanks, kShared && copies && !waits);
  if (found.resolves) finish_row<kRanks>(launch.p, w, t, found, job, first, &env);
  pass_on_fault(launch, job, env);
  if (!copies) return;
  __syncthreads();
  const bool leads = rank == 0 && threadIdx.x == 0;
  if (waits) {
    if (leads) take_turn(static_cast<uint32_t>(launch.turns));
    sync_ranks<kRanks>();
  }
  copy.finish();
  if (waits) {
    sync_ranks<kRanks>();
    if (leads) atomicSub(&copying_requests, 1u);
  }
}

// ---- replaying a plan -----------------------------------------------------------------------------------------------

struct PlannedLaunch {
  Rooms rooms;
  ShortRows<const int64_t> miss_src;
  ShortRows<const int32_t> miss_dst;
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
  allow_next_launch();
  await_previous_launch();
  const int32_t real =
      launch.num_real_reqs != nullptr ? max(0, min(*launch.num_real_reqs, launch.batch)) : launch.batch;
  for (int32_t begin = 0; begin < real; begin += launch.at_once) {
    const int32_t end = min(real, begin + launch.at_once);
    __syncthreads();
    const uint32_t misses = sum_misses(launch, begin, end, sums);
    const uint32_t units = misses * rooms.pieces.divisor;
    if (units == 0) continue;
    const uint32_t pass = kUnits * (kWave / rooms.cut.lanes_per_unit);
    const uint32_t each = units_per_item(units * rooms.num_buffers, warps, pass);
    const uint32_t items = (units + each - 1) / each;
    const auto find = [&](uint32_t miss) {
      // The last request that begins at or before it.
      int32_t low = 0;
      int32_t high = end - begin;
      while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (sums[middle] <= miss ? low : high) = middle;
      }
      const uint32_t row = static_cast<uint32_t>(begin + low);
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
  rooms.steps = FastDivide(static_cast<uint32_t>(plan.steps));
  rooms.width = static_cast<uint32_t>(plan.package_bytes);
  while (plan.split.lanes_per_unit >> rooms.lane_bits > 1) ++rooms.lane_bits;
  const size_t count = std::min<size_t>(kMaxSwapInBuffers, group.dst_base.size() - first);
  for (size_t b = 0; b < count; ++b) {
    rooms.dst_base[b] = group.dst_base[first + b];
    rooms.src_base[b] = group.src_base[first + b];
  }
  rooms.num_buffers = static_cast<uint32_t>(count);
  return rooms;
}

using PlannedKernel = void (*)(PlannedLaunch);

#ifdef KVIO_ROCM
static_assert(kPolicy.wave_copy, "kernels have one shape: the wave copy takes any row");
PlannedKernel planned_kernel_of(const MissCopyPlan&) { return copy_planned_kernel<16, 1, 1>; }
#else
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

ResolveParams resolve_params(const SwapInRequest& r, const WorkspaceLayout& layout) {
  ResolveParams p{};
  p.top_k_tokens = short_rows(r.top_k_tokens);
  p.device_buffer_tokens = short_rows(r.device_buffer_tokens);
  p.device_buffer_locs = short_rows(r.device_buffer_locs);
  p.host_is_int64 = r.host_cache_locs.is_int64;
  p.host_cache_locs = {static_cast<const char*>(r.host_cache_locs.data),
                       static_cast<uint32_t>(r.host_cache_locs.stride * (p.host_is_int64 ? 8 : 4))};
  p.lru_slots = short_rows(r.lru_slots);
  p.top_k_device_locs = short_rows(r.top_k_device_locs);
  p.req_pool_indices = short_list(r.req_pool_indices);
  p.seq_lens = short_list(r.seq_lens);
  p.num_real_reqs = r.num_real_reqs;
  if (r.device_locs) p.device_locs = short_rows(*r.device_locs);
  if (r.plan) {
    p.miss_src = short_rows(r.plan->miss_src);
    p.miss_dst = short_rows(r.plan->miss_dst);
    p.miss_count = r.plan->miss_count;
  }
  constexpr int64_t kMost = 0x7fffffff;
  p.pool_slots = static_cast<int32_t>(std::min(r.pool_slots, kMost));
  p.max_len = static_cast<int32_t>(std::min(r.max_len, kMost));
  p.host_slots = r.pools.host_limit.slots;
  p.device_slots = static_cast<uint32_t>(std::min<int64_t>(r.pools.device_limit.slots, int64_t{1} << 31));
  p.top_k = static_cast<int32_t>(r.top_k);
  p.hot_slots = static_cast<int32_t>(r.hot_buffer_size);
  p.layout = layout;
  find_packs(&p);
  return p;
}

}  // namespace

namespace {

const void* kernel_for(int64_t ctas, bool is_shared) {
  if (!is_shared) return reinterpret_cast<const void*>(swap_in_kernel<1, false>);
#ifndef KVIO_ROCM
  if (ctas == 4) return reinterpret_cast<const void*>(swap_in_kernel<4, true>);
  if (ctas == 2) return reinterpret_cast<const void*>(swap_in_kernel<2, true>);
#endif
  return reinterpret_cast<const void*>(swap_in_kernel<1, true>);
}

}  // namespace

ResolvePlan plan_resolve(const SwapInRequest& request, int64_t cluster_ctas, bool early, int device) {
  constexpr int64_t kStaticBytes = 2048;  // what the kernel has besides its workspace, and the system's share
  const int64_t most = shared_memory_limit("swap_in", device) - kStaticBytes;
  ResolvePlan plan;
  plan.most_shared = most;
  plan.layout =
      lay_out_workspace(request.top_k, request.hot_buffer_size, kResolveThreads, most, kStagedBytes * kResolveThreads);
  const bool is_shared = plan.layout.bytes <= most;
  if (!is_shared) plan.scratch_bytes = plan.layout.bytes;
  plan.ctas = is_shared ? cluster_ctas : 1;
  plan.early = is_shared && early;
  plan.kernel = kernel_for(plan.ctas, is_shared);
  return plan;
}

void launch_resolve(const SwapInRequest& request, const ResolvePlan& plan, char* scratch, const FusedCopy& copy,
                    FaultRecord* fault, int device, Stream stream) {
  ResolveLaunch launch{};
  launch.p = resolve_params(request, plan.layout);
  launch.fault = fault;
  launch.fault_op = static_cast<int64_t>(FaultOp::kSwapIn);
  launch.scratch = scratch;
  launch.turns = static_cast<int32_t>(copy.turns);
  launch.free_misses = static_cast<int32_t>(copy.free_misses);
  for (const BufferGroup* group : copy.groups) {
    launch.rooms[launch.num_rooms++] = make_rooms(*group, 0, make_fused_copy_plan(*group, kPolicy));
  }
  if (scratch == nullptr) allow_shared_memory("swap_in", plan.kernel, device, static_cast<int>(plan.most_shared));
  void* arguments[] = {&launch};
  LaunchShape shape;
  shape.blocks = static_cast<unsigned>(request.batch * plan.ctas);
  shape.threads = kResolveThreads;
  shape.shared_bytes = scratch == nullptr ? static_cast<size_t>(plan.layout.bytes) : 0;
  shape.cluster = static_cast<unsigned>(plan.ctas);
  // Until it has waited it touches nothing but its shared memory.
  shape.early = plan.early;
  check("swap_in", "launching the swap-in kernel", launch_kernel(plan.kernel, shape, arguments, stream));
}

void launch_copy_planned(const CopyPlannedRequest& request, const BufferGroup& group, const MissCopyPlan& plan,
                         bool early, FaultRecord* fault, Stream stream) {
  PlannedLaunch launch{};
  launch.miss_src = short_rows(request.plan.miss_src);
  launch.miss_dst = short_rows(request.plan.miss_dst);
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
    LaunchShape shape;
    shape.blocks = static_cast<unsigned>(blocks);
    shape.threads = kPlannedThreads;
    shape.early = early;
    check("copy_planned", "launching the copy kernel",
          launch_kernel(reinterpret_cast<const void*>(planned_kernel_of(plan)), shape, arguments, stream));
  }
}

}  // namespace kvio::gpu
