// The front door: every schema and every registration. Tensors become a checked request here; backends see only that.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cpu/load_layers.h"
#include "cpu/swap_in.h"
#include "cpu/transfer.h"
#include "error.h"
#include "plan/backend.h"
#include "plan/copy_round.h"
#include "plan/rates.h"
#include "plan/runs.h"
#include "plan/staged_plan.h"
#include "request/handle_registry.h"
#include "request/load_layers_request.h"
#include "request/pool_view.h"
#include "request/request.h"
#include "request/swap_in_request.h"
#include "request/torch_tensor_view.h"
#ifdef KVIO_WITH_GPU
#include "gpu/fault.h"
#include "gpu/host_memory.h"
#include "gpu/load_layers.h"
#include "gpu/side_stream.h"
#include "gpu/staged.h"
#include "gpu/swap_in.h"
#include "gpu/transfer.h"
#endif

namespace kvio {
namespace {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

bool debug_checks() {
  const char* value = std::getenv("KVIO_DEBUG_CHECKS");
  if (value == nullptr) return false;
  const std::string text(value);
  return text != "" && text != "0" && text != "false" && text != "off" && text != "no";
}

// The arguments of transfer and explain in schema order, and the request made of them. Owns the arguments: the request
// points into their tensors.
class TransferCall {
 public:
  TransferCall(const char* op, StableIValue* stack)
      : dst_(stack[0]), src_(stack[1]), dst_indices_(stack[2]), src_indices_(stack[3]) {
    TransferOptions options;
    options.row_ndim = torch::stable::detail::to<int64_t>(stack[4]);
    options.page_size = torch::stable::detail::to<int64_t>(stack[5]);
    options.index_unit = boxed_string(stack[6]);
    options.backend = boxed_string(stack[7]);
    options.num_blocks = torch::stable::detail::to<int64_t>(stack[8]);
    options.prefer = boxed_string(stack[9]);
    request = make_transfer_request(op, dst_.views(), src_.views(), dst_indices_.view(), src_indices_.view(), options,
                                    dtype_name);
    if (request.index_device == DeviceKind::kCpu) check_cpu_indices(op, request, debug_checks());
  }

  TransferRequest request;

