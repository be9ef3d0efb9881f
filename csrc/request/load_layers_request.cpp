#include "request/load_layers_request.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace kvio {
namespace {

constexpr const char* kLoad = "load_layers";

// One list of buffers as the caller gave it.
struct Side {
  const char* name;
  const std::vector<TensorView>& tensors;
};

bool is_expanded(const TensorView& t) { return !is_empty(t) && t.sizes[0] > 1 && t.strides[0] == 0; }

int64_t checked_stacked(const Side& side, int64_t row_ndim) {
  for (size_t i = 0; i < side.tensors.size(); ++i) {
    const TensorView& t = side.tensors[i];
    if (t.ndim != row_ndim + 2 && t.ndim != row_ndim + 3) {
      fail(kLoad, side.name, "[", i, "] has shape ", shape_text(t.sizes, t.ndim), " with row_ndim=", row_ndim,
           "; it needs [layers, slots, *row] (", row_ndim + 2, " dims) or [layers, pages, page_size, *row] (",
           row_ndim + 3, " dims), or num_layers where each tensor is a buffer of one layer");
    }
    check_has_storage(kLoad, side.name, static_cast<int64_t>(i), t);
  }
  return side.tensors.empty() ? 0 : side.tensors[0].sizes[0];
}

void check_same_layers(const Side& side, int64_t num_layers) {
  for (size_t i = 0; i < side.tensors.size(); ++i) {
    const int64_t layers = side.tensors[i].sizes[0];
    if (layers == num_layers) continue;
    fail(kLoad, side.name, "[", i, "] has ", layers, " layers but dst[0] has ", num_layers,
         "; it needs equal first dimensions");
  }
}

// Layer 0 of stacked buffers. Of no layers there is none.
std::vector<TensorView> first_layer(const std::vector<TensorView>& stacked) {
  std::vector<TensorView> first;
  first.reserve(stacked.size());
  for (TensorView t : stacked) {
    ++t.sizes;
    ++t.strides;
    --t.ndim;
    first.push_back(t);
  }
  return first;
}

std::vector<int64_t> steps_of(const std::vector<TensorView>& stacked) {
  std::vector<int64_t> steps;
  steps.reserve(stacked.size());
  for (const TensorView& t : stacked) {
    steps.push_back(t.sizes[0] > 1 && !is_empty(t) ? t.strides[0] * t.element_size : 0);
  }
  return steps;
}

// Layers of listed buffers are alike: one geometry serves all of them.
void check_alike(const Side& side, size_t num_buffers) {
  for (size_t i = num_buffers; i < side.tensors.size(); ++i) {
    const TensorView& t = side.tensors[i];
    const TensorView& first = side.tensors[i % num_buffers];
    const size_t bytes = static_cast<size_t>(t.ndim) * sizeof(int64_t);
    if (t.ndim == first.ndim && t.dtype == first.dtype && std::memcmp(t.sizes, first.sizes, bytes) == 0 &&
        std::memcmp(t.strides, first.strides, bytes) == 0) {
      continue;
    }
    fail(kLoad, side.name, "[", i, "] has shape ", shape_text(t.sizes, t.ndim), " and strides ",
         shape_text(t.strides, t.ndim), "; it needs dtype, shape and strides of ", side.name, "[", i % num_buffers,
         "], the same buffer of layer 0: ", shape_text(first.sizes, first.ndim), " and ",
         shape_text(first.strides, first.ndim));
  }
}

void check_flags(const char* op, const TensorView& flags, int64_t layers, DtypeName dtype_name) {
  if (!flags.is_int64) fail(op, "flags has dtype ", dtype_name(flags.dtype), "; it needs int64");
  if (flags.ndim != 2 || flags.sizes[0] != 2 || flags.sizes[1] < layers) {
    fail(op, "flags has shape ", shape_text(flags.sizes, flags.ndim), "; it needs [2, ", layers,
         " or more], a column a layer");
  }
  check_contiguous(op, "flags", flags);
  if (flags.device == DeviceKind::kOther) fail(op, "flags is on another kind of device; it needs the CPU or a GPU");
  check_has_storage(op, "flags", -1, flags);
}

LayerFlags flags_of(const TensorView& flags) {
  LayerFlags result;
  result.raised = reinterpret_cast<int64_t*>(flags.data);
  result.finished = result.raised + flags.sizes[1];
  result.layers = flags.sizes[1];
  return result;
}

Epoch checked_epoch(const char* op, const std::optional<TensorView>& tensor, int64_t number, const TensorView& flags,
                    DtypeName dtype_name) {
  Epoch epoch;
  epoch.number = number;
  if (!tensor) return epoch;
  const TensorView& t = *tensor;
  if (!t.is_int64) fail(op, "epoch has dtype ", dtype_name(t.dtype), "; it needs int64, or an int");
  int64_t entries = 1;
  for (int64_t d = 0; d < t.ndim; ++d) entries *= t.sizes[d];
  if (entries != 1) fail(op, "epoch has shape ", shape_text(t.sizes, t.ndim), "; it needs one entry");
  if (t.device != flags.device || t.device_index != flags.device_index) {
    fail(op, "epoch is on ", device_name(t.device, t.device_index), " but flags is on ",
         device_name(flags.device, flags.device_index), "; it needs one device, or an int");
  }
  check_has_storage(op, "epoch", -1, t);
  epoch.at = reinterpret_cast<const int64_t*>(t.data);
  return epoch;
}

// What is loaded lies where the flags are: there its readers wait.
void check_places(TransferRequest* layer, const TensorView& flags) {
  const bool has_buffers = !layer->groups.empty();
  if (layer->gpu_index < 0 && flags.device == DeviceKind::kGpu && !has_buffers) layer->gpu_index = flags.device_index;
  if (has_buffers && layer->dst_device == DeviceKind::kCpu && layer->gpu_index >= 0) {
    fail(kLoad, "dst[0] is on cpu but another argument is on cuda:", layer->gpu_index,
         "; it needs a device pool on that GPU (kvio::transfer writes host pools)");
  }
  const DeviceKind wanted = layer->gpu_index >= 0 ? DeviceKind::kGpu : DeviceKind::kCpu;
  if (flags.device != wanted || flags.device_index != layer->gpu_index) {
    fail(kLoad, "flags is on ", device_name(flags.device, flags.device_index), "; it needs ",
         device_name(wanted, layer->gpu_index), ", as what is loaded");
  }
}

bool share_memory(const TensorView& a, const TensorView& b) {
  const int64_t a_bytes = extent_bytes(a);
  const int64_t b_bytes = extent_bytes(b);
  return a_bytes > 0 && b_bytes > 0 && a.data < b.data + b_bytes && b.data < a.data + a_bytes;
}

// Flags are written while the others are read and written.
void check_flags_apart(const LoadLayersTensors& tensors) {
  const auto check = [&](const TensorView& other, const auto&... name) {
    if (!share_memory(tensors.flags, other)) return;
    fail(kLoad, "flags shares memory with ", name..., "; it needs memory of its own");
  };
  for (size_t i = 0; i < tensors.dst.size(); ++i) check(tensors.dst[i], "dst[", i, "]");
  for (size_t i = 0; i < tensors.src.size(); ++i) check(tensors.src[i], "src[", i, "]");
  check(tensors.dst_indices, "dst_indices");
  check(tensors.src_indices, "src_indices");
  if (tensors.epoch) check(*tensors.epoch, "epoch");
}

void check_counts(const LoadLayersRequest& request) {
  if (request.num_buffers > kMaxBuffersPerLayer) {
    fail(kLoad, "dst has ", request.num_buffers, " buffers a layer; it needs at most ", kMaxBuffersPerLayer);
  }
  const auto moves = [](const BufferGroup& group) { return group.dst.row_bytes() > 0; };
  const auto& groups = request.layer.groups;
  const int64_t shapes = std::count_if(groups.begin(), groups.end(), moves);
  if (shapes > kMaxShapesPerLayer) {
    fail(kLoad, "dst has buffers of ", shapes, " different shapes in a layer; it needs at most ", kMaxShapesPerLayer);
  }
}

void set_stacked(LoadLayersRequest* request, const LoadLayersTensors& tensors, const TransferOptions& options,
                 DtypeName dtype_name) {
  const Side dst{"dst", tensors.dst};
  const Side src{"src", tensors.src};
  request->num_layers = checked_stacked(dst, options.row_ndim);
  checked_stacked(src, options.row_ndim);
  check_same_layers(dst, request->num_layers);
  check_same_layers(src, request->num_layers);
  for (size_t i = 0; i < tensors.dst.size(); ++i) {
    if (!is_expanded(tensors.dst[i])) continue;
    fail(kLoad, "dst[", i, "] has stride 0 from layer to layer; it needs memory of its own for every layer");
  }
  const bool has_layers = request->num_layers > 0;
  const std::vector<TensorView> none;
  request->layer = make_transfer_request(kLoad, has_layers ? first_layer(tensors.dst) : none,
                                         has_layers ? first_layer(tensors.src) : none, tensors.dst_indices,
                                         tensors.src_indices, options, dtype_name);
  request->dst_step = steps_of(tensors.dst);
  request->src_step = steps_of(tensors.src);
}

void set_listed(LoadLayersRequest* request, const LoadLayersTensors& tensors, const LoadLayersOptions& options,
                DtypeName dtype_name) {
  const size_t layers = static_cast<size_t>(options.num_layers);
  if (tensors.dst.size() % layers != 0) {
    fail(kLoad, "dst has ", tensors.dst.size(), " tensors for num_layers=", layers,
         "; it needs as many for every layer");
  }
  const size_t buffers = tensors.dst.size() / layers;
  for (const Side& side : {Side{"dst", tensors.dst}, Side{"src", tensors.src}}) {
    if (buffers == 0) continue;
    check_one_device(kLoad, side.name, side.tensors);
    check_alike(side, buffers);
  }
  const auto first = [&](const std::vector<TensorView>& list) {
    return std::vector<TensorView>(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(buffers));
  };
  request->num_layers = options.num_layers;
  request->layer = make_transfer_request(kLoad, first(tensors.dst), first(tensors.src), tensors.dst_indices,
                                         tensors.src_indices, options.transfer, dtype_name);
  for (const TensorView& t : tensors.dst) request->dst_listed.push_back(t.data);
  for (const TensorView& t : tensors.src) request->src_listed.push_back(t.data);
  request->dst_step.assign(buffers, 0);
  request->src_step.assign(buffers, 0);
}

}  // namespace

