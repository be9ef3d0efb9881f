#include "request/request.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "error.h"

namespace kvio {
namespace {

void check_index_tensor(const char* op, const char* argument, const TensorView& t, DtypeName dtype_name) {
  if (!t.is_int32 && !t.is_int64) {
    fail(op, argument, " has dtype ", dtype_name(t.dtype), "; it needs int32 or int64");
  }
  if (t.ndim != 1) {
    fail(op, argument, " has shape ", shape_text(t.sizes, t.ndim), "; it needs one dimension");
  }
  if (t.device == DeviceKind::kOther) fail(op, argument, " is on another kind of device; it needs the CPU or a GPU");
  check_has_storage(op, argument, -1, t);
}

// CPU kernels read an index after rows before it have been written, long after it was checked.
void check_indices_apart(const char* op, const char* dst_name, const std::vector<TensorView>& dst, const char* argument,
                         const TensorView& indices) {
  const char* begin = indices.data;
  const char* end = begin + extent_bytes(indices);
  for (size_t i = 0; i < dst.size(); ++i) {
    const int64_t extent = extent_bytes(dst[i]);
    if (extent > 0 && begin < end && begin < dst[i].data + extent && dst[i].data < end) {
      fail(op, argument, " shares memory with ", dst_name, "[", i, "]; it needs memory of its own");
    }
  }
}

// With no valid index there is no row that a kernel could touch safely.
void check_not_empty(const char* op, const TransferRequest& request) {
  const auto check = [&](const char* argument, const BufferGroup& group, const PoolView& view) {
    if (view.slots >= request.slots_per_index) return;
    fail(op, argument, "[", group.position[0], "] has ", view.slots, " token slots, less than one index names (",
         request.slots_per_index, "); it needs at least that many when there are indices");
  };
  for (const BufferGroup& group : request.groups) {
    check(request.names.dst, group, group.dst);
    check(request.names.src, group, group.src);
  }
}

// What kernels count in 32 bits.
void check_page_pieces(const char* op, const TransferRequest& request) {
  for (const BufferGroup& group : request.groups) {
    if (group.dst.row_bytes() == 0 || request.slots_per_index <= kMaxCount / group.dst.num_pieces) continue;
    fail(op, "page_size is ", request.page_size, " with rows of ", group.dst.num_pieces, " pieces; it needs at most ",
         kMaxCount, " pieces a page");
  }
}

void check_options(const char* op, const TransferOptions& o) {
  check_row_ndim(op, o.row_ndim);
  if (o.page_size < 1) fail(op, "page_size is ", o.page_size, "; it needs 1 or more");
  if (o.index_unit != "token" && o.index_unit != "page") {
    fail(op, "index_unit is '", o.index_unit, "'; it needs 'token' or 'page'");
  }
  check_num_blocks(op, o.num_blocks);
  if (o.prefer != "throughput" && o.prefer != "quiet") {
    fail(op, "prefer is '", o.prefer, "'; it needs 'throughput' or 'quiet'");
  }
}

void set_devices(const char* op, TransferRequest* request, const std::vector<TensorView>& dst,
                 const std::vector<TensorView>& src, const TensorView& dst_indices, const TensorView& src_indices,
                 bool one_index_device) {
  const bool apart = dst_indices.device != src_indices.device || dst_indices.device_index != src_indices.device_index;
  if (apart && one_index_device) {
    fail(op, "src_indices is on ", device_name(src_indices.device, src_indices.device_index), " but dst_indices is on ",
         device_name(dst_indices.device, dst_indices.device_index), "; it needs both on one device");
  }
  request->index_device = dst_indices.device;
  request->dst_index_device = dst_indices.device;
  request->src_index_device = src_indices.device;
  for (const TensorView* indices : {&dst_indices, &src_indices}) {
    if (indices->device == DeviceKind::kGpu) request->gpu_index = indices->device_index;
  }
  if (dst.empty()) return;
  const SideNames& names = request->names;
  check_one_device(op, names.dst, dst);
  check_one_device(op, names.src, src);
  request->dst_device = dst[0].device;
  request->src_device = src[0].device;
  const auto join = [&](const char* argument, const TensorView& t) {
    if (t.device != DeviceKind::kGpu) return;
    if (request->gpu_index >= 0 && request->gpu_index != t.device_index) {
      fail(op, argument, "[0] is on cuda:", t.device_index, " but another argument is on cuda:", request->gpu_index,
           "; it needs one GPU for ", names.dst, ", ", names.src,
           " and indices (a copy between GPUs goes through a host pool)");
    }
    request->gpu_index = t.device_index;
  };
  join(names.dst, dst[0]);
  join(names.src, src[0]);
}

}  // namespace

int64_t TransferRequest::payload_bytes() const {
  int64_t per_slot = 0;
  for (const BufferGroup& g : groups) per_slot += g.dst.row_bytes() * static_cast<int64_t>(g.dst_base.size());
  return per_slot * num_indices * slots_per_index;
}

int64_t TransferRequest::num_buffers() const {
  int64_t count = 0;
  for (const BufferGroup& g : groups) count += static_cast<int64_t>(g.dst_base.size());
  return count;
}

TransferRequest make_transfer_request(const char* op, const std::vector<TensorView>& dst,
                                      const std::vector<TensorView>& src, const TensorView& dst_indices,
                                      const TensorView& src_indices, const TransferOptions& options,
                                      DtypeName dtype_name) {
  check_options(op, options);
  if (dst.size() != src.size()) {
    fail(op, options.names.src, " has ", src.size(), " tensors but ", options.names.dst, " has ", dst.size(),
         "; it needs lists of equal length");
  }
  check_index_tensor(op, "dst_indices", dst_indices, dtype_name);
  check_index_tensor(op, "src_indices", src_indices, dtype_name);
  if (dst_indices.dtype != src_indices.dtype) {
    fail(op, "src_indices has dtype ", dtype_name(src_indices.dtype), " but dst_indices has ",
         dtype_name(dst_indices.dtype), "; it needs the same dtype");
  }
  if (dst_indices.sizes[0] != src_indices.sizes[0]) {
    fail(op, "src_indices has ", src_indices.sizes[0], " entries but dst_indices has ", dst_indices.sizes[0],
         "; it needs equal lengths");
  }

  TransferRequest request;
  request.names = options.names;
  set_devices(op, &request, dst, src, dst_indices, src_indices, options.one_index_device);
  request.dst_indices = {dst_indices.data, dst_indices.strides[0], dst_indices.is_int64};
  request.src_indices = {src_indices.data, src_indices.strides[0], src_indices.is_int64};
  request.num_indices = dst_indices.sizes[0];
  request.page_size = options.page_size;
  request.slots_per_index = options.index_unit == "page" ? options.page_size : 1;
  request.num_blocks = options.num_blocks;
  request.backend = options.backend;
  request.prefer = options.prefer == "quiet" ? Prefer::kQuiet : Prefer::kThroughput;

  request.groups = group_buffers(op, request.names, dst, src, options.row_ndim, dtype_name);
  if (request.num_indices > 0) check_not_empty(op, request);
  check_countable(op, request.names, request.groups);
  check_page_pieces(op, request);
  if (request.index_device == DeviceKind::kCpu && request.dst_device == DeviceKind::kCpu) {
    check_indices_apart(op, request.names.dst, dst, "dst_indices", dst_indices);
    check_indices_apart(op, request.names.dst, dst, "src_indices", src_indices);
  }
  return request;
}

namespace {

template <class Index>
int64_t first_outside(const IndexList& list, int64_t count, int64_t limit) {
  const Index* values = static_cast<const Index*>(list.data);
  // Branch-free first: a good list is the usual one.
  uint64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    bad |= static_cast<uint64_t>(static_cast<uint64_t>(static_cast<int64_t>(values[i * list.stride])) >=
                                 static_cast<uint64_t>(limit));
  }
  if (bad == 0) return -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = list.at(i);
    if (value < 0 || value >= limit) return i;
  }
  return -1;
}