 private:
  BoxedTensorList dst_;
  BoxedTensorList src_;
  BoxedTensor dst_indices_;
  BoxedTensor src_indices_;
};

void transfer_on_cpu(const char* op, const TransferRequest& request) {
  choose_backend(op, request.backend, facts_of(request, GpuFacts()));
  if (!request.empty()) cpu::transfer(request);
}

void transfer_cpu(StableIValue* stack, uint64_t, uint64_t) {
  transfer_on_cpu("transfer", TransferCall("transfer", stack).request);
}

// A host pool that compiled graphs name by its handle: no pass can clone what it cannot see.
struct RegisteredPool {
  Tensors buffers;  // their views are taken anew in each call, as those of arguments are
  int64_t row_ndim;
};

HandleRegistry<RegisteredPool>& pools() {
  static auto* registry = new HandleRegistry<RegisteredPool>();  // outlives every other static
  return *registry;
}

int64_t register_pool(Tensors buffers, int64_t row_ndim, int64_t handle) {
  constexpr const char* op = "register_pool";
  check_row_ndim(op, row_ndim);
  if (buffers.empty()) fail(op, "buffers is empty; it needs at least one");
  const std::vector<TensorView> views = views_of(buffers);
  check_one_device(op, "buffers", views);
  if (views[0].device != DeviceKind::kCpu) {
    fail(op, "buffers[0] is on ", device_name(views[0].device, views[0].device_index),
         "; it needs host memory (a device pool is the other side of a call)");
  }
  for (size_t i = 0; i < views.size(); ++i) {
    make_pool_view(op, "buffers", static_cast<int64_t>(i), views[i], row_ndim);
    check_not_expanded(op, "buffers", i, views[i]);
  }
  auto pool = std::make_shared<const RegisteredPool>(RegisteredPool{std::move(buffers), row_ndim});
  return pools().add(op, std::move(pool), handle);
}

void unregister_pool(int64_t handle) { pools().remove("unregister_pool", handle); }

enum class PoolSide : uint8_t { kDst, kSrc };

// What tells the two ops on a handle apart.
struct PoolOp {
  const char* name;
  PoolSide pool;
  SideNames names;  // the pool's buffers are those that the other list's are paired with
  FaultOp fault;
};

constexpr PoolOp kWriteBack{"write_back", PoolSide::kDst, {"pool", "src"}, FaultOp::kWriteBack};
constexpr PoolOp kRestore{"restore", PoolSide::kSrc, {"dst", "pool"}, FaultOp::kRestore};

// The arguments of write_back and restore in schema order, and the request made of them. Owns the arguments and keeps
// the pool.
class PoolCall {
 public:
  PoolCall(const PoolOp& op, StableIValue* stack)
      : token_(stack[1]), device_side_(stack[2]), dst_indices_(stack[3]), src_indices_(stack[4]) {
    const int64_t handle = torch::stable::detail::to<int64_t>(stack[0]);
    const int64_t first = torch::stable::detail::to<int64_t>(stack[5]);
    TransferOptions options;
    options.page_size = torch::stable::detail::to<int64_t>(stack[6]);
    options.index_unit = boxed_string(stack[7]);
    options.backend = boxed_string(stack[8]);
    options.num_blocks = torch::stable::detail::to<int64_t>(stack[9]);
    options.prefer = boxed_string(stack[10]);
    options.names = op.names;
    pool_ = pools().find(op.name, handle);
    options.row_ndim = pool_->row_ndim;
    const std::vector<TensorView> device_side = device_side_.views();
    const std::vector<TensorView> pool = pool_buffers(op, handle, first, device_side.size());
    const bool writes_pool = op.pool == PoolSide::kDst;
    request = make_transfer_request(op.name, writes_pool ? pool : device_side, writes_pool ? device_side : pool,
                                    dst_indices_.view(), src_indices_.view(), options, dtype_name);
    request.fault_op = op.fault;
    check_token(op);
    if (request.index_device == DeviceKind::kCpu) check_cpu_indices(op.name, request, debug_checks());
  }

  TransferRequest request;

 private:
  std::vector<TensorView> pool_buffers(const PoolOp& op, int64_t handle, int64_t first, size_t count) const {
    const int64_t available = static_cast<int64_t>(pool_->buffers.size());
    if (first < 0 || first > available || static_cast<int64_t>(count) > available - first) {
      fail(op.name, "first_buffer is ", first, " and ", op.pool == PoolSide::kDst ? op.names.src : op.names.dst,
           " has ", count, " tensors, but the pool of handle ", handle, " has ", available,
           " buffers; it needs a range of buffers inside the pool");
    }
    std::vector<TensorView> views;
    views.reserve(count);
    for (size_t i = 0; i < count; ++i) views.push_back(view_of(pool_->buffers[static_cast<size_t>(first) + i]));
    return views;
  }

  // It chooses the kernel where nothing else is on a GPU, so it must not name one that the call does not use.
  void check_token(const PoolOp& op) const {
    const TensorView token = token_.view();
    if (token.device == DeviceKind::kCpu) return;
    if (token.device == DeviceKind::kGpu && token.device_index == request.gpu_index) return;
    fail(op.name, "token is on ", device_name(token.device, token.device_index), "; it needs the CPU",
         request.gpu_index >= 0 ? " or " + device_name(DeviceKind::kGpu, request.gpu_index) + ", as the other arguments"
                                : ", as the other arguments");
  }