TransferRequest LoadLayersRequest::layer_at(int64_t number) const {
  TransferRequest one = layer;
  for (BufferGroup& group : one.groups) {
    for (size_t i = 0; i < group.position.size(); ++i) {
      const size_t b = static_cast<size_t>(group.position[i]);
      const size_t listed = static_cast<size_t>(number * num_buffers) + b;
      group.dst_base[i] = is_stacked() ? group.dst_base[i] + number * dst_step[b] : dst_listed[listed];
      group.src_base[i] = is_stacked() ? group.src_base[i] + number * src_step[b] : src_listed[listed];
    }
  }
  return one;
}

LoadLayersRequest make_load_layers_request(const LoadLayersTensors& tensors, const LoadLayersOptions& options,
                                           DtypeName dtype_name) {
  if (options.num_layers < 0) fail(kLoad, "num_layers is ", options.num_layers, "; it needs 0 (stacked) or more");
  check_row_ndim(kLoad, options.transfer.row_ndim);
  if (tensors.dst.size() != tensors.src.size()) {
    fail(kLoad, "src has ", tensors.src.size(), " tensors but dst has ", tensors.dst.size(),
         "; it needs lists of equal length");
  }
  LoadLayersRequest request;
  if (options.num_layers == 0) {
    set_stacked(&request, tensors, options.transfer, dtype_name);
  } else {
    set_listed(&request, tensors, options, dtype_name);
  }
  request.num_buffers = static_cast<int64_t>(request.dst_step.size());
  request.layer.fault_op = FaultOp::kLoadLayers;
  check_counts(request);
  check_flags(kLoad, tensors.flags, request.num_layers, dtype_name);
  check_places(&request.layer, tensors.flags);
  request.flags = flags_of(tensors.flags);
  if (!tensors.epoch && options.epoch < 1) fail(kLoad, "epoch is ", options.epoch, "; it needs 1 or more");
  request.epoch = checked_epoch(kLoad, tensors.epoch, options.epoch, tensors.flags, dtype_name);
  check_flags_apart(tensors);
  return request;
}

WaitLayerRequest make_wait_layer_request(const TensorView& flags, const std::optional<TensorView>& epoch,
                                         const WaitLayerOptions& options, DtypeName dtype_name) {
  constexpr const char* op = "wait_layer";
  check_flags(op, flags, 1, dtype_name);
  if (options.layer < 0 || options.layer >= flags.sizes[1]) {
    fail(op, "layer is ", options.layer, "; it needs 0 to ", flags.sizes[1] - 1, ", as flags has columns");
  }
  constexpr int64_t kMostMs = int64_t{1} << 31;
  if (options.timeout_ms < 1 || options.timeout_ms > kMostMs) {
    fail(op, "timeout_ms is ", options.timeout_ms, "; it needs 1 to ", kMostMs);
  }
  WaitLayerRequest request;
  request.flags = flags_of(flags);
  request.layer = options.layer;
  request.epoch = checked_epoch(op, epoch, options.epoch, flags, dtype_name);
  request.timeout_ms = options.timeout_ms;
  if (flags.device == DeviceKind::kGpu) request.gpu_index = flags.device_index;
  return request;
}

}  // namespace kvio
