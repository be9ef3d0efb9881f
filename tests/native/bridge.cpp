// Lets pytest call the host C++ of csrc/request and csrc/plan. No torch and no GPU: a tensor is what a test says it is,
// and its memory is never touched. Only index arrays are real.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/backend.h"
#include "plan/copy_plan.h"
#include "plan/copy_round.h"
#include "plan/copy_width.h"
#include "plan/layers_plan.h"
#include "plan/miss_copy_plan.h"
#include "plan/order.h"
#include "plan/rates.h"
#include "plan/register_plan.h"
#include "plan/run_stats.h"
#include "plan/runs.h"
#include "plan/staged_plan.h"
#include "plan/tma_plan.h"
#include "request/load_layers_request.h"
#include "request/pool_view.h"
#include "request/request.h"
#include "request/staged_request.h"
#include "request/swap_in_request.h"
#include "request/tensor_view.h"

namespace py = pybind11;

namespace kvio {

void bind_layer_flags_steps(py::module_& m);  // layer_flags_steps.cpp
void bind_swap_in_steps(py::module_& m);      // swap_in_steps.cpp
void bind_wave_copy_moves(py::module_& m);    // wave_copy_moves.cpp

namespace {

struct Dtype {
  const char* name;
  int64_t element_size;
};

// A dtype's code is its place here.
constexpr Dtype kDtypes[] = {{"uint8", 1},   {"int8", 1},     {"int16", 2},   {"int32", 4},   {"int64", 8},
                             {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"float8_e4m3fn", 1}};

std::string name_of(int32_t code) { return kDtypes[code].name; }

int32_t code_of(const std::string& name) {
  for (size_t code = 0; code < std::size(kDtypes); ++code) {
    if (name == kDtypes[code].name) return static_cast<int32_t>(code);
  }
  throw py::value_error("the bridge knows no dtype " + name);
}

std::string dtype_of_format(const py::buffer_info& info) {
  const char kind = info.format.empty() ? '?' : info.format.back();
  const std::string bits = std::to_string(info.itemsize * 8);
  if (std::string("bhilq").find(kind) != std::string::npos) return "int" + bits;
  if (std::string("BHILQ").find(kind) != std::string::npos) return "uint" + bits;
  return "float" + bits;
}

DeviceKind device_kind(const std::string& name) {
  if (name == "cpu") return DeviceKind::kCpu;
  if (name == "gpu") return DeviceKind::kGpu;
  if (name == "other") return DeviceKind::kOther;
  throw py::value_error("device is " + name + "; the bridge needs cpu, gpu or other");
}

// A description of a tensor that owns its sizes and strides.
class Tensor {
 public:
  Tensor(uint64_t address, std::vector<int64_t> sizes, std::vector<int64_t> strides, const std::string& dtype,
         const std::string& device, int32_t device_index)
      : sizes_(std::move(sizes)), strides_(std::move(strides)) {
    if (sizes_.size() != strides_.size()) throw py::value_error("sizes and strides differ in length");
    facts_.data = reinterpret_cast<char*>(address);
    facts_.dtype = code_of(dtype);
    facts_.element_size = kDtypes[facts_.dtype].element_size;
    facts_.is_int16 = dtype == "int16";
    facts_.is_int32 = dtype == "int32";
    facts_.is_int64 = dtype == "int64";
    facts_.storage_bytes = INT64_MAX;
    facts_.device = device_kind(device);
    facts_.device_index = facts_.device == DeviceKind::kCpu ? -1 : device_index;
  }

  // An array that exists: it is kept alive.
  static Tensor of_buffer(const py::buffer& array, const std::string& device, int32_t device_index) {
    const py::buffer_info info = array.request();
    std::vector<int64_t> strides;
    for (const py::ssize_t bytes : info.strides) strides.push_back(bytes / info.itemsize);
    Tensor tensor(reinterpret_cast<uint64_t>(info.ptr), std::vector<int64_t>(info.shape.begin(), info.shape.end()),
                  std::move(strides), dtype_of_format(info), device, device_index);
    tensor.owner_ = array;
    return tensor;
  }

  TensorView view() const {
    TensorView view = facts_;
    view.sizes = sizes_.data();
    view.strides = strides_.data();
    view.ndim = static_cast<int64_t>(sizes_.size());
    return view;
  }