  BoxedTensor token_;
  BoxedTensorList device_side_;
  BoxedTensor dst_indices_;
  BoxedTensor src_indices_;
  std::shared_ptr<const RegisteredPool> pool_;
};

void write_back_cpu(StableIValue* stack, uint64_t, uint64_t) {
  transfer_on_cpu(kWriteBack.name, PoolCall(kWriteBack, stack).request);
}

void restore_cpu(StableIValue* stack, uint64_t, uint64_t) {
  transfer_on_cpu(kRestore.name, PoolCall(kRestore, stack).request);
}

// The arguments of transfer_staged and explain_staged in schema order.
class StagedCall {
 public:
  StagedCall(const char* op, StableIValue* stack)
      : dst_(stack[0]), src_(stack[1]), dst_indices_(stack[2]), src_indices_(stack[3]), staging_(stack[4]) {
    TransferOptions options;
    options.page_size = torch::stable::detail::to<int64_t>(stack[5]);
    options.row_ndim = torch::stable::detail::to<int64_t>(stack[6]);
    options.index_unit = boxed_string(stack[7]);
    options.num_blocks = torch::stable::detail::to<int64_t>(stack[8]);
    request = make_staged_request(op, dst_.views(), src_.views(), dst_indices_.view(), src_indices_.view(),
                                  staging_.view(), options, dtype_name);
    check_cpu_indices(op, request.transfer, debug_checks());
  }

  StagedRequest request;

 private:
  BoxedTensorList dst_;
  BoxedTensorList src_;
  BoxedTensor dst_indices_;
  BoxedTensor src_indices_;
  BoxedTensor staging_;
};

// Without a GPU there is nothing to stage: the same checks, then rows go straight.
void transfer_staged_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const StagedCall call("transfer_staged", stack);
  make_staged_plan("transfer_staged", call.request);
  if (!call.request.transfer.empty()) cpu::transfer(call.request.transfer);
}

void explain_staged_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const StagedCall call("explain_staged", stack);
  const StagedPlan plan = make_staged_plan("explain_staged", call.request);
  stack[0] =
      torch::stable::detail::from(describe(plan, call.request) + "copies: by memcpy, every tensor is on the CPU\n");
}

void memcpy_batch_cpu(Tensors dst, Tensors src, std::vector<int64_t> dst_offsets, std::vector<int64_t> src_offsets,
                      std::vector<int64_t> nbytes) {
  cpu::memcpy_batch(make_memcpy_batch_request(views_of(dst), views_of(src), dst_offsets, src_offsets, nbytes));
}

std::string describe(const TransferRequest& request) {
  std::ostringstream text;
  text << "buffers: " << request.num_buffers() << "\nindices: " << request.num_indices << " on the "
       << (request.index_device == DeviceKind::kCpu ? "CPU" : "GPU") << ", " << request.slots_per_index
       << " rows each\nbytes: " << request.payload_bytes() << "\n";
  for (const BufferGroup& group : request.groups) {
    text << "rows: " << group.dst.row_bytes() << " bytes in " << group.dst.num_pieces << " pieces, "
         << group.dst_base.size() << " buffers";
    if (request.index_device == DeviceKind::kCpu) {
      int64_t runs = 0;
      for_each_run(request, group, 0, request.num_indices, [&](const Run&) { ++runs; });
      text << ", " << runs << " runs a buffer";
    }
    text << "\n";
  }
  return text.str();
}

void explain_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const TransferCall call("explain", stack);
  const TransferRequest& request = call.request;
  const BackendFacts facts = complete_facts_of(request, GpuFacts());
  const BackendChoice choice = choose_backend("explain", request.backend, facts);
  stack[0] = torch::stable::detail::from(describe(choice, facts) + describe(request));
}

