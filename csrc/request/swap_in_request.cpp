#include "request/swap_in_request.h"

#include <algorithm>
#include <utility>

#include "error.h"

namespace kvio {
namespace {

constexpr SideNames kSides{"device_buffer", "host_cache"};

enum class Access : uint8_t { kRead, kWritten };
enum class Ints : uint8_t { kInt16, kInt32, kInt64, kInt32OrInt64 };

bool fits(const TensorView& t, Ints wanted) {
  if (wanted == Ints::kInt16) return t.is_int16;
  if (wanted == Ints::kInt32) return t.is_int32;
  if (wanted == Ints::kInt64) return t.is_int64;
  return t.is_int32 || t.is_int64;
}

const char* name_of(Ints wanted) {
  constexpr const char* kNames[] = {"int16", "int32", "int64", "int32 or int64"};
  return kNames[static_cast<size_t>(wanted)];
}

// The bytes that rows of a tensor cover: `rows` stretches of `width` bytes, one every `pitch` bytes.
struct Footprint {
  const char* begin = nullptr;
  int64_t width = 0;
  int64_t pitch = 0;
  int64_t rows = 0;

  int64_t extent() const { return rows == 0 || width == 0 ? 0 : (rows - 1) * pitch + width; }
  const char* end() const { return begin + extent(); }
};

bool extents_apart(const Footprint& a, const Footprint& b) {
  return a.extent() == 0 || b.extent() == 0 || a.end() <= b.begin || b.end() <= a.begin;
}

// Rows of one pitch may lie between each other, as columns of one wide tensor do. What cannot be shown apart is not.
bool apart(const Footprint& a, const Footprint& b) {
  if (extents_apart(a, b)) return true;
  const int64_t pitch = a.rows > 1 ? a.pitch : b.pitch;
  const bool one_pitch = a.rows == 1 || b.rows == 1 || a.pitch == b.pitch;
  if (!one_pitch || pitch <= 0 || (a.rows == 1 && b.rows == 1)) return false;
  const int64_t between = ((b.begin - a.begin) % pitch + pitch) % pitch;
  return between >= a.width && between + b.width <= pitch;
}

struct Named {
  const char* name;
  Footprint bytes;
  Access access;
};

// Checks the tensors of one call that are no buffers, and remembers where they lie.
class StateChecks {
 public:
  StateChecks(const char* op, const char* reference_name, const TensorView& reference, DtypeName dtype_name)
      : op_(op), reference_name_(reference_name), reference_(reference), dtype_name_(dtype_name) {
    if (reference.device == DeviceKind::kOther) {
      fail(op, reference_name, " is on a device of another kind; it needs a CPU or a GPU tensor");
    }
  }

  // Any number of rows and columns where -1 is given.
  void matrix(const char* name, const TensorView& t, Ints wanted, int64_t rows, int64_t columns, Access access) {
    check_dtype(name, t, wanted);
    if (t.ndim != 2 || (rows >= 0 && t.sizes[0] != rows) || (columns >= 0 && t.sizes[1] != columns)) {
      fail(op_, name, " has shape ", shape_text(t.sizes, t.ndim), "; it needs [", size_text(rows), ", ",
           size_text(columns), "]");
    }
    if (t.sizes[1] > 1 && t.strides[1] != 1 && !is_empty(t)) {
      fail(op_, name, " has stride ", t.strides[1], " in its last dimension; it needs rows without gaps");
    }
    if (access == Access::kWritten && t.sizes[0] > 1 && t.strides[0] < t.sizes[1]) {
      fail(op_, name, " has rows of ", t.sizes[1], " entries at stride ", t.strides[0],
           "; it needs rows that do not share memory");
    }
    place(name, t, {t.data, t.sizes[1] * t.element_size, t.strides[0] * t.element_size, t.sizes[0]}, access);
  }

