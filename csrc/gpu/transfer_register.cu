// Register copy: one warp moves up to 32 units (row pieces) of one buffer at a time. Each lane works out the addresses
// of one unit; then the warp walks the units' packages as one flat list, so that every lane is busy for any row size.
//
// What shaped it (H200, PCIe gen5 x16):
// * A load from page-locked host memory takes about 1.3 us. 46 GB/s from one CTA therefore wants about 100 KiB in
//   flight: 1024 threads with 8 independent 16-byte loads each, all issued before the first store.
// * Neighbouring lanes read neighbouring packages, so that a warp's load is whole 128-byte lines wherever rows allow.
// * Indices are read once per unit and one item ahead, since each is a dependent load.

#include "gpu/transfer_register.h"

#include <algorithm>
#include <cstdint>

#include "gpu/fault.h"
#include "gpu/fault_device.cuh"
#include "gpu/primitives.cuh"

namespace kvio::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kLoadsInFlight = 8;
constexpr int kMaxBuffers = 256;  // 128 layers x K and V
constexpr int kFewBuffers = 8;    // a one-layer call: small parameters launch faster

struct Side {
  FastDivide page_slots;
  int64_t page_stride;
  int64_t token_stride;
  int64_t piece_stride;
  int64_t index_stride;  // elements
  const void* indices;
  int64_t num_entries;  // valid index values are 0 .. num_entries - 1
  bool flat;
};

template <int kBuffers>
struct Params {
  char* dst_base[kBuffers];
  const char* src_base[kBuffers];
  Side dst;
  Side src;
  FastDivide units_per_index;
  FastDivide pieces;
  FastDivide packages;     // of one unit
  FastDivide inner_items;  // items are numbered outer * inner + inner
  FaultRecord* fault;
  int64_t first_position;  // of this launch in the caller's index lists
  int64_t slots_per_index;
  uint32_t num_units;  // of one buffer
  uint32_t units_per_item;
  uint32_t num_items;
  uint32_t remainder;  // bytes of a unit after its packages
  bool buffers_innermost;
  bool is_int64;
};

struct Item {
  uint32_t buffer;
  uint32_t first_unit;
};

template <class P>
__device__ __forceinline__ Item item_at(const P& p, uint32_t number) {
  const uint32_t outer = p.inner_items.quotient(number);
  const uint32_t inner = number - outer * p.inner_items.divisor;
  return p.buffers_innermost ? Item{inner, outer * p.units_per_item} : Item{outer, inner * p.units_per_item};
}

__device__ __forceinline__ int64_t load_index(const Side& side, bool is_int64, uint32_t position) {
  const int64_t at = position * side.index_stride;
  return is_int64 ? static_cast<const int64_t*>(side.indices)[at] : static_cast<const int32_t*>(side.indices)[at];
}

// Byte offset of slot, piece in a pool.
__device__ __forceinline__ int64_t offset_of(const Side& side, int64_t slot, uint32_t piece) {
  const int64_t in_row = piece * side.piece_stride;
  if (side.flat) return slot * side.token_stride + in_row;
  const uint32_t page = side.page_slots.quotient(static_cast<uint32_t>(slot));
  const uint32_t token = static_cast<uint32_t>(slot) - page * side.page_slots.divisor;
  return page * side.page_stride + token * side.token_stride + in_row;
}

// One unit's index entries, fetched an item ahead of their use.
struct UnitIndex {
  int64_t dst;
  int64_t src;
};

template <class P>
__device__ __forceinline__ UnitIndex fetch_index(const P& p, const Item& item, uint32_t lane) {
  const uint32_t unit = item.first_unit + lane;
  if (lane >= p.units_per_item || unit >= p.num_units) return {-1, -1};
  const uint32_t position = p.units_per_index.quotient(unit);
  return {load_index(p.dst, p.is_int64, position), load_index(p.src, p.is_int64, position)};
}

template <int kWidth, int kBuffers>
__global__ void __launch_bounds__(kThreads, 1) register_copy(const __grid_constant__ Params<kBuffers> p) {
  using Package = typename PackageOf<kWidth>::type;
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t num_warps = gridDim.x * (kThreads / 32);
  uint32_t number = blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5);
  if (number >= p.num_items) return;
  Item item = item_at(p, number);
  UnitIndex index = fetch_index(p, item, lane);

  while (true) {
    // This lane's unit: addresses, or null when there is none or its index is outside the pool.
    const char* unit_src = nullptr;
    char* unit_dst = nullptr;
    const uint32_t unit = item.first_unit + lane;
    if (lane < p.units_per_item && unit < p.num_units) {
      const uint32_t position = p.units_per_index.quotient(unit);
      const bool dst_ok = static_cast<uint64_t>(index.dst) < static_cast<uint64_t>(p.dst.num_entries);
      const bool src_ok = static_cast<uint64_t>(index.src) < static_cast<uint64_t>(p.src.num_entries);
      if (dst_ok && src_ok) {
        const uint32_t in_index = unit - position * p.units_per_index.divisor;
        const uint32_t token = p.pieces.quotient(in_index);
        const uint32_t piece = in_index - token * p.pieces.divisor;
        unit_dst = p.dst_base[item.buffer] + offset_of(p.dst, index.dst * p.slots_per_index + token, piece);
        unit_src = p.src_base[item.buffer] + offset_of(p.src, index.src * p.slots_per_index + token, piece);
      } else if (!dst_ok) {
        record_fault(p.fault, kFaultTransferDst, p.first_position + position, index.dst, p.dst.num_entries);
      } else {
        record_fault(p.fault, kFaultTransferSrc, p.first_position + position, index.src, p.src.num_entries);
      }
    }
    const uint32_t units = min(p.units_per_item, p.num_units - item.first_unit);

    number += num_warps;
    const bool more = number < p.num_items;
    if (more) {
      item = item_at(p, number);
      index = fetch_index(p, item, lane);
    }

    const uint32_t total = units * p.packages.divisor;
    for (uint32_t first = 0; first < total; first += 32 * kLoadsInFlight) {
      Package held[kLoadsInFlight];
      char* to[kLoadsInFlight];
#pragma unroll
      for (int u = 0; u < kLoadsInFlight; ++u) {
        const uint32_t i = first + u * 32 + lane;
        const uint32_t row = p.packages.quotient(i);
        const uint32_t column = i - row * p.packages.divisor;
        const uint32_t from_lane = row & 31;
        const char* from = shuffle_pointer(unit_src, from_lane) + column * kWidth;
        to[u] = shuffle_pointer(unit_dst, from_lane);
        if (i >= total) to[u] = nullptr;
        if (to[u] != nullptr) {
          held[u] = load_once<Package>(from);
          to[u] += column * kWidth;
        }
      }
#pragma unroll
      for (int u = 0; u < kLoadsInFlight; ++u) {
        if (to[u] != nullptr) store_once(to[u], held[u]);
      }
    }
    if (p.remainder != 0 && unit_dst != nullptr) {
      const uint32_t done = p.packages.divisor * kWidth;
      copy_remainder<kWidth>(unit_dst + done, unit_src + done, p.remainder);
    }
    if (!more) return;
  }
}