// The arguments of swap_in in schema order. Owns them: the request points into their tensors.
class SwapInCall {
 public:
  explicit SwapInCall(StableIValue* stack)
      : top_k_tokens_(stack[0]),
        device_buffer_tokens_(stack[1]),
        device_buffer_locs_(stack[2]),
        host_cache_locs_(stack[3]),
        lru_slots_(stack[4]),
        host_cache_(stack[5]),
        device_buffer_(stack[6]),
        top_k_device_locs_(stack[7]),
        req_pool_indices_(stack[8]),
        seq_lens_(stack[9]),
        num_real_reqs_(stack[11]),
        device_locs_(stack[12]),
        miss_src_(stack[13]),
        miss_dst_(stack[14]),
        miss_count_(stack[15]) {
    SwapInTensors tensors;
    tensors.top_k_tokens = top_k_tokens_.view();
    tensors.device_buffer_tokens = device_buffer_tokens_.view();
    tensors.device_buffer_locs = device_buffer_locs_.view();
    tensors.host_cache_locs = host_cache_locs_.view();
    tensors.lru_slots = lru_slots_.view();
    tensors.host_cache = host_cache_.views();
    tensors.device_buffer = device_buffer_.views();
    tensors.top_k_device_locs = top_k_device_locs_.view();
    tensors.req_pool_indices = req_pool_indices_.view();
    tensors.seq_lens = seq_lens_.view();
    tensors.num_real_reqs = num_real_reqs_.view();
    tensors.device_locs = device_locs_.view();
    tensors.miss_src = miss_src_.view();
    tensors.miss_dst = miss_dst_.view();
    tensors.miss_count = miss_count_.view();
    SwapInOptions options;
    options.hot_buffer_size = torch::stable::detail::to<int64_t>(stack[10]);
    options.skip_io = torch::stable::detail::to<bool>(stack[16]);
    options.row_ndim = torch::stable::detail::to<int64_t>(stack[17]);
    options.num_blocks = torch::stable::detail::to<int64_t>(stack[18]);
    request = make_swap_in_request(tensors, options, dtype_name);
  }

  SwapInRequest request;

 private:
  BoxedTensor top_k_tokens_;
  BoxedTensor device_buffer_tokens_;
  BoxedTensor device_buffer_locs_;
  BoxedTensor host_cache_locs_;
  BoxedTensor lru_slots_;
  BoxedTensorList host_cache_;
  BoxedTensorList device_buffer_;
  BoxedTensor top_k_device_locs_;
  BoxedTensor req_pool_indices_;
  BoxedTensor seq_lens_;
  BoxedOptionalTensor num_real_reqs_;
  BoxedOptionalTensor device_locs_;
  BoxedOptionalTensor miss_src_;
  BoxedOptionalTensor miss_dst_;
  BoxedOptionalTensor miss_count_;
};

// The arguments of copy_planned in schema order.
class CopyPlannedCall {
 public:
  explicit CopyPlannedCall(StableIValue* stack)
      : host_cache_(stack[0]),
        device_buffer_(stack[1]),
        miss_src_(stack[2]),
        miss_dst_(stack[3]),
        miss_count_(stack[4]),
        num_real_reqs_(stack[5]) {
    SwapInOptions options;
    options.skip_io = torch::stable::detail::to<bool>(stack[6]);
    options.row_ndim = torch::stable::detail::to<int64_t>(stack[7]);
    options.num_blocks = torch::stable::detail::to<int64_t>(stack[8]);
    request = make_copy_planned_request({host_cache_.views(), device_buffer_.views(), miss_src_.view(),
                                         miss_dst_.view(), miss_count_.view(), num_real_reqs_.view()},
                                        options, dtype_name);
  }

  CopyPlannedRequest request;

 private:
  BoxedTensorList host_cache_;
  BoxedTensorList device_buffer_;
  BoxedTensor miss_src_;
  BoxedTensor miss_dst_;
  BoxedTensor miss_count_;
  BoxedTensor num_real_reqs_;
};

void swap_in_cpu(StableIValue* stack, uint64_t, uint64_t) { cpu::swap_in(SwapInCall(stack).request); }

void copy_planned_cpu(StableIValue* stack, uint64_t, uint64_t) { cpu::copy_planned(CopyPlannedCall(stack).request); }

// An epoch is an argument of either type: a tensor, or in overload `.int` a number.
class BoxedEpoch {
 public:
  BoxedEpoch(StableIValue value, bool is_number) {
    if (is_number) {
      number = torch::stable::detail::to<int64_t>(value);
    } else {
      tensor_.emplace(value);
    }
  }

  std::optional<TensorView> view() const { return tensor_ ? std::optional<TensorView>(tensor_->view()) : std::nullopt; }

  int64_t number = 0;

 private:
  std::optional<BoxedTensor> tensor_;
};