  void list(const char* name, const TensorView& t, Ints wanted, int64_t entries, Access access) {
    check_dtype(name, t, wanted);
    if (t.ndim != 1 || t.sizes[0] != entries) {
      fail(op_, name, " has shape ", shape_text(t.sizes, t.ndim), "; it needs [", entries, "]");
    }
    if (access == Access::kWritten && t.sizes[0] > 1 && t.strides[0] == 0) {
      fail(op_, name, " has stride 0; it needs memory of its own for every entry (no expanded tensor)");
    }
    place(name, t, {t.data, t.element_size, t.strides[0] * t.element_size, t.sizes[0]}, access);
  }

  // What is written shares no memory with anything else of the call.
  void check_apart(const SwapInPools& pools, const std::vector<TensorView>& device_buffer,
                   const std::vector<TensorView>& host_cache) const {
    for (size_t i = 0; i < state_.size(); ++i) {
      for (size_t j = i + 1; j < state_.size(); ++j) {
        if (state_[i].access == Access::kRead && state_[j].access == Access::kRead) continue;
        if (apart(state_[i].bytes, state_[j].bytes)) continue;
        fail(op_, state_[j].name, " shares memory with ", state_[i].name, "; it needs memory of its own");
      }
    }
    const Footprint device = hull(device_buffer);
    const Footprint host = hull(host_cache);
    for (const Named& tensor : state_) {
      if (!extents_apart(tensor.bytes, device)) check_against(tensor, kSides.dst, device_buffer);
      if (tensor.access == Access::kRead || pools.host_device != pools.device) continue;
      if (!extents_apart(tensor.bytes, host)) check_against(tensor, kSides.src, host_cache);
    }
    if (pools.host_device == pools.device && !extents_apart(device, host)) check_pools_apart(device_buffer, host_cache);
    check_buffers_differ(device_buffer);
  }

 private:
  static std::string size_text(int64_t size) { return size < 0 ? "any" : std::to_string(size); }

  static Footprint footprint(const TensorView& buffer) { return {buffer.data, extent_bytes(buffer), 0, 1}; }

  static Footprint hull(const std::vector<TensorView>& buffers) {
    const char* begin = nullptr;
    const char* end = nullptr;
    for (const TensorView& buffer : buffers) {
      const Footprint bytes = footprint(buffer);
      if (bytes.extent() == 0) continue;
      begin = begin == nullptr ? bytes.begin : std::min(begin, bytes.begin);
      end = std::max(end, bytes.end());
    }
    return {begin, end - begin, 0, 1};
  }

  void check_dtype(const char* name, const TensorView& t, Ints wanted) const {
    if (!fits(t, wanted)) fail(op_, name, " has dtype ", dtype_name_(t.dtype), "; it needs ", name_of(wanted));
  }

  void place(const char* name, const TensorView& t, const Footprint& bytes, Access access) {
    if (t.device != reference_.device || t.device_index != reference_.device_index) {
      fail(op_, name, " is on ", device_name(t.device, t.device_index), " but ", reference_name_, " is on ",
           device_name(reference_.device, reference_.device_index), "; it needs the same device");
    }
    check_has_storage(op_, name, -1, t);
    state_.push_back({name, bytes, access});
  }

  void check_against(const Named& tensor, const char* side, const std::vector<TensorView>& buffers) const {
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (extents_apart(tensor.bytes, footprint(buffers[i]))) continue;
      fail(op_, tensor.name, " shares memory with ", side, "[", i, "]; it needs memory of its own");
    }
  }

  void check_pools_apart(const std::vector<TensorView>& device_buffer,
                         const std::vector<TensorView>& host_cache) const {
    for (size_t i = 0; i < device_buffer.size(); ++i) {
      for (size_t j = 0; j < host_cache.size(); ++j) {
        if (extents_apart(footprint(device_buffer[i]), footprint(host_cache[j]))) continue;
        fail(op_, "host_cache[", j, "] shares memory with device_buffer[", i, "]; it needs memory of its own");
      }
    }
  }

