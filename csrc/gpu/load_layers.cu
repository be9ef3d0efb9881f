// All layers of a restore in one launch, and the wait for one of them.
//
// What shaped it:
// * The copying is the register kernel's (gpu/register_items.cuh), with its few blocks. A walk over layers is added to
//   each item, and to each wave's share of a layer one fence and one atomic, which one wave waits for while the others
//   go on. Counting every item would fence several times as often.
// * There is no barrier between layers: at the end of one, waves go on with the next, so the link stays busy.
// * A block needs all registers of an SM, a wait one warp of one. So each wait keeps a load from one SM at most, and as
//   long as fewer streams wait than there are SMs, a load that was enqueued first finds room. A wait in front of it on
//   its own stream, or on one that it waits for, would keep it out for good: load first, then wait.
// * The wait is a kernel of one thread and not cuStreamWaitValue. A captured wait has to find out at every replay for
//   which epoch it is, and that lies in device memory, while the driver's wait compares with a constant. A kernel can
//   also give up, so that a wait for what nobody loads ends in an error and not in a stream that hangs for good; and it
//   is the same on AMD's GPUs. The price is a launch for each layer, on the CPU and on the reader's stream.

#include <algorithm>
#include <cstdint>

#include "gpu/fault.h"
#include "gpu/layer_flags.h"
#include "gpu/load_layers_kernels.h"
#include "gpu/register_items.cuh"

namespace kvio::gpu {
namespace {

constexpr int kFewBases = 16;  // of stacked pools, whose launch need not carry kilobytes of parameters
constexpr int kManyBases = kMaxParameterBytes < 8192 ? 128 : 256;
constexpr unsigned kRaiseThreads = 128;

// Where an epoch comes from, resolved by the kernel.
struct EpochSource {
  const int64_t* at;
  int64_t number;

  __device__ __forceinline__ int64_t value() const { return at != nullptr ? *at : number; }
};

struct ReportParams {
  LayerFlags flags;
  EpochSource epoch;
  FaultRecord* fault;
  uint32_t first_layer;
  uint32_t items_per_layer;
};

// Rows of one shape.
struct ShapeParams : UnitParams {
  FastDivide inner_items;  // where there is one shape: items of a layer are numbered outer * inner + inner
  uint32_t units_per_item;
  UnitCut cut;
};

// `kBases` base addresses: of layer 0's buffers, or of those of every layer.
template <int kBases, int kShapes>
struct Params {
  ShapeParams shapes[kShapes];
  ReportParams report;
  int64_t dst_step[kMaxBuffersPerLayer];  // bytes from a buffer to that of the next layer, 0 where all are listed
  int64_t src_step[kMaxBuffersPerLayer];
  uint32_t first_item[kMaxBuffersPerLayer];  // of a buffer among a layer's items, where there are several shapes
  uint8_t shape_of[kMaxBuffersPerLayer];
  uint32_t num_buffers;      // of a layer
  uint32_t bases_per_layer;  // 0 where all layers share those of layer 0
  uint32_t num_layers;
  char* dst_base[kBases];
  const char* src_base[kBases];
};

static_assert(sizeof(Params<kManyBases, kMaxShapesPerLayer>) <= kMaxParameterBytes, "a launch has room for them");

struct DeviceEnv {
  FaultRecord* record;
  FaultOp op;
  int32_t argument;  // counted from `op`
  int64_t position;

  __device__ __forceinline__ void publish() const { __threadfence(); }
  __device__ __forceinline__ void observe() const { __threadfence(); }
  __device__ __forceinline__ int64_t add(int64_t* at, int64_t value) const {
    return static_cast<int64_t>(
        atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value)));
  }
  __device__ __forceinline__ void raise(int64_t* flag, int64_t epoch) const { store_release(flag, epoch); }
  __device__ __forceinline__ int64_t read(const int64_t* flag) const { return load_acquire(flag); }
  __device__ __forceinline__ uint64_t now_ns() const { return clock_ns(); }
  __device__ __forceinline__ void pause() const { kvio::gpu::pause(); }
  __device__ __forceinline__ void fault(int64_t value, int64_t limit) const {
    record_fault(record, static_cast<int64_t>(op) + argument, position, value, limit);
  }
};

constexpr int32_t kEpochArgument = 2;  // of load_layers, in request/fault_subject.cpp

__device__ __forceinline__ DeviceEnv load_env(const ReportParams& p) {
  return {p.fault, FaultOp::kLoadLayers, kEpochArgument, 0};
}

__device__ __forceinline__ LayerReport report_of(const ReportParams& p, int64_t epoch) {
  return {p.flags, epoch, p.first_layer, p.items_per_layer};
}

struct Item {
  uint32_t layer;
  uint32_t buffer;
  uint32_t shape;
  uint32_t first_unit;
};