// The arguments of load_layers in schema order. Owns them: the request points into their tensors.
class LoadLayersCall {
 public:
  LoadLayersCall(StableIValue* stack, bool epoch_is_number)
      : dst_(stack[0]),
        src_(stack[1]),
        dst_indices_(stack[2]),
        src_indices_(stack[3]),
        flags_(stack[4]),
        epoch_(stack[5], epoch_is_number) {
    LoadLayersOptions options;
    options.epoch = epoch_.number;
    options.num_layers = torch::stable::detail::to<int64_t>(stack[6]);
    options.transfer.row_ndim = torch::stable::detail::to<int64_t>(stack[7]);
    options.transfer.page_size = torch::stable::detail::to<int64_t>(stack[8]);
    options.transfer.index_unit = boxed_string(stack[9]);
    options.transfer.num_blocks = torch::stable::detail::to<int64_t>(stack[10]);
    request = make_load_layers_request(
        {dst_.views(), src_.views(), dst_indices_.view(), src_indices_.view(), flags_.view(), epoch_.view()}, options,
        dtype_name);
    if (request.layer.index_device == DeviceKind::kCpu) {
      check_cpu_indices("load_layers", request.layer, debug_checks());
    }
  }

  LoadLayersRequest request;

 private:
  BoxedTensorList dst_;
  BoxedTensorList src_;
  BoxedTensor dst_indices_;
  BoxedTensor src_indices_;
  BoxedTensor flags_;
  BoxedEpoch epoch_;
};

// The arguments of wait_layer in schema order. `after` orders what reads the layer and is only held.
class WaitLayerCall {
 public:
  WaitLayerCall(StableIValue* stack, bool epoch_is_number)
      : flags_(stack[0]), epoch_(stack[2], epoch_is_number), after_(stack[3]) {
    WaitLayerOptions options;
    options.layer = torch::stable::detail::to<int64_t>(stack[1]);
    options.epoch = epoch_.number;
    options.timeout_ms = torch::stable::detail::to<int64_t>(stack[4]);
    request = make_wait_layer_request(flags_.view(), epoch_.view(), options, dtype_name);
  }

  WaitLayerRequest request;

 private:
  BoxedTensor flags_;
  BoxedEpoch epoch_;
  BoxedTensorList after_;
};

template <bool kNumber>
void load_layers_cpu(StableIValue* stack, uint64_t, uint64_t) {
  cpu::load_layers(LoadLayersCall(stack, kNumber).request);
}

template <bool kNumber>
void wait_layer_cpu(StableIValue* stack, uint64_t, uint64_t) {
  cpu::wait_layer(WaitLayerCall(stack, kNumber).request);
}

#ifdef KVIO_WITH_GPU

void transfer_gpu(StableIValue* stack, uint64_t, uint64_t) {
  TransferCall call("transfer", stack);
  gpu::transfer("transfer", &call.request);
}

void write_back_gpu(StableIValue* stack, uint64_t, uint64_t) {
  PoolCall call(kWriteBack, stack);
  gpu::transfer(kWriteBack.name, &call.request);
}

void restore_gpu(StableIValue* stack, uint64_t, uint64_t) {
  PoolCall call(kRestore, stack);
  gpu::transfer(kRestore.name, &call.request);
}

void memcpy_batch_gpu(Tensors dst, Tensors src, std::vector<int64_t> dst_offsets, std::vector<int64_t> src_offsets,
                      std::vector<int64_t> nbytes) {
  gpu::memcpy_batch(make_memcpy_batch_request(views_of(dst), views_of(src), dst_offsets, src_offsets, nbytes));
}

void explain_gpu(StableIValue* stack, uint64_t, uint64_t) {
  const TransferCall call("explain", stack);
  stack[0] = torch::stable::detail::from(gpu::explain(call.request) + describe(call.request));
}

void transfer_staged_gpu(StableIValue* stack, uint64_t, uint64_t) {
  StagedCall call("transfer_staged", stack);
  gpu::transfer_staged(&call.request);
}

void explain_staged_gpu(StableIValue* stack, uint64_t, uint64_t) {
  const StagedCall call("explain_staged", stack);
  stack[0] = torch::stable::detail::from(gpu::explain_staged(call.request));
}