  // Views of one pool lie between each other, so only their first bytes are compared.
  void check_buffers_differ(const std::vector<TensorView>& device_buffer) const {
    if (device_buffer.size() < 2) return;
    std::vector<std::pair<const char*, size_t>> starts;
    for (size_t i = 0; i < device_buffer.size(); ++i) {
      if (!is_empty(device_buffer[i])) starts.emplace_back(device_buffer[i].data, i);
    }
    std::sort(starts.begin(), starts.end());
    for (size_t k = 1; k < starts.size(); ++k) {
      if (starts[k].first != starts[k - 1].first) continue;
      fail(op_, "device_buffer[", starts[k].second, "] is the memory of device_buffer[", starts[k - 1].second,
           "]; it needs every buffer once");
    }
  }

  const char* op_;
  const char* reference_name_;
  const TensorView& reference_;
  DtypeName dtype_name_;
  std::vector<Named> state_;
};

SwapInPools make_pools(const char* op, const std::vector<TensorView>& host_cache,
                       const std::vector<TensorView>& device_buffer, const char* reference_name,
                       const TensorView& reference, const SwapInOptions& options, DtypeName dtype_name) {
  check_row_ndim(op, options.row_ndim);
  check_num_blocks(op, options.num_blocks);
  if (host_cache.size() != device_buffer.size()) {
    fail(op, "host_cache has ", host_cache.size(), " tensors but device_buffer has ", device_buffer.size(),
         "; it needs lists of equal length");
  }
  SwapInPools pools;
  pools.device = reference.device;
  pools.host_device = DeviceKind::kCpu;
  pools.gpu_index = reference.device == DeviceKind::kGpu ? reference.device_index : -1;
  pools.skip_io = options.skip_io;
  pools.num_blocks = options.num_blocks;
  if (device_buffer.empty()) return pools;

  check_one_device(op, kSides.dst, device_buffer);
  check_one_device(op, kSides.src, host_cache);
  const TensorView& device = device_buffer[0];
  const TensorView& host = host_cache[0];
  if (device.device != reference.device || device.device_index != reference.device_index) {
    fail(op, "device_buffer[0] is on ", device_name(device.device, device.device_index), " but ", reference_name,
         " is on ", device_name(reference.device, reference.device_index), "; it needs the same device");
  }
  if (host.device != DeviceKind::kCpu &&
      (host.device != reference.device || host.device_index != reference.device_index)) {
    fail(op, "host_cache[0] is on ", device_name(host.device, host.device_index), "; it needs the CPU, or the GPU of ",
         reference_name);
  }
  pools.host_device = host.device;
  pools.groups = group_buffers(op, kSides, device_buffer, host_cache, options.row_ndim, dtype_name);
  check_countable(op, kSides, pools.groups);
  pools.device_limit = slot_limit(pools.groups, &BufferGroup::dst);
  pools.host_limit = slot_limit(pools.groups, &BufferGroup::src);
  return pools;
}

// With no valid location there is no row that a kernel could touch safely.
void check_has_slots(const char* op, const SwapInPools& pools, int64_t batch) {
  if (batch == 0) return;
  const auto check = [&](const char* side, const SlotLimit& limit) {
    if (limit.slots > 0) return;
    fail(op, side, "[", limit.position, "] has no token slot; it needs one at least when there are requests");
  };
  check(kSides.dst, pools.device_limit);
  check(kSides.src, pools.host_limit);
}

template <class T>
Rows<T> rows_of(const TensorView& t) {
  return {reinterpret_cast<T*>(t.data), t.strides[0]};
}

template <class T>
Strided<T> strided(const TensorView& t) {
  return {reinterpret_cast<T*>(t.data), t.strides[0]};
}

IndexList index_list(const TensorView& t) { return {t.data, t.strides[0], t.is_int64}; }

template <class Src, class Dst>
PlanRows<Src, Dst> plan_of(const TensorView& miss_src, const TensorView& miss_dst, const TensorView& miss_count) {
  return {rows_of<Src>(miss_src), rows_of<Dst>(miss_dst), strided<Dst>(miss_count)};
}

void check_hot_buffer(const char* op, int64_t hot_buffer_size, const TensorView& top_k_tokens) {
  if (hot_buffer_size < 1 || hot_buffer_size > kMaxHotSlots) {
    fail(op, "hot_buffer_size is ", hot_buffer_size, "; it needs 1 to ", kMaxHotSlots);
  }
  if (top_k_tokens.sizes[1] > hot_buffer_size) {
    fail(op, "top_k_tokens has ", top_k_tokens.sizes[1],
         " entries a row; it needs at most hot_buffer_size=", hot_buffer_size);
  }
}

void check_columns(const char* op, const char* name, const TensorView& t, int64_t columns, const char* why) {
  if (t.sizes[1] >= columns) return;
  fail(op, name, " has ", t.sizes[1], " columns; it needs ", columns, " or more (", why, ")");
}

}  // namespace