 private:
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  TensorView facts_;
  py::object owner_;
};

std::vector<TensorView> views_of(const std::vector<Tensor>& tensors) {
  std::vector<TensorView> views;
  for (const Tensor& tensor : tensors) views.push_back(tensor.view());
  return views;
}

// A request and the index arrays that it points into.
struct OwningRequest {
  TransferRequest request;
  Tensor dst_indices;
  Tensor src_indices;
};

OwningRequest make_request(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                           const Tensor& src_indices, int64_t row_ndim, int64_t page_size,
                           const std::string& index_unit, const std::string& backend, int64_t num_blocks,
                           const std::string& prefer) {
  const TransferOptions options{row_ndim, page_size, index_unit, backend, num_blocks, prefer};
  return {make_transfer_request("transfer", views_of(dst), views_of(src), dst_indices.view(), src_indices.view(),
                                options, name_of),
          dst_indices, src_indices};
}

template <class Pointer>
std::vector<uint64_t> addresses(const std::vector<Pointer>& pointers) {
  std::vector<uint64_t> numbers;
  for (const Pointer pointer : pointers) numbers.push_back(reinterpret_cast<uint64_t>(pointer));
  return numbers;
}

const char* kind_name(DeviceKind kind) {
  return kind == DeviceKind::kCpu ? "cpu" : (kind == DeviceKind::kGpu ? "gpu" : "other");
}

using SplitTuple = std::tuple<int64_t, int64_t, int64_t>;

SplitTuple tuple_of(const LaneSplit& split) {
  return {split.lanes_per_unit, split.units_per_lane, split.loads_per_unit};
}

void bind_request(py::module_& m) {
  py::class_<Tensor>(m, "Tensor")
      .def(py::init<uint64_t, std::vector<int64_t>, std::vector<int64_t>, const std::string&, const std::string&,
                    int32_t>(),
           py::arg("address"), py::arg("sizes"), py::arg("strides"), py::kw_only(), py::arg("dtype") = "uint8",
           py::arg("device") = "cpu", py::arg("device_index") = 0)
      .def_static("of_buffer", &Tensor::of_buffer, py::arg("array"), py::kw_only(), py::arg("device") = "cpu",
                  py::arg("device_index") = 0)
      .def_property_readonly("extent_bytes", [](const Tensor& t) { return extent_bytes(t.view()); });

  py::class_<PoolView>(m, "PoolView")
      .def_readonly("slots", &PoolView::slots)
      .def_readonly("page_slots", &PoolView::page_slots)
      .def_readonly("page_stride", &PoolView::page_stride)
      .def_readonly("token_stride", &PoolView::token_stride)
      .def_readonly("num_pieces", &PoolView::num_pieces)
      .def_readonly("piece_stride", &PoolView::piece_stride)
      .def_readonly("piece_bytes", &PoolView::piece_bytes)
      .def_property_readonly("is_flat", &PoolView::is_flat)
      .def_property_readonly("packed", &PoolView::packed)
      .def_property_readonly("row_bytes", &PoolView::row_bytes)
      .def("offset", &PoolView::offset, py::arg("slot"));

  m.def(
      "pool_view",
      [](const Tensor& tensor, int64_t row_ndim, const std::string& argument, int64_t position) {
        return make_pool_view("transfer", argument.c_str(), position, tensor.view(), row_ndim);
      },
      py::arg("tensor"), py::kw_only(), py::arg("row_ndim") = 2, py::arg("argument") = "dst", py::arg("position") = 0);
  m.def(
      "align_pieces",
      [](PoolView dst, PoolView src, int64_t position) {
        align_pieces("transfer", SideNames{"dst", "src"}, position, &dst, &src);
        return std::make_pair(dst, src);
      },
      py::arg("dst"), py::arg("src"), py::kw_only(), py::arg("position") = 0);

  py::class_<BufferGroup>(m, "BufferGroup")
      .def_readonly("dst", &BufferGroup::dst)
      .def_readonly("src", &BufferGroup::src)
      .def_property_readonly("dst_base", [](const BufferGroup& g) { return addresses(g.dst_base); })
      .def_property_readonly("src_base", [](const BufferGroup& g) { return addresses(g.src_base); })
      .def_readonly("position", &BufferGroup::position)
      .def_readonly("dst_extent", &BufferGroup::dst_extent)
      .def_readonly("src_extent", &BufferGroup::src_extent);

  py::class_<OwningRequest>(m, "TransferRequest")
      .def_property_readonly("groups", [](const OwningRequest& r) { return r.request.groups; })
      .def_property_readonly("num_indices", [](const OwningRequest& r) { return r.request.num_indices; })
      .def_property_readonly("slots_per_index", [](const OwningRequest& r) { return r.request.slots_per_index; })
      .def_property_readonly("num_blocks", [](const OwningRequest& r) { return r.request.num_blocks; })
      .def_property_readonly("backend", [](const OwningRequest& r) { return r.request.backend; })
      .def_property_readonly("dst_device", [](const OwningRequest& r) { return kind_name(r.request.dst_device); })
      .def_property_readonly("src_device", [](const OwningRequest& r) { return kind_name(r.request.src_device); })
      .def_property_readonly("index_device", [](const OwningRequest& r) { return kind_name(r.request.index_device); })
      .def_property_readonly("gpu_index", [](const OwningRequest& r) { return r.request.gpu_index; })
      .def_property_readonly("payload_bytes", [](const OwningRequest& r) { return r.request.payload_bytes(); })
      .def_property_readonly("num_buffers", [](const OwningRequest& r) { return r.request.num_buffers(); })
      .def_property_readonly("empty", [](const OwningRequest& r) { return r.request.empty(); });

  m.def("make_transfer_request", &make_request, py::arg("dst"), py::arg("src"), py::arg("dst_indices"),
        py::arg("src_indices"), py::kw_only(), py::arg("row_ndim") = 2, py::arg("page_size") = 1,
        py::arg("index_unit") = "token", py::arg("backend") = "auto", py::arg("num_blocks") = 0,
        py::arg("prefer") = "throughput");
  m.def(
      "check_cpu_indices",
      [](const OwningRequest& r, bool find_duplicates) { check_cpu_indices("transfer", r.request, find_duplicates); },
      py::arg("request"), py::kw_only(), py::arg("find_duplicates") = false);
  m.def(
      "make_memcpy_batch_request",
      [](const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const std::vector<int64_t>& dst_offsets,
         const std::vector<int64_t>& src_offsets, const std::vector<int64_t>& nbytes) {
        const MemcpyBatchRequest request =
            make_memcpy_batch_request(views_of(dst), views_of(src), dst_offsets, src_offsets, nbytes);
        std::vector<std::tuple<uint64_t, uint64_t, int64_t>> copies;
        for (const ByteCopy& c : request.copies) {
          copies.emplace_back(reinterpret_cast<uint64_t>(c.dst), reinterpret_cast<uint64_t>(c.src), c.nbytes);
        }
        return std::make_pair(copies, request.gpu_index);
      },
      py::arg("dst"), py::arg("src"), py::arg("dst_offsets"), py::arg("src_offsets"), py::arg("nbytes"));
  m.def(
      "check_contiguous",
      [](const Tensor& tensor, const std::string& argument) {
        check_contiguous("host_register", argument, tensor.view());
      },
      py::arg("tensor"), py::kw_only(), py::arg("argument") = "tensor");
}

void bind_plan(py::module_& m) {
  m.def("address_bits", &address_bits, py::arg("group"));
  m.def("address_alignment", &address_alignment, py::arg("dst"), py::arg("src"), py::arg("address_bits"));
  m.def("copy_width", &copy_width, py::arg("dst"), py::arg("src"), py::arg("address_bits"));
  m.def(
      "copy_round",
      [](int64_t row_bytes, int64_t lanes) {
        const CopyRound round = copy_round(row_bytes, lanes);
        return std::make_pair(round.bytes, round.package_bytes);
      },
      py::arg("row_bytes"), py::arg("lanes"), "(bytes of all lanes, bytes of one), zeros where no round serves");
  m.def("lanes_per_row", &lanes_per_row, py::arg("row_bytes"), py::arg("wave_lanes"));

  m.def(
      "runs",
      [](const OwningRequest& r, const BufferGroup& group, int64_t begin, int64_t end) {
        std::vector<std::tuple<int64_t, int64_t, int64_t>> runs;
        for_each_run(r.request, group, begin, end < 0 ? r.request.num_indices : end,
                     [&](const Run& run) { runs.emplace_back(run.dst_slot, run.src_slot, run.num_slots); });
        return runs;
      },
      py::arg("request"), py::arg("group"), py::kw_only(), py::arg("begin") = 0, py::arg("end") = -1);

  py::class_<UnitShape>(m, "UnitShape")
      .def(py::init([](int64_t packages, int64_t package_bytes, int64_t alignment) {
             return UnitShape{packages, package_bytes, alignment};
           }),
           py::kw_only(), py::arg("packages"), py::arg("package_bytes"), py::arg("alignment"))
      .def_readonly("packages", &UnitShape::packages)
      .def_readonly("package_bytes", &UnitShape::package_bytes)
      .def_readonly("alignment", &UnitShape::alignment);
  m.attr("LINE_BYTES") = kLineBytes;
  m.def("step_alignment", &step_alignment, py::arg("lanes"), py::arg("package_bytes"));
  m.def("max_skew", &max_skew, py::arg("unit"), py::arg("lanes"));
  m.def(
      "choose_lane_split", [](const UnitShape& unit, int64_t wave) { return tuple_of(choose_lane_split(unit, wave)); },
      py::arg("unit"), py::arg("wave") = 32, "(lanes a unit, units a lane, loads a unit)");

  py::enum_<Platform>(m, "Platform").value("cuda", Platform::kCuda).value("rocm", Platform::kRocm);
  py::class_<PlatformPolicy>(m, "PlatformPolicy")
      .def_readonly("wave_lanes", &PlatformPolicy::wave_lanes)
      .def_readonly("read_blocks", &PlatformPolicy::read_blocks)
      .def_readonly("write_blocks", &PlatformPolicy::write_blocks)
      .def_readonly("planned_blocks", &PlatformPolicy::planned_blocks)
      .def_readonly("wave_copy", &PlatformPolicy::wave_copy);
  m.def("policy_of", &policy_of, py::arg("platform"));
  py::class_<MissCopyPlan>(m, "MissCopyPlan")
      .def_readonly("package_bytes", &MissCopyPlan::package_bytes)
      .def_readonly("packages", &MissCopyPlan::packages)
      .def_readonly("remainder", &MissCopyPlan::remainder)
      .def_readonly("steps", &MissCopyPlan::steps)
      .def_readonly("skew_alignment", &MissCopyPlan::skew_alignment)
      .def_property_readonly("split", [](const MissCopyPlan& plan) { return tuple_of(plan.split); });
  m.def("make_fused_copy_plan", &make_fused_copy_plan, py::arg("group"), py::arg("policy"));
  m.def("make_planned_copy_plan", &make_planned_copy_plan, py::arg("group"), py::arg("policy"));
  m.def(
      "cluster_ctas_for",
      [](int64_t batch, int64_t num_sms, bool has_clusters) { return cluster_ctas_for(batch, num_sms, has_clusters); },
      py::arg("batch"), py::arg("num_sms"), py::arg("has_clusters"));
  m.def("register_policy", &register_policy, py::arg("platform"));

  py::class_<RegisterPolicy>(m, "RegisterPolicy")
      .def(py::init<>())
      .def_readwrite("warps_per_block", &RegisterPolicy::warps_per_block)
      .def_readwrite("bytes_per_warp_step", &RegisterPolicy::bytes_per_warp_step)
      .def_readwrite("max_units_per_item", &RegisterPolicy::max_units_per_item)
      .def_readwrite("long_piece_bytes", &RegisterPolicy::long_piece_bytes)
      .def_readonly("wave_lanes", &RegisterPolicy::wave_lanes)
      .def_readwrite("read_blocks", &RegisterPolicy::read_blocks)
      .def_readwrite("write_blocks", &RegisterPolicy::write_blocks)
      .def_readonly("wave_copy", &RegisterPolicy::wave_copy);

  py::class_<RegisterPlan>(m, "RegisterPlan")
      .def_readonly("dst", &RegisterPlan::dst)
      .def_readonly("src", &RegisterPlan::src)
      .def_readonly("slots_per_index", &RegisterPlan::slots_per_index)
      .def_readonly("package_bytes", &RegisterPlan::package_bytes)
      .def_readonly("packages", &RegisterPlan::packages)
      .def_readonly("remainder", &RegisterPlan::remainder)
      .def_property_readonly("split", [](const RegisterPlan& plan) { return tuple_of(plan.split); })
      .def_readonly("skew_alignment", &RegisterPlan::skew_alignment)
      .def_readonly("max_skew", &RegisterPlan::max_skew)
      .def_readonly("skew_by_dst", &RegisterPlan::skew_by_dst)
      .def_readonly("stretch_loads", &RegisterPlan::stretch_loads)
      .def_readonly("units", &RegisterPlan::units)
      .def_readonly("units_per_item", &RegisterPlan::units_per_item)
      .def_readonly("num_blocks", &RegisterPlan::num_blocks)
      .def_readonly("buffers_innermost", &RegisterPlan::buffers_innermost);

  m.def(
      "make_register_plan",
      [](const OwningRequest& r, const BufferGroup& group, int64_t range, int64_t num_sms,
         const RegisterPolicy& policy) {
        return make_register_plan(r.request, group, range < 0 ? r.request.num_indices : range, num_sms, policy);
      },
      py::arg("request"), py::arg("group"), py::kw_only(), py::arg("range") = -1, py::arg("num_sms") = 132,
      py::arg("policy") = RegisterPolicy());
  m.def(
      "max_indices_per_launch",
      [](const OwningRequest& r, const BufferGroup& group) { return max_indices_per_launch(r.request, group); },
      py::arg("request"), py::arg("group"));
}

// A request for all layers and the index arrays that it points into.
struct OwningLayers {
  LoadLayersRequest request;
  Tensor dst_indices;
  Tensor src_indices;
};

void bind_layers(py::module_& m) {
  py::class_<OwningLayers>(m, "LoadLayersRequest")
      .def_property_readonly("num_layers", [](const OwningLayers& r) { return r.request.num_layers; })
      .def_property_readonly("num_buffers", [](const OwningLayers& r) { return r.request.num_buffers; })
      .def_property_readonly("is_stacked", [](const OwningLayers& r) { return r.request.is_stacked(); })
      .def_property_readonly("gpu_index", [](const OwningLayers& r) { return r.request.layer.gpu_index; })
      .def("groups_of", [](const OwningLayers& r, int64_t layer) { return r.request.layer_at(layer).groups; });
  m.def(
      "make_load_layers_request",
      [](const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
         const Tensor& src_indices, const Tensor& flags, const std::optional<Tensor>& epoch, int64_t number,
         int64_t num_layers, int64_t page_size, const std::string& index_unit, int64_t num_blocks) {
        LoadLayersOptions options;
        options.epoch = number;
        options.num_layers = num_layers;
        options.transfer.page_size = page_size;
        options.transfer.index_unit = index_unit;
        options.transfer.num_blocks = num_blocks;
        std::optional<TensorView> epoch_view;
        if (epoch) epoch_view = epoch->view();
        return OwningLayers{make_load_layers_request({views_of(dst), views_of(src), dst_indices.view(),
                                                      src_indices.view(), flags.view(), epoch_view},
                                                     options, name_of),
                            dst_indices, src_indices};
      },
      py::arg("dst"), py::arg("src"), py::arg("dst_indices"), py::arg("src_indices"), py::arg("flags"), py::kw_only(),
      py::arg("epoch") = std::nullopt, py::arg("number") = 1, py::arg("num_layers") = 0, py::arg("page_size") = 1,
      py::arg("index_unit") = "token", py::arg("num_blocks") = 0);

  py::class_<LayerShape>(m, "LayerShape")
      .def_readonly("group", &LayerShape::group)
      .def_readonly("plan", &LayerShape::plan)
      .def_readonly("items", &LayerShape::items);
  py::class_<LayersPlan>(m, "LayersPlan")
      .def_property_readonly(
          "shapes",
          [](const LayersPlan& plan) { return std::vector<LayerShape>(plan.shapes, plan.shapes + plan.num_shapes); })
      .def_readonly("num_buffers", &LayersPlan::num_buffers)
      .def_readonly("package_bytes", &LayersPlan::package_bytes)
      .def_property_readonly("kernel", [](const LayersPlan& plan) { return tuple_of(plan.kernel); })
      .def_readonly("items_per_layer", &LayersPlan::items_per_layer)
      .def_readonly("num_blocks", &LayersPlan::num_blocks);
  m.def(
      "make_layers_plan",
      [](const OwningLayers& r, int64_t num_sms, const RegisterPolicy& policy) {
        return make_layers_plan(r.request, num_sms, policy);
      },
      py::arg("request"), py::kw_only(), py::arg("num_sms") = 132, py::arg("policy") = RegisterPolicy());
}

void bind_tma_plan(py::module_& m) {
  m.def("tma_refusal", [](const OwningRequest& r) { return tma_refusal(r.request); }, py::arg("request"));
  m.def("tma_stage_overhead", &tma_stage_overhead, py::arg("units_per_chunk"));

  py::class_<TmaPolicy>(m, "TmaPolicy")
      .def(py::init<>())
      .def_readwrite("chunk_bytes", &TmaPolicy::chunk_bytes)
      .def_readwrite("max_chunk_bytes", &TmaPolicy::max_chunk_bytes)
      .def_readwrite("min_chunk_bytes", &TmaPolicy::min_chunk_bytes)
      .def_readwrite("shared_bytes", &TmaPolicy::shared_bytes)
      .def_readonly("max_stages", &TmaPolicy::max_stages);

  py::class_<TmaPlan>(m, "TmaPlan")
      .def_readonly("dst", &TmaPlan::dst)
      .def_readonly("src", &TmaPlan::src)
      .def_readonly("slots_per_index", &TmaPlan::slots_per_index)
      .def_readonly("unit_bytes", &TmaPlan::unit_bytes)
      .def_readonly("units", &TmaPlan::units)
      .def_readonly("units_per_chunk", &TmaPlan::units_per_chunk)
      .def_readonly("chunks", &TmaPlan::chunks)
      .def_readonly("box_tokens", &TmaPlan::box_tokens)
      .def_readonly("stage_bytes", &TmaPlan::stage_bytes)
      .def_readonly("stages", &TmaPlan::stages)
      .def_readonly("loaders", &TmaPlan::loaders)
      .def_readonly("store_warps", &TmaPlan::store_warps)
      .def_readonly("num_blocks", &TmaPlan::num_blocks)
      .def_readonly("buffers_innermost", &TmaPlan::buffers_innermost);

  m.def(
      "make_tma_plan",
      [](const OwningRequest& r, const BufferGroup& group, int64_t range, bool with_boxes, const TmaPolicy& policy) {
        return make_tma_plan(r.request, group, range, with_boxes, policy);
      },
      py::arg("request"), py::arg("group"), py::kw_only(), py::arg("range"), py::arg("with_boxes"),
      py::arg("policy") = TmaPolicy());
}

using EntryTuple = std::tuple<uint64_t, uint64_t, int64_t>;

EntryTuple tuple_of(const CopyEntry& entry) {
  return {reinterpret_cast<uint64_t>(entry.dst), reinterpret_cast<uint64_t>(entry.src), entry.nbytes};
}

// Bytes from an address to the end of its chunk of a registration that begins at `begin`; 0 for an endless chunk.
int64_t chunk_room(const void* address, uint64_t begin, uint64_t chunk_bytes) {
  if (chunk_bytes == 0) return INT64_MAX;
  return static_cast<int64_t>(chunk_bytes - (reinterpret_cast<uint64_t>(address) - begin) % chunk_bytes);
}

void bind_copy(py::module_& m) {
  m.def(
      "copy_entries",
      [](const OwningRequest& r) {
        std::vector<EntryTuple> entries;
        for_each_copy_entry(r.request, [&](const CopyEntry& entry) { entries.push_back(tuple_of(entry)); });
        return entries;
      },
      py::arg("request"));
  m.def(
      "count_copy_entries",
      [](const OwningRequest& r) {
        int64_t count = 0;
        for_each_copy_entry(r.request, [&](const CopyEntry&) { ++count; });
        return count;
      },
      py::arg("request"));
  m.def(
      "split_copy_entry",
      [](const EntryTuple& whole, std::pair<uint64_t, uint64_t> dst_chunks, std::pair<uint64_t, uint64_t> src_chunks) {
        std::vector<EntryTuple> parts;
        split_copy_entry(
            CopyEntry{reinterpret_cast<char*>(std::get<0>(whole)), reinterpret_cast<const char*>(std::get<1>(whole)),
                      std::get<2>(whole)},
            [&](const CopyEntry& rest) { return chunk_room(rest.dst, dst_chunks.first, dst_chunks.second); },
            [&](const CopyEntry& rest) { return chunk_room(rest.src, src_chunks.first, src_chunks.second); },
            [&](const CopyEntry& part) { parts.push_back(tuple_of(part)); });
        return parts;
      },
      py::arg("entry"), py::kw_only(), py::arg("dst_chunks"), py::arg("src_chunks"));

  py::class_<BatchPolicy>(m, "BatchPolicy")
      .def(py::init<>())
      .def_readwrite("first", &BatchPolicy::first)
      .def_readwrite("growth_percent", &BatchPolicy::growth_percent)
      .def_readwrite("most", &BatchPolicy::most);
  m.attr("MAX_BATCH_ENTRIES") = kMaxBatchEntries;
  m.def("cut_into_batches", &cut_into_batches, py::arg("entries"), py::kw_only(), py::arg("policy") = BatchPolicy());
  m.def(
      "copy_engine_route",
      [](bool capturing, bool legacy_stream, bool has_batch_call, bool alias_differs) {
        GpuFacts gpu;
        gpu.capturing = capturing;
        gpu.legacy_stream = legacy_stream;
        gpu.has_batch_call = has_batch_call;
        const CopyEngineRoute route = copy_engine_route(gpu, alias_differs);
        return std::make_tuple(route.batched, route.forked, describe(route));
      },
      py::kw_only(), py::arg("capturing") = false, py::arg("legacy_stream") = false, py::arg("has_batch_call") = true,
      py::arg("alias_differs") = false, "(batched, forked, the line that explain prints)");

  py::class_<OrderPolicy>(m, "OrderPolicy")
      .def(py::init<>())
      .def_readwrite("span_bytes", &OrderPolicy::span_bytes)
      .def_readwrite("run_bytes", &OrderPolicy::run_bytes)
      .def_readwrite("indices", &OrderPolicy::indices)
      .def_readwrite("sweeps", &OrderPolicy::sweeps);
  m.def(
      "worth_ordering",
      [](const OwningRequest& r, const OrderPolicy& policy) { return worth_ordering(r.request, policy); },
      py::arg("request"), py::kw_only(), py::arg("policy") = OrderPolicy());
  m.def(
      "worth_ordering_unseen",
      [](const OwningRequest& r, const OrderPolicy& policy) { return worth_ordering_unseen(r.request, policy); },
      py::arg("request"), py::kw_only(), py::arg("policy") = OrderPolicy());
}

Backend backend_of(const std::string& name) {
  for (const Backend backend : {Backend::kCpu, Backend::kRegister, Backend::kTma, Backend::kCopyEngine}) {
    if (name == backend_name(backend)) return backend;
  }
  throw py::value_error("the bridge knows no backend " + name);
}

RateTable table_of(const std::vector<double>& rates) {
  if (rates.empty()) return built_in_rates();
  RateTable table{};
  if (static_cast<int64_t>(rates.size()) != kNumRates) throw py::value_error("wrong number of rates");
  std::copy(rates.begin(), rates.end(), &table.gbps[0][0][0][0]);
  return table;
}

std::vector<double> flat(const RateTable& table) {
  const double* first = &table.gbps[0][0][0][0];
  return std::vector<double>(first, first + kNumRates);
}

std::pair<std::string, std::string> pair_of(const BackendChoice& choice) {
  return {backend_name(choice.backend), choice.reason};
}

std::pair<int64_t, int64_t> pair_of(const RunStats& stats) { return {stats.runs, stats.stretches}; }

// A text that lives on: facts only point at theirs.
const char* kept(const std::string& text) {
  static std::set<std::string> texts;
  return texts.insert(text).first->c_str();
}

void bind_facts(py::module_& m) {
  m.def("fault_subject", [](int64_t number) {
    const FaultSubject subject = fault_subject(number);
    return std::make_tuple(subject.op, subject.argument, subject.is_matrix, subject.consequence, subject.is_too_old);
  });
  m.def("fault_need", [](int64_t number, int64_t limit) { return fault_need(fault_subject(number), limit); });
  m.def("fault_place", [](int64_t number, int64_t position) { return fault_place(fault_subject(number), position); });
  m.def("matrix_position", &matrix_position);
  py::enum_<Direction>(m, "Direction")
      .value("H2D", Direction::kHostToDevice)
      .value("D2H", Direction::kDeviceToHost)
      .value("D2D", Direction::kDeviceToDevice)
      .value("H2H", Direction::kHostToHost);
  py::enum_<Prefer>(m, "Prefer").value("throughput", Prefer::kThroughput).value("quiet", Prefer::kQuiet);
  py::class_<GpuFacts>(m, "GpuFacts")
      .def(py::init<>())
      .def_readwrite("platform", &GpuFacts::platform)
      .def_readwrite("compute_major", &GpuFacts::compute_major)
      .def_readwrite("capturing", &GpuFacts::capturing)
      .def_readwrite("legacy_stream", &GpuFacts::legacy_stream)
      .def_readwrite("has_batch_call", &GpuFacts::has_batch_call)
      .def_readwrite("has_tensor_maps", &GpuFacts::has_tensor_maps)
      .def_readwrite("has_bulk_code", &GpuFacts::has_bulk_code);
  py::class_<BackendFacts>(m, "BackendFacts")
      .def(py::init<>())
      .def_readwrite("any_gpu", &BackendFacts::any_gpu)
      .def_readwrite("indices_on_cpu", &BackendFacts::indices_on_cpu)
      .def_readwrite("direction", &BackendFacts::direction)
      .def_readwrite("gpu", &BackendFacts::gpu)
      .def_readwrite("host_rows_apart", &BackendFacts::host_rows_apart)
      .def_readwrite("row_bytes", &BackendFacts::row_bytes)
      .def_readwrite("run_bytes", &BackendFacts::run_bytes)
      .def_readwrite("stretch_bytes", &BackendFacts::stretch_bytes)
      .def_readwrite("num_entries", &BackendFacts::num_entries)
      .def_readwrite("payload_bytes", &BackendFacts::payload_bytes)
      .def_readwrite("host_span_bytes", &BackendFacts::host_span_bytes)
      .def_readwrite("prefer", &BackendFacts::prefer)
      .def_readwrite("tma_single_rows", &BackendFacts::tma_single_rows)
      .def_property(
          "tma_refusal",
          [](const BackendFacts& f) {
            return f.tma_refusal == nullptr ? py::object(py::none()) : py::str(f.tma_refusal);
          },
          [](BackendFacts& f, const std::string& text) { f.tma_refusal = text.empty() ? nullptr : kept(text); })
      .def_property_readonly("no_tma", [](const BackendFacts& f) { return f.overrides.no_tma; })
      .def_property_readonly("no_copy_engine", [](const BackendFacts& f) { return f.overrides.no_copy_engine; })
      .def_property_readonly("order",
                             [](const BackendFacts& f) {
                               std::vector<std::string> names;
                               for (int i = 0; i < f.overrides.num_ordered; ++i) {
                                 names.emplace_back(backend_name(f.overrides.order[i]));
                               }
                               return names;
                             })
      .def("read_environment", [](BackendFacts& f) { f.overrides = overrides_from_environment("transfer"); });

  m.def("facts_of", [](const OwningRequest& r, const GpuFacts& gpu) { return facts_of(r.request, gpu); });
  m.def("complete_facts_of",
        [](const OwningRequest& r, const GpuFacts& gpu) { return complete_facts_of(r.request, gpu); });
  m.def("count_runs", [](const OwningRequest& r) { return pair_of(count_runs(r.request)); }, "(runs, stretches)");
  m.def("promised_runs", [](const OwningRequest& r) { return pair_of(promised_runs(r.request)); }, "(runs, stretches)");

  m.def(
      "choose_backend",
      [](const std::string& wanted, const BackendFacts& facts, const std::vector<double>& rates) {
        return pair_of(choose_backend("transfer", wanted, facts, table_of(rates)));
      },
      py::arg("wanted"), py::arg("facts"), py::arg("rates") = std::vector<double>(), "(backend, reason)");
  m.def("choose_by_current_rates", [](const std::string& wanted, const BackendFacts& facts) {
    return pair_of(choose_backend("transfer", wanted, facts));
  });
  m.def(
      "expected_gbps",
      [](const std::string& backend, const BackendFacts& facts, const std::vector<double>& rates) {
        return expected_gbps(table_of(rates), backend_of(backend), facts);
      },
      py::arg("backend"), py::arg("facts"), py::arg("rates") = std::vector<double>());
  m.def("describe_capture", &describe_capture);
  m.def("describe", [](const std::string& wanted, const BackendFacts& facts) {
    return describe(choose_backend("explain", wanted, facts), facts);
  });
  m.def("rate_of", [](const std::vector<double>& rates, const std::string& backend, Direction direction,
                      bool rows_apart, double run_bytes) {
    return rate_of(table_of(rates), backend_of(backend), direction, rows_apart, run_bytes);
  });
  m.def("link_rate",
        [](const std::vector<double>& rates, Direction direction) { return link_rate(table_of(rates), direction); });
  m.def("set_rates", [](const std::vector<double>& rates) { set_rates("set_rates", rates); });
  m.def("current_rates", [] { return flat(current_rates()); });
  m.def("built_in_rates", [] { return flat(built_in_rates()); });
}

void bind_staged(py::module_& m) {
  py::class_<PageBlock>(m, "PageBlock")
      .def_readonly("group", &PageBlock::group)
      .def_readonly("buffers", &PageBlock::buffers)
      .def_property_readonly("host", [](const PageBlock& b) { return reinterpret_cast<uint64_t>(b.host); })
      .def_readonly("page_stride", &PageBlock::page_stride)
      .def_readonly("nbytes", &PageBlock::nbytes)
      .def_readonly("staged_offset", &PageBlock::staged_offset)
      .def_readonly("staged_stride", &PageBlock::staged_stride)
      .def("place", &staged_place, py::arg("pages"), py::arg("page"))
      .def("pages_in_one_piece", [](const PageBlock& block, const std::vector<int64_t>& pages) {
        return pages_in_one_piece(block, pages.data(), static_cast<int64_t>(pages.size()));
      });
  py::class_<StagedLayout>(m, "StagedLayout")
      .def_readonly("blocks", &StagedLayout::blocks)
      .def_readonly("page_bytes", &StagedLayout::page_bytes);
  py::class_<StagedPlan>(m, "StagedPlan")
      .def_readonly("host_is_dst", &StagedPlan::host_is_dst)
      .def_readonly("layout", &StagedPlan::layout)
      .def_property_readonly("half_pages", [](const StagedPlan& p) { return p.halves.pages; })
      .def_property_readonly("num_halves", [](const StagedPlan& p) { return p.halves.count; })
      .def_property_readonly("positions_per_page", [](const StagedPlan& p) { return p.work.positions_per_page; })
      .def_property_readonly("num_pages", [](const StagedPlan& p) { return p.work.num_pages; })
      .def_property_readonly("stretches",
                             [](const StagedPlan& p) {
                               std::vector<std::pair<int64_t, std::vector<int64_t>>> found;
                               for (const PageStretch& s : p.work.stretches) found.emplace_back(s.first, s.pages);
                               return found;
                             })
      .def_property_readonly("rest", [](const StagedPlan& p) {
        std::vector<std::pair<int64_t, int64_t>> found;
        for (const PositionRange& r : p.work.rest) found.emplace_back(r.begin, r.end);
        return found;
      });
  m.attr("STAGED_ALIGNMENT") = kStagedAlignment;
  m.attr("LONE_CHUNK_BYTES") = kLoneChunkBytes;
  m.def(
      "next_chunk",
      [](int64_t staging_bytes, int64_t page_bytes, bool host_is_dst, bool lone, int64_t left) {
        StagedLayout layout;
        layout.page_bytes = page_bytes;
        return next_chunk(halves_of(staging_bytes, layout), host_is_dst, lone, left);
      },
      py::kw_only(), py::arg("staging_bytes"), py::arg("page_bytes"), py::arg("host_is_dst"), py::arg("lone"),
      py::arg("left"));
  m.def(
      "staged_plan",
      [](const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
         const Tensor& src_indices, const Tensor& staging, int64_t page_size, const std::string& index_unit) {
        TransferOptions options;
        options.page_size = page_size;
        options.index_unit = index_unit;
        const StagedRequest request =
            make_staged_request("transfer_staged", views_of(dst), views_of(src), dst_indices.view(), src_indices.view(),
                                staging.view(), options, name_of);
        check_cpu_indices("transfer_staged", request.transfer, false);
        return std::make_pair(make_staged_plan("transfer_staged", request),
                              OwningRequest{request.transfer, dst_indices, src_indices});
      },
      py::arg("dst"), py::arg("src"), py::arg("dst_indices"), py::arg("src_indices"), py::arg("staging"), py::kw_only(),
      py::arg("page_size"), py::arg("index_unit") = "token");
  m.def("staged_view", &staged_view, py::arg("host"), py::arg("page_size"), py::arg("staged_stride"), py::arg("pages"));
}

void bind_swap_in(py::module_& m) {
  py::class_<SwapInPools>(m, "SwapInPools")
      .def_readonly("groups", &SwapInPools::groups)
      .def_property_readonly("host_slots", [](const SwapInPools& p) { return p.host_limit.slots; })
      .def_property_readonly("device_slots", [](const SwapInPools& p) { return p.device_limit.slots; })
      .def_property_readonly("device", [](const SwapInPools& p) { return kind_name(p.device); })
      .def_property_readonly("host_device", [](const SwapInPools& p) { return kind_name(p.host_device); })
      .def_readonly("gpu_index", &SwapInPools::gpu_index)
      .def_readonly("num_blocks", &SwapInPools::num_blocks)
      .def_property_readonly("moves_bytes", &SwapInPools::moves_bytes);
  py::class_<SwapInRequest>(m, "SwapInRequest")
      .def_readonly("pools", &SwapInRequest::pools)
      .def_readonly("batch", &SwapInRequest::batch)
      .def_readonly("top_k", &SwapInRequest::top_k)
      .def_readonly("hot_buffer_size", &SwapInRequest::hot_buffer_size)
      .def_readonly("pool_slots", &SwapInRequest::pool_slots)
      .def_readonly("max_len", &SwapInRequest::max_len)
      .def_property_readonly("row_strides",
                             [](const SwapInRequest& r) {
                               std::vector<int64_t> strides{r.top_k_tokens.stride,       r.device_buffer_tokens.stride,
                                                            r.device_buffer_locs.stride, r.host_cache_locs.stride,
                                                            r.lru_slots.stride,          r.top_k_device_locs.stride};
                               if (r.device_locs) strides.push_back(r.device_locs->stride);
                               if (r.plan)
                                 strides.insert(strides.end(), {r.plan->miss_src.stride, r.plan->miss_dst.stride});
                               return strides;
                             })
      .def_property_readonly("has_plan", [](const SwapInRequest& r) { return r.plan.has_value(); })
      .def_property_readonly("has_device_locs", [](const SwapInRequest& r) { return r.device_locs.has_value(); });
  m.def(
      "make_swap_in_request",
      [](const std::map<std::string, Tensor>& state, const std::vector<Tensor>& host_cache,
         const std::vector<Tensor>& device_buffer, int64_t hot_buffer_size, bool skip_io, int64_t row_ndim,
         int64_t num_blocks) {
        const auto given = [&](const char* name) {
          const auto it = state.find(name);
          return it == state.end() ? std::nullopt : std::optional<TensorView>(it->second.view());
        };
        SwapInTensors tensors;
        tensors.top_k_tokens = given("top_k_tokens").value();
        tensors.device_buffer_tokens = given("device_buffer_tokens").value();
        tensors.device_buffer_locs = given("device_buffer_locs").value();
        tensors.host_cache_locs = given("host_cache_locs").value();
        tensors.lru_slots = given("lru_slots").value();
        tensors.host_cache = views_of(host_cache);
        tensors.device_buffer = views_of(device_buffer);
        tensors.top_k_device_locs = given("top_k_device_locs").value();
        tensors.req_pool_indices = given("req_pool_indices").value();
        tensors.seq_lens = given("seq_lens").value();
        tensors.num_real_reqs = given("num_real_reqs");
        tensors.device_locs = given("device_locs");
        tensors.miss_src = given("miss_src");
        tensors.miss_dst = given("miss_dst");
        tensors.miss_count = given("miss_count");
        return make_swap_in_request(tensors, {hot_buffer_size, skip_io, row_ndim, num_blocks}, name_of);
      },
      py::arg("state"), py::arg("host_cache"), py::arg("device_buffer"), py::kw_only(), py::arg("hot_buffer_size"),
      py::arg("skip_io") = false, py::arg("row_ndim") = 2, py::arg("num_blocks") = 0,
      "`state` holds every tensor that is no buffer, by its name; those that may be left out may be missing");
}

}  // namespace
}  // namespace kvio

PYBIND11_MODULE(kvio_native, m) {
  m.doc() = "Host C++ of csrc/request and csrc/plan, for tests.";
  kvio::bind_request(m);
  kvio::bind_plan(m);
  kvio::bind_layers(m);
  kvio::bind_layer_flags_steps(m);
  kvio::bind_tma_plan(m);
  kvio::bind_copy(m);
  kvio::bind_facts(m);
  kvio::bind_staged(m);
  kvio::bind_swap_in_steps(m);
  kvio::bind_wave_copy_moves(m);
  kvio::bind_swap_in(m);
}