void swap_in_gpu(StableIValue* stack, uint64_t, uint64_t) {
  SwapInCall call(stack);
  gpu::swap_in(&call.request);
}

void copy_planned_gpu(StableIValue* stack, uint64_t, uint64_t) {
  CopyPlannedCall call(stack);
  gpu::copy_planned(&call.request);
}

template <bool kNumber>
void load_layers_gpu(StableIValue* stack, uint64_t, uint64_t) {
  LoadLayersCall call(stack, kNumber);
  gpu::load_layers(&call.request);
}

template <bool kNumber>
void wait_layer_gpu(StableIValue* stack, uint64_t, uint64_t) {
  const WaitLayerCall call(stack, kNumber);
  // The flags decide: `after` may hold GPU tensors in a call about the CPU.
  if (call.request.gpu_index < 0) return cpu::wait_layer(call.request);
  gpu::wait_layer(call.request);
}

TensorView cpu_view_of(const char* op, const Tensor& tensor) {
  const TensorView view = view_of(tensor);
  if (view.device != DeviceKind::kCpu) {
    fail(op, "tensor is on ", device_name(view.device, view.device_index), "; it needs a CPU tensor");
  }
  return view;
}

void host_register(Tensor tensor, int64_t chunk_bytes, int64_t device_index) {
  constexpr const char* op = "host_register";
  const TensorView view = cpu_view_of(op, tensor);
  check_contiguous(op, "tensor", view);
  gpu::host_register(view.data, extent_bytes(view), chunk_bytes, gpu::resolve_device(op, device_index));
}

void host_unregister(Tensor tensor, int64_t device_index) {
  constexpr const char* op = "host_unregister";
  const TensorView view = cpu_view_of(op, tensor);
  if (is_empty(view)) return;
  gpu::host_unregister(view.data, extent_bytes(view), gpu::resolve_device(op, device_index));
}

int64_t device_pointer(Tensor tensor, int64_t device_index) {
  constexpr const char* op = "device_pointer";
  const TensorView view = view_of(tensor);
  if (view.device == DeviceKind::kGpu) return reinterpret_cast<int64_t>(view.data);
  gpu::resolve_device(op, device_index);
  gpu::HostTranslator translator(op);
  return reinterpret_cast<int64_t>(translator.device_address("tensor", 0, view.data, extent_bytes(view)));
}

int64_t create_stream(int64_t device_index) {
  constexpr const char* op = "create_stream";
  return reinterpret_cast<int64_t>(gpu::create_stream(op, gpu::resolve_device(op, device_index)));
}

std::vector<int64_t> take_fault(int64_t device_index) {
  gpu::Fault fault;
  if (!gpu::take_fault(gpu::current_or("take_fault", device_index), &fault)) return {};
  return {fault.op, fault.position, fault.value, fault.limit};
}

std::string backend_info() { return gpu::driver_info(); }

#else

[[noreturn]] void no_gpu(const char* op) {
  fail(op, "this build of sgl_kvio has no GPU code; it needs a wheel built with KVIO_BACKEND=cuda");
}

void host_register(Tensor, int64_t, int64_t) { no_gpu("host_register"); }
void host_unregister(Tensor, int64_t) { no_gpu("host_unregister"); }
int64_t device_pointer(Tensor, int64_t) { no_gpu("device_pointer"); }
int64_t create_stream(int64_t) { no_gpu("create_stream"); }
std::vector<int64_t> take_fault(int64_t) { return {}; }
std::string backend_info() { return "\"driver\": 0, \"devices\": 0, \"entry_points\": {}"; }

#endif

void push_rates(std::vector<double> rates) { set_rates("set_rates", rates); }

std::vector<double> get_rates() {
  const double* first = &current_rates().gbps[0][0][0][0];
  return std::vector<double>(first, first + kNumRates);
}

std::vector<int64_t> round_of_row(int64_t row_bytes, int64_t lanes) {
  constexpr const char* op = "copy_round";
  if (row_bytes < 1) fail(op, "row_bytes is ", row_bytes, "; it needs at least 1");
  if (lanes < 1) fail(op, "lanes is ", lanes, "; it needs at least 1");
  const CopyRound round = copy_round(row_bytes, lanes);
  return {round.bytes, round.package_bytes};
}