bool SwapInPools::moves_bytes() const {
  if (skip_io) return false;
  return std::any_of(groups.begin(), groups.end(), [](const BufferGroup& g) { return g.dst.row_bytes() > 0; });
}

SwapInRequest make_swap_in_request(const SwapInTensors& t, const SwapInOptions& options, DtypeName dtype_name) {
  constexpr const char* op = "swap_in";
  StateChecks state(op, "top_k_tokens", t.top_k_tokens, dtype_name);
  state.matrix("top_k_tokens", t.top_k_tokens, Ints::kInt32, -1, -1, Access::kRead);
  check_hot_buffer(op, options.hot_buffer_size, t.top_k_tokens);
  const int64_t batch = t.top_k_tokens.sizes[0];
  const int64_t top_k = t.top_k_tokens.sizes[1];
  state.matrix("device_buffer_tokens", t.device_buffer_tokens, Ints::kInt32, -1, -1, Access::kWritten);
  check_columns(op, "device_buffer_tokens", t.device_buffer_tokens, options.hot_buffer_size, "hot_buffer_size");
  const int64_t pool_slots = t.device_buffer_tokens.sizes[0];
  state.matrix("device_buffer_locs", t.device_buffer_locs, Ints::kInt32, pool_slots, -1, Access::kRead);
  check_columns(op, "device_buffer_locs", t.device_buffer_locs, options.hot_buffer_size + 1,
                "hot_buffer_size, and one for the newest token");
  state.matrix("host_cache_locs", t.host_cache_locs, Ints::kInt32OrInt64, pool_slots, -1, Access::kRead);
  const int64_t max_len = t.host_cache_locs.sizes[1];
  state.matrix("lru_slots", t.lru_slots, Ints::kInt16, pool_slots, options.hot_buffer_size, Access::kWritten);
  state.matrix("top_k_device_locs", t.top_k_device_locs, Ints::kInt32, batch, top_k, Access::kWritten);
  state.list("req_pool_indices", t.req_pool_indices, Ints::kInt32OrInt64, batch, Access::kRead);
  state.list("seq_lens", t.seq_lens, Ints::kInt32OrInt64, batch, Access::kRead);
  if (t.num_real_reqs) state.list("num_real_reqs", *t.num_real_reqs, Ints::kInt32, 1, Access::kRead);
  if (t.device_locs) state.matrix("device_locs", *t.device_locs, Ints::kInt32, pool_slots, max_len, Access::kRead);
  if (t.miss_src.has_value() != t.miss_count.has_value() || t.miss_dst.has_value() != t.miss_count.has_value()) {
    fail(op, "miss_src is ", t.miss_src ? "given" : "None", ", miss_dst is ", t.miss_dst ? "given" : "None",
         ", miss_count is ", t.miss_count ? "given" : "None", "; it needs all three or none");
  }
  if (t.miss_count) {
    state.matrix("miss_src", *t.miss_src, Ints::kInt64, batch, top_k, Access::kWritten);
    state.matrix("miss_dst", *t.miss_dst, Ints::kInt32, batch, top_k, Access::kWritten);
    state.list("miss_count", *t.miss_count, Ints::kInt32, batch, Access::kWritten);
  }

  SwapInRequest request;
  request.pools = make_pools(op, t.host_cache, t.device_buffer, "top_k_tokens", t.top_k_tokens, options, dtype_name);
  check_has_slots(op, request.pools, batch);
  state.check_apart(request.pools, t.device_buffer, t.host_cache);
  request.batch = batch;
  request.top_k = top_k;
  request.hot_buffer_size = options.hot_buffer_size;
  request.pool_slots = pool_slots;
  request.max_len = max_len;
  request.top_k_tokens = rows_of<const int32_t>(t.top_k_tokens);
  request.device_buffer_tokens = rows_of<int32_t>(t.device_buffer_tokens);
  request.device_buffer_locs = rows_of<const int32_t>(t.device_buffer_locs);
  request.host_cache_locs = {t.host_cache_locs.data, t.host_cache_locs.strides[0], t.host_cache_locs.is_int64};
  request.lru_slots = rows_of<int16_t>(t.lru_slots);
  request.top_k_device_locs = rows_of<int32_t>(t.top_k_device_locs);
  request.req_pool_indices = index_list(t.req_pool_indices);
  request.seq_lens = index_list(t.seq_lens);
  if (t.num_real_reqs) request.num_real_reqs = reinterpret_cast<const int32_t*>(t.num_real_reqs->data);
  if (t.device_locs) request.device_locs = rows_of<const int32_t>(*t.device_locs);
  if (t.miss_count) request.plan = plan_of<int64_t, int32_t>(*t.miss_src, *t.miss_dst, *t.miss_count);
  return request;
}

