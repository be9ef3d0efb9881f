// From the number of a unit (one piece of one slot) to its two addresses: what all kernels that move units share.
#pragma once

#include <cstdint>

#include "gpu/addressing.cuh"
#include "gpu/fault.h"
#include "gpu/fault_device.cuh"

namespace kvio::gpu {

// Launch parameters common to such kernels; theirs derive from it.
struct UnitParams {
  Side dst;
  Side src;
  FastDivide units_per_index;
  FastDivide pieces;
  FaultRecord* fault;
  int64_t fault_op;
  const int32_t* caller_positions;  // see TransferRequest
  int64_t position_base;            // of the request's lists in the caller's
  int64_t first_position;           // of this launch in the caller's index lists
  int64_t slots_per_index;
  uint32_t num_units;  // of one buffer
  uint32_t unit_bytes;
  bool buffers_innermost;
  bool is_int64;
};

// The parameters of a launch over `plan` (RegisterPlan, TmaPlan) that begins at index position `first`.
template <class Plan>
void fill_unit_params(const TransferRequest& request, const Plan& plan, int64_t first, FaultRecord* fault,
                      UnitParams* p) {
  p->dst = make_side(plan.dst, request.dst_indices, first, plan.slots_per_index);
  p->src = make_side(plan.src, request.src_indices, first, plan.slots_per_index);
  p->units_per_index = FastDivide(static_cast<uint32_t>(plan.dst.num_pieces * plan.slots_per_index));
  p->pieces = FastDivide(static_cast<uint32_t>(plan.dst.num_pieces));
  p->fault = fault;
  p->fault_op = static_cast<int64_t>(request.fault_op);
  p->caller_positions = request.caller_positions;
  p->position_base = request.first_position;
  p->first_position = first;
  p->slots_per_index = plan.slots_per_index;
  p->num_units = static_cast<uint32_t>(plan.units);
  p->unit_bytes = static_cast<uint32_t>(plan.dst.piece_bytes);
  p->buffers_innermost = plan.buffers_innermost;
  p->is_int64 = request.dst_indices.is_int64;
}

// Position in the caller's index lists of entry `position` of this launch.
__device__ __forceinline__ int64_t caller_position(const UnitParams& p, uint32_t position) {
  const int64_t at = p.first_position + position;
  return p.position_base + (p.caller_positions != nullptr ? p.caller_positions[at] : at);
}

struct UnitPlace {
  int64_t dst;  // bytes from the start of any buffer
  int64_t src;
  int64_t src_slot;
  uint32_t piece;
};

// Where `unit` lies, whose index entries are given; false, and a fault recorded, when one is outside its pool.
__device__ __forceinline__ bool find_unit(const UnitParams& p, uint32_t unit, int64_t dst_index, int64_t src_index,
                                          UnitPlace* place) {
  const uint32_t position = p.units_per_index.quotient(unit);
  const bool dst_ok = is_inside(p.dst, dst_index);
  const bool src_ok = is_inside(p.src, src_index);
  if (dst_ok && src_ok) {
    const uint32_t in_index = unit - position * p.units_per_index.divisor;
    const uint32_t token = p.pieces.quotient(in_index);
    place->piece = in_index - token * p.pieces.divisor;
    place->src_slot = src_index * p.slots_per_index + token;
    place->dst = offset_of(p.dst, dst_index * p.slots_per_index + token, place->piece);
    place->src = offset_of(p.src, place->src_slot, place->piece);
    return true;
  }
  if (!dst_ok) {
    record_fault(p.fault, p.fault_op, caller_position(p, position), dst_index, p.dst.num_entries);
  } else {
    record_fault(p.fault, p.fault_op + 1, caller_position(p, position), src_index, p.src.num_entries);
  }
  return false;
}

}  // namespace kvio::gpu