std::string build_info() {
  return std::string("{\"version\": \"" KVIO_VERSION "\", \"backend\": \"" KVIO_BACKEND_NAME
                     "\", \"archs\": \"" KVIO_ARCHS "\", \"toolkit\": \"" KVIO_TOOLKIT "\", ") +
         backend_info() + "}";
}

}  // namespace
}  // namespace kvio

STABLE_TORCH_LIBRARY(kvio, m) {
  m.def(
      "transfer(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, int row_ndim=2, "
      "int page_size=1, str index_unit=\"token\", str backend=\"auto\", int num_blocks=0, "
      "str prefer=\"throughput\") -> ()");
  m.def(
      "transfer_staged(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, Tensor(b!) staging, *, "
      "int page_size, int row_ndim=2, str index_unit=\"token\", int num_blocks=0) -> ()");
  m.def(
      "explain_staged(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, Tensor staging, *, "
      "int page_size, int row_ndim=2, str index_unit=\"token\", int num_blocks=0) -> str");
  m.def("register_pool(Tensor[] buffers, *, int row_ndim=2, int handle=0) -> int");
  m.def("unregister_pool(int handle) -> ()");
  // A pool's token is marked as written so that no pass drops these two or changes their order; no kernel touches it.
  m.def(
      "write_back(int handle, Tensor(a!) token, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, "
      "int first_buffer=0, int page_size=1, str index_unit=\"token\", str backend=\"auto\", int num_blocks=0, "
      "str prefer=\"throughput\") -> ()");
  m.def(
      "restore(int handle, Tensor(a!) token, Tensor(b!)[] dst, Tensor dst_indices, Tensor src_indices, *, "
      "int first_buffer=0, int page_size=1, str index_unit=\"token\", str backend=\"auto\", int num_blocks=0, "
      "str prefer=\"throughput\") -> ()");
  m.def("memcpy_batch(Tensor(a!)[] dst, Tensor[] src, int[] dst_offsets, int[] src_offsets, int[] nbytes) -> ()");
  m.def(
      "swap_in(Tensor top_k_tokens, Tensor(a!) device_buffer_tokens, Tensor device_buffer_locs, "
      "Tensor host_cache_locs, Tensor(b!) lru_slots, Tensor[] host_cache, Tensor(c!)[] device_buffer, "
      "Tensor(d!) top_k_device_locs, Tensor req_pool_indices, Tensor seq_lens, *, int hot_buffer_size, "
      "Tensor? num_real_reqs=None, Tensor? device_locs=None, Tensor(e!)? miss_src=None, Tensor(f!)? miss_dst=None, "
      "Tensor(g!)? miss_count=None, bool skip_io=False, int row_ndim=2, int num_blocks=0) -> ()");
  m.def(
      "copy_planned(Tensor[] host_cache, Tensor(a!)[] device_buffer, Tensor miss_src, Tensor miss_dst, "
      "Tensor miss_count, Tensor num_real_reqs, *, bool skip_io=False, int row_ndim=2, int num_blocks=0) -> ()");
  m.def(
      "load_layers(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, Tensor(b!) flags, "
      "Tensor epoch, *, int num_layers=0, int row_ndim=2, int page_size=1, str index_unit=\"token\", "
      "int num_blocks=0) -> ()");
  m.def(
      "load_layers.int(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, Tensor(b!) flags, "
      "SymInt epoch, *, int num_layers=0, int row_ndim=2, int page_size=1, str index_unit=\"token\", "
      "int num_blocks=0) -> ()");
  m.def("wait_layer(Tensor flags, int layer, Tensor epoch, Tensor(a!)[] after, *, int timeout_ms=60000) -> ()");
  m.def("wait_layer.int(Tensor flags, int layer, SymInt epoch, Tensor(a!)[] after, *, int timeout_ms=60000) -> ()");
  m.def("host_register(Tensor(a!) tensor, int chunk_bytes=0, int device_index=-1) -> ()");
  m.def("host_unregister(Tensor(a!) tensor, int device_index=-1) -> ()");
  m.def("device_pointer(Tensor tensor, int device_index=-1) -> int");
  m.def("create_stream(int device_index=-1) -> int");
  m.def("take_fault(int device_index=-1) -> int[]");
  m.def(
      "explain(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, int row_ndim=2, "
      "int page_size=1, str index_unit=\"token\", str backend=\"auto\", int num_blocks=0, "
      "str prefer=\"throughput\") -> str");
  m.def("set_rates(float[] rates) -> ()");
  m.def("get_rates() -> float[]");
  m.def("copy_round(int row_bytes, int lanes) -> int[]");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(kvio, CPU, m) {
  m.impl("transfer", &kvio::transfer_cpu);
  m.impl("write_back", &kvio::write_back_cpu);
  m.impl("restore", &kvio::restore_cpu);
  m.impl("memcpy_batch", TORCH_BOX(&kvio::memcpy_batch_cpu));
  m.impl("explain", &kvio::explain_cpu);
  m.impl("transfer_staged", &kvio::transfer_staged_cpu);
  m.impl("explain_staged", &kvio::explain_staged_cpu);
  m.impl("swap_in", &kvio::swap_in_cpu);
  m.impl("copy_planned", &kvio::copy_planned_cpu);
  m.impl("load_layers", &kvio::load_layers_cpu<false>);
  m.impl("load_layers.int", &kvio::load_layers_cpu<true>);
  m.impl("wait_layer", &kvio::wait_layer_cpu<false>);
  m.impl("wait_layer.int", &kvio::wait_layer_cpu<true>);
  m.impl("host_register", TORCH_BOX(&kvio::host_register));
  m.impl("host_unregister", TORCH_BOX(&kvio::host_unregister));
  m.impl("device_pointer", TORCH_BOX(&kvio::device_pointer));
}

#ifdef KVIO_WITH_GPU
STABLE_TORCH_LIBRARY_IMPL(kvio, CUDA, m) {
  m.impl("transfer", &kvio::transfer_gpu);
  m.impl("write_back", &kvio::write_back_gpu);
  m.impl("restore", &kvio::restore_gpu);
  m.impl("memcpy_batch", TORCH_BOX(&kvio::memcpy_batch_gpu));
  m.impl("explain", &kvio::explain_gpu);
  m.impl("transfer_staged", &kvio::transfer_staged_gpu);
  m.impl("explain_staged", &kvio::explain_staged_gpu);
  m.impl("swap_in", &kvio::swap_in_gpu);
  m.impl("copy_planned", &kvio::copy_planned_gpu);
  m.impl("load_layers", &kvio::load_layers_gpu<false>);
  m.impl("load_layers.int", &kvio::load_layers_gpu<true>);
  m.impl("wait_layer", &kvio::wait_layer_gpu<false>);
  m.impl("wait_layer.int", &kvio::wait_layer_gpu<true>);
  m.impl("host_register", TORCH_BOX(&kvio::host_register));
  m.impl("host_unregister", TORCH_BOX(&kvio::host_unregister));
  m.impl("device_pointer", TORCH_BOX(&kvio::device_pointer));
}
#endif

// Calls without a tensor to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(kvio, CompositeExplicitAutograd, m) {
  m.impl("memcpy_batch", TORCH_BOX(&kvio::memcpy_batch_cpu));
  m.impl("register_pool", TORCH_BOX(&kvio::register_pool));
  m.impl("unregister_pool", TORCH_BOX(&kvio::unregister_pool));
  m.impl("create_stream", TORCH_BOX(&kvio::create_stream));
  m.impl("take_fault", TORCH_BOX(&kvio::take_fault));
  m.impl("set_rates", TORCH_BOX(&kvio::push_rates));
  m.impl("get_rates", TORCH_BOX(&kvio::get_rates));
  m.impl("copy_round", TORCH_BOX(&kvio::round_of_row));
  m.impl("build_info", TORCH_BOX(&kvio::build_info));
}