CopyPlannedRequest make_copy_planned_request(const CopyPlannedTensors& t, const SwapInOptions& options,
                                             DtypeName dtype_name) {
  constexpr const char* op = "copy_planned";
  StateChecks state(op, "miss_src", t.miss_src, dtype_name);
  state.matrix("miss_src", t.miss_src, Ints::kInt64, -1, -1, Access::kRead);
  const int64_t batch = t.miss_src.sizes[0];
  state.matrix("miss_dst", t.miss_dst, Ints::kInt32, batch, t.miss_src.sizes[1], Access::kRead);
  state.list("miss_count", t.miss_count, Ints::kInt32, batch, Access::kRead);
  state.list("num_real_reqs", t.num_real_reqs, Ints::kInt32, 1, Access::kRead);

  CopyPlannedRequest request;
  request.pools = make_pools(op, t.host_cache, t.device_buffer, "miss_src", t.miss_src, options, dtype_name);
  check_has_slots(op, request.pools, batch);
  state.check_apart(request.pools, t.device_buffer, t.host_cache);
  request.batch = batch;
  request.max_misses = t.miss_src.sizes[1];
  request.plan = plan_of<const int64_t, const int32_t>(t.miss_src, t.miss_dst, t.miss_count);
  request.num_real_reqs = reinterpret_cast<const int32_t*>(t.num_real_reqs.data);
  return request;
}

int64_t real_rows(const char* op, const int32_t* num_real_reqs, int64_t batch) {
  if (num_real_reqs == nullptr) return batch;
  if (*num_real_reqs < 0 || *num_real_reqs > batch) {
    fail(op, "num_real_reqs[0] is ", *num_real_reqs, "; it needs 0 to ", batch, ", the rows of the batch");
  }
  return *num_real_reqs;
}

}  // namespace kvio