template <int kBases, int kShapes>
__device__ __forceinline__ Item item_at(const Params<kBases, kShapes>& p, const LayerWalk& walk) {
  if constexpr (kShapes == 1) {
    const ShapeParams& shape = p.shapes[0];
    const uint32_t outer = shape.inner_items.quotient(walk.item);
    const uint32_t inner = walk.item - outer * shape.inner_items.divisor;
    return shape.buffers_innermost ? Item{walk.layer, inner, 0, outer * shape.units_per_item}
                                   : Item{walk.layer, outer, 0, inner * shape.units_per_item};
  } else {
    uint32_t buffer = 0;
    while (buffer + 1 < p.num_buffers && walk.item >= p.first_item[buffer + 1]) ++buffer;
    const uint32_t shape = p.shape_of[buffer];
    return {walk.layer, buffer, shape, (walk.item - p.first_item[buffer]) * p.shapes[shape].units_per_item};
  }
}

template <int kBases, int kShapes>
struct BasesOf {
  const Params<kBases, kShapes>& p;
  const Item& item;

  __device__ __forceinline__ uint32_t at() const { return item.layer * p.bases_per_layer + item.buffer; }
  __device__ __forceinline__ char* dst() const { return p.dst_base[at()] + item.layer * p.dst_step[item.buffer]; }
  __device__ __forceinline__ const char* src() const { return p.src_base[at()] + item.layer * p.src_step[item.buffer]; }
};

template <int kBases, int kShapes>
__device__ __forceinline__ UnitIndex fetch_index_at(const Params<kBases, kShapes>& p, const LayerWalk& walk,
                                                    uint32_t lane) {
  const Item item = item_at(p, walk);
  return fetch_index(p.shapes[item.shape], item.first_unit, lane);
}

template <int kWidth, int kUnits, int kLoads, int kBases, int kShapes>
__global__ void __launch_bounds__(kItemThreads, 1)
    load_layers_kernel(const __grid_constant__ Params<kBases, kShapes> p) {
  const uint32_t lane = threadIdx.x % kWave;
  const uint32_t num_waves = gridDim.x * (kItemThreads / kWave);
  LayerWalk walk{0, 0};
  if (!walk.advance(blockIdx.x * (kItemThreads / kWave) + threadIdx.x / kWave, p.report.items_per_layer,
                    p.num_layers)) {
    return;
  }
  // Before the rows: the caller may change it once the last layer is in place. Kept by the one lane that uses it, and
  // not in a register of all.
  __shared__ int64_t epochs[kItemThreads / kWave];
  if (lane == 0) epochs[threadIdx.x / kWave] = p.report.epoch.value();
  UnitIndex index = fetch_index_at(p, walk, lane);
  while (true) {
    const Item item = item_at(p, walk);
    const ShapeParams& shape = p.shapes[item.shape];
    const Units units = locate(shape, item.first_unit, BasesOf<kBases, kShapes>{p, item}, index, lane);
    LayerWalk next = walk;
    if (next.advance(num_waves, p.report.items_per_layer, p.num_layers)) index = fetch_index_at(p, next, lane);
    copy_item<kWidth, kUnits, kLoads>(shape, units, lane);
    if (walk.is_last(num_waves, p.report.items_per_layer)) {
      sync_wave();
      if (lane == 0) {
        const int64_t epoch = epochs[threadIdx.x / kWave];
        finish_layer(load_env(p.report), report_of(p.report, epoch), walk.layer, num_waves);
      }
    }
    if (!walk.advance(num_waves, p.report.items_per_layer, p.num_layers)) return;
  }
}

// Of layers without a byte to move.
__global__ void __launch_bounds__(kRaiseThreads)
    raise_layers_kernel(const __grid_constant__ ReportParams p, uint32_t num_layers) {
  const LayerReport report = report_of(p, p.epoch.value());
  for (uint32_t layer = threadIdx.x; layer < num_layers; layer += kRaiseThreads) {
    raise_layer(load_env(p), report, layer);
  }
}

__global__ void __launch_bounds__(1) wait_layer_kernel(const int64_t* flag, const EpochSource epoch,
                                                       uint64_t timeout_ns, FaultRecord* fault, int64_t layer) {
  await_layer(DeviceEnv{fault, FaultOp::kWaitLayer, 0, layer}, flag, epoch.value(), timeout_ns);
}

template <int kBases, int kShapes>
struct Kernels {
  template <int kWidth, int kUnits, int kLoads>
  static auto kernel() {
    return &load_layers_kernel<kWidth, kUnits, kLoads, kBases, kShapes>;
  }
};

ReportParams report_params(const LoadLayersRequest& request, const LayersPlan& plan, FaultRecord* fault) {
  ReportParams p{};
  p.flags = request.flags;
  p.epoch = {request.epoch.at, request.epoch.number};
  p.fault = fault;
  p.items_per_layer = static_cast<uint32_t>(plan.items_per_layer);
  return p;
}

// Where a buffer of a layer comes from: group and place in it, and the caller's number of it.
struct Slot {
  const BufferGroup* group;
  size_t in_group;
  size_t position;
};