void check_side(const char* op, const char* argument, const char* pool, const TransferRequest& request,
                const IndexList& list, PoolView BufferGroup::* view) {
  const SlotLimit limit = slot_limit(request.groups, view);
  const int64_t entries = limit.slots / request.slots_per_index;
  const int64_t at = list.is_int64 ? first_outside<int64_t>(list, request.num_indices, entries)
                                   : first_outside<int32_t>(list, request.num_indices, entries);
  if (at < 0) return;
  fail(op, argument, "[", at, "] is ", list.at(at), "; it needs 0 to ", entries - 1, " (", pool, "[", limit.position,
       "] has ", entries, request.slots_per_index > 1 ? " pages of page_size=" : " token slots",
       request.slots_per_index > 1 ? std::to_string(request.page_size) : std::string(), ")");
}

// Destinations written twice and rows both read and written, whose bytes the order of copying decides.
void find_conflicts(const char* op, const TransferRequest& request) {
  const char* dst = request.names.dst;
  std::unordered_map<const void*, int64_t> buffers;
  for (const BufferGroup& group : request.groups) {
    for (size_t b = 0; b < group.dst_base.size() && request.num_indices > 0; ++b) {
      const auto [it, fresh] = buffers.emplace(group.dst_base[b], group.position[b]);
      if (!fresh) {
        fail(op, dst, "[", group.position[b], "] is the memory of ", dst, "[", it->second,
             "]; it needs every destination once (KVIO_DEBUG_CHECKS is set)");
      }
    }
  }
  std::unordered_map<int64_t, int64_t> written;
  written.reserve(static_cast<size_t>(request.num_indices));
  for (int64_t i = 0; i < request.num_indices; ++i) {
    const auto [it, fresh] = written.emplace(request.dst_indices.at(i), i);
    if (!fresh) {
      fail(op, "dst_indices[", i, "] is ", request.dst_indices.at(i), ", as dst_indices[", it->second,
           "] is; it needs every destination once (KVIO_DEBUG_CHECKS is set)");
    }
  }
  for (const BufferGroup& group : request.groups) {
    for (const char* src : group.src_base) {
      const auto buffer = buffers.find(src);
      if (buffer == buffers.end()) continue;
      for (int64_t i = 0; i < request.num_indices; ++i) {
        const auto it = written.find(request.src_indices.at(i));
        if (it == written.end()) continue;
        fail(op, "src_indices[", i, "] is ", request.src_indices.at(i), ", a row of ", dst, "[", buffer->second,
             "] that dst_indices[", it->second,
             "] writes; it needs rows that this call does not write "
             "(KVIO_DEBUG_CHECKS is set)");
      }
    }
  }
}

}  // namespace