Side make_side(const PoolView& view, const IndexList& indices, int64_t first, int64_t slots_per_index) {
  Side side{};
  side.flat = view.is_flat();
  side.page_slots = FastDivide(static_cast<uint32_t>(view.page_slots));
  side.page_stride = view.page_stride;
  side.token_stride = view.token_stride;
  side.piece_stride = view.num_pieces > 1 ? view.piece_stride : 0;
  side.index_stride = indices.stride;
  const int64_t element = indices.is_int64 ? 8 : 4;
  side.indices = static_cast<const char*>(indices.data) + first * indices.stride * element;
  side.num_entries = view.slots / slots_per_index;
  return side;
}

template <int kWidth, int kBuffers>
void launch(const Params<kBuffers>& params, int64_t num_blocks, Stream stream) {
  register_copy<kWidth, kBuffers><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(params);
}

template <int kBuffers>
void launch_buffers(const TransferRequest& request, const BufferGroup& group, const RegisterPlan& plan, int64_t first,
                    size_t first_buffer, size_t count, FaultRecord* fault, Stream stream) {
  Params<kBuffers> p;
  for (size_t b = 0; b < count; ++b) {
    p.dst_base[b] = group.dst_base[first_buffer + b];
    p.src_base[b] = group.src_base[first_buffer + b];
  }
  p.dst = make_side(plan.dst, request.dst_indices, first, plan.slots_per_index);
  p.src = make_side(plan.src, request.src_indices, first, plan.slots_per_index);
  p.pieces = FastDivide(static_cast<uint32_t>(plan.dst.num_pieces));
  p.units_per_index = FastDivide(static_cast<uint32_t>(plan.dst.num_pieces * plan.slots_per_index));
  p.packages = FastDivide(static_cast<uint32_t>(plan.packages));
  p.fault = fault;
  p.first_position = first;
  p.slots_per_index = plan.slots_per_index;
  p.num_units = static_cast<uint32_t>(plan.units);
  p.units_per_item = static_cast<uint32_t>(plan.units_per_item);
  const uint32_t items_per_buffer = (p.num_units + p.units_per_item - 1) / p.units_per_item;
  p.num_items = items_per_buffer * static_cast<uint32_t>(count);
  p.remainder = static_cast<uint32_t>(plan.remainder);
  p.buffers_innermost = plan.buffers_innermost;
  p.inner_items = FastDivide(plan.buffers_innermost ? static_cast<uint32_t>(count) : items_per_buffer);
  p.is_int64 = request.dst_indices.is_int64;
  switch (plan.package_bytes) {
    case 16: return launch<16>(p, plan.num_blocks, stream);
    case 8: return launch<8>(p, plan.num_blocks, stream);
    case 4: return launch<4>(p, plan.num_blocks, stream);
    case 2: return launch<2>(p, plan.num_blocks, stream);
    default: return launch<1>(p, plan.num_blocks, stream);
  }
}

}  // namespace

void launch_register(const TransferRequest& request, const BufferGroup& group, int sm_count, int device, Stream stream) {
  FaultRecord* fault = fault_record("transfer", device);
  const int64_t step = max_indices_per_launch(request, group);
  for (int64_t first = 0; first < request.num_indices; first += step) {
    const int64_t range = std::min(step, request.num_indices - first);
    const RegisterPlan plan = make_register_plan(request, group, range, sm_count);
    const size_t buffers = group.dst_base.size();
    for (size_t b = 0; b < buffers; b += kMaxBuffers) {
      const size_t count = std::min<size_t>(kMaxBuffers, buffers - b);
      if (count <= kFewBuffers) {
        launch_buffers<kFewBuffers>(request, group, plan, first, b, count, fault, stream);
      } else {
        launch_buffers<kMaxBuffers>(request, group, plan, first, b, count, fault, stream);
      }
      check("transfer", "launching the register kernel", cudaGetLastError());
    }
  }
}

}  // namespace kvio::gpu