template <int kBases, int kShapes>
void set_shapes(const LoadLayersRequest& request, const LayersPlan& plan, FaultRecord* fault,
                Params<kBases, kShapes>* p, Slot* slots) {
  uint32_t item = 0;
  uint32_t buffer = 0;
  for (size_t s = 0; s < plan.num_shapes; ++s) {
    const LayerShape& from = plan.shapes[s];
    const BufferGroup& group = request.layer.groups[from.group];
    ShapeParams& shape = p->shapes[s];
    fill_unit_params(request.layer, from.plan, 0, fault, &shape);
    shape.cut = unit_cut(from.plan);
    shape.units_per_item = static_cast<uint32_t>(from.plan.units_per_item);
    shape.inner_items = FastDivide(shape.buffers_innermost ? static_cast<uint32_t>(group.dst_base.size())
                                                           : static_cast<uint32_t>(from.items));
    for (size_t i = 0; i < group.dst_base.size(); ++i, ++buffer) {
      const size_t position = static_cast<size_t>(group.position[i]);
      slots[buffer] = {&group, i, position};
      p->dst_step[buffer] = request.dst_step[position];
      p->src_step[buffer] = request.src_step[position];
      p->first_item[buffer] = item;
      p->shape_of[buffer] = static_cast<uint8_t>(s);
      item += static_cast<uint32_t>(from.items);
    }
  }
  p->num_buffers = buffer;
}

template <int kBases, int kShapes>
void launch(const Params<kBases, kShapes>& p, const LayersPlan& plan, Stream stream) {
  const auto kernel = register_kernel_of<Kernels<kBases, kShapes>>(plan.package_bytes, plan.kernel);
  void* arguments[] = {const_cast<Params<kBases, kShapes>*>(&p)};
  const Error launched =
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(plan.num_blocks)),
                       dim3(kItemThreads), arguments, 0, stream);
  check("load_layers", "launching the kernel", launched);
}

template <int kBases, int kShapes>
void launch_layers(const LoadLayersRequest& request, const LayersPlan& plan, FaultRecord* fault, Stream stream) {
  Params<kBases, kShapes> p;
  Slot slots[kMaxBuffersPerLayer];
  set_shapes(request, plan, fault, &p, slots);
  p.report = report_params(request, plan, fault);
  if (request.is_stacked()) {
    for (uint32_t b = 0; b < p.num_buffers; ++b) {
      p.dst_base[b] = slots[b].group->dst_base[slots[b].in_group];
      p.src_base[b] = slots[b].group->src_base[slots[b].in_group];
    }
    p.bases_per_layer = 0;
    p.num_layers = static_cast<uint32_t>(request.num_layers);
    launch(p, plan, stream);
    return;
  }
  p.bases_per_layer = p.num_buffers;
  const int64_t at_once = kBases / p.num_buffers;
  for (int64_t first = 0; first < request.num_layers; first += at_once) {
    const int64_t layers = std::min(at_once, request.num_layers - first);
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (uint32_t b = 0; b < p.num_buffers; ++b) {
        const size_t from = static_cast<size_t>((first + layer) * request.num_buffers) + slots[b].position;
        const size_t to = static_cast<size_t>(layer * p.num_buffers + b);
        p.dst_base[to] = request.dst_listed[from];
        p.src_base[to] = request.src_listed[from];
      }
    }
    p.report.first_layer = static_cast<uint32_t>(first);
    p.num_layers = static_cast<uint32_t>(layers);
    launch(p, plan, stream);
  }
}

}  // namespace

void launch_load_layers(const LoadLayersRequest& request, const LayersPlan& plan, FaultRecord* fault, Stream stream) {
  if (plan.items_per_layer == 0) {
    ReportParams p = report_params(request, plan, fault);
    uint32_t layers = static_cast<uint32_t>(request.num_layers);
    void* arguments[] = {&p, &layers};
    check("load_layers", "launching the kernel",
          cudaLaunchKernel(reinterpret_cast<const void*>(&raise_layers_kernel), dim3(1), dim3(kRaiseThreads), arguments,
                           0, stream));
    return;
  }
  const int64_t bases = plan.num_buffers * (request.is_stacked() ? 1 : request.num_layers);
  if (plan.num_shapes == 1 && bases <= kFewBases) {
    launch_layers<kFewBases, 1>(request, plan, fault, stream);
  } else {
    launch_layers<kManyBases, kMaxShapesPerLayer>(request, plan, fault, stream);
  }
}

void launch_wait_layer(const WaitLayerRequest& request, FaultRecord* fault, Stream stream) {
  const int64_t* flag = request.flags.raised + request.layer;
  EpochSource epoch{request.epoch.at, request.epoch.number};
  uint64_t timeout_ns = static_cast<uint64_t>(request.timeout_ms) * 1000000;
  int64_t layer = request.layer;
  void* arguments[] = {&flag, &epoch, &timeout_ns, &fault, &layer};
  check("wait_layer", "launching the kernel",
        cudaLaunchKernel(reinterpret_cast<const void*>(&wait_layer_kernel), dim3(1), dim3(1), arguments, 0, stream));
}

}  // namespace kvio::gpu