void check_cpu_indices(const char* op, const TransferRequest& request, bool with_conflicts) {
  if (request.groups.empty()) return;
  const bool read_dst = request.dst_index_device == DeviceKind::kCpu;
  const bool read_src = request.src_index_device == DeviceKind::kCpu;
  if (read_dst) check_side(op, "dst_indices", request.names.dst, request, request.dst_indices, &BufferGroup::dst);
  if (read_src) check_side(op, "src_indices", request.names.src, request, request.src_indices, &BufferGroup::src);
  if (with_conflicts && read_dst && read_src) find_conflicts(op, request);
}

void check_contiguous(const char* op, const std::string& argument, const TensorView& t) {
  if (is_empty(t)) return;
  int64_t expected = 1;
  for (int64_t d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] != 1 && t.strides[d] != expected) {
      fail(op, argument, " has shape ", shape_text(t.sizes, t.ndim), " and strides ", shape_text(t.strides, t.ndim),
           "; it needs a contiguous tensor");
    }
    expected *= t.sizes[d];
  }
}

namespace {

void check_range(const char* argument, const char* offsets, size_t k, int64_t tensor, int64_t offset, int64_t nbytes,
                 int64_t size) {
  if (offset < 0 || offset > size - nbytes) {
    fail("memcpy_batch", offsets, "[", k, "] is ", offset, " with nbytes[", k, "]=", nbytes,
         "; it needs to stay inside ", argument, "[", tensor, "] of ", size, " bytes");
  }
}

}  // namespace

MemcpyBatchRequest make_memcpy_batch_request(const std::vector<TensorView>& dst, const std::vector<TensorView>& src,
                                             const std::vector<int64_t>& dst_offsets,
                                             const std::vector<int64_t>& src_offsets,
                                             const std::vector<int64_t>& nbytes) {
  constexpr const char* op = "memcpy_batch";
  const size_t count = nbytes.size();
  const auto check_length = [&](const char* argument, size_t length) {
    if (length != count) {
      fail(op, argument, " has ", length, " entries but nbytes has ", count, "; it needs equal lengths");
    }
  };
  check_length("dst_offsets", dst_offsets.size());
  check_length("src_offsets", src_offsets.size());
  const auto check_tensors = [&](const char* argument, const std::vector<TensorView>& list) {
    if (list.size() != count && list.size() != 1 && count != 0) {
      fail(op, argument, " has ", list.size(), " tensors for ", count,
           " copies; it needs one tensor a copy, or one for all");
    }
    if (list.empty()) return;
    check_one_device(op, argument, list);
    for (size_t i = 0; i < list.size(); ++i) {
      check_contiguous(op, std::string(argument) + "[" + std::to_string(i) + "]", list[i]);
    }
  };
  check_tensors("dst", dst);
  check_tensors("src", src);

  MemcpyBatchRequest request;
  if (dst.empty() || src.empty()) return request;
  request.dst_device = dst[0].device;
  request.src_device = src[0].device;
  for (const TensorView* t : {&dst[0], &src[0]}) {
    if (t->device != DeviceKind::kGpu) continue;
    if (request.gpu_index >= 0 && request.gpu_index != t->device_index) {
      fail(op, "src[0] is on cuda:", src[0].device_index, " but dst[0] is on cuda:", dst[0].device_index,
           "; it needs one GPU");
    }
    request.gpu_index = t->device_index;
  }
  request.copies.reserve(count);
  for (size_t k = 0; k < count; ++k) {
    const size_t d = dst.size() == 1 ? 0 : k;
    const size_t s = src.size() == 1 ? 0 : k;
    if (nbytes[k] < 0) fail(op, "nbytes[", k, "] is ", nbytes[k], "; it needs 0 or more");
    check_range("dst", "dst_offsets", k, static_cast<int64_t>(d), dst_offsets[k], nbytes[k], extent_bytes(dst[d]));
    check_range("src", "src_offsets", k, static_cast<int64_t>(s), src_offsets[k], nbytes[k], extent_bytes(src[s]));
    if (nbytes[k] == 0) continue;
    request.copies.push_back({dst[d].data + dst_offsets[k], src[s].data + src_offsets[k], nbytes[k],
                              static_cast<int64_t>(d), static_cast<int64_t>(s)});
  }
  return request;
}

}  // namespace kvio
