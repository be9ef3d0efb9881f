#include "request/fault_subject.h"

#include <algorithm>
#include <iterator>

namespace kvio {
namespace {

constexpr const char* kNotMoved = "That row was not moved; the others were";
constexpr const char* kNoLocation = "What it was needed for yields -1; the rest was served";

// In the order of FaultOp, kTransfer first.
constexpr FaultSubject kSubjects[] = {
    {"transfer", "dst_indices", false, kNotMoved},
    {"transfer", "src_indices", false, kNotMoved},
    {"transfer_staged", "dst_indices", false, kNotMoved},
    {"transfer_staged", "src_indices", false, kNotMoved},
    {"swap_in", "top_k_tokens", true, kNoLocation},
    {"swap_in", "host_cache_locs", true, kNoLocation},
    {"swap_in", "device_buffer_locs", true, kNoLocation},
    {"swap_in", "lru_slots", true, "That slot is not given away; the rest was served"},
    {"swap_in", "req_pool_indices", false, kNoLocation},
    {"swap_in", "device_locs", true, kNoLocation},
    {"copy_planned", "miss_src", true, kNotMoved},
    {"copy_planned", "miss_dst", true, kNotMoved},
    {"write_back", "dst_indices", false, kNotMoved},
    {"write_back", "src_indices", false, kNotMoved},
    {"restore", "dst_indices", false, kNotMoved},
    {"restore", "src_indices", false, kNotMoved},
    {"load_layers", "dst_indices", false, kNotMoved},
    {"load_layers", "src_indices", false, kNotMoved},
    {"load_layers", "epoch", false, "Waits for that epoch may have passed before its rows were in place", true},
    {"wait_layer", "flags", true, "It gave up after timeout_ms, and what follows it read rows that were not in place",
     true},
};

}  // namespace

FaultSubject fault_subject(int64_t number) {
  const int64_t last = static_cast<int64_t>(std::size(kSubjects)) - 1;
  return kSubjects[std::clamp<int64_t>(number - static_cast<int64_t>(FaultOp::kTransfer), 0, last)];
}

std::string fault_place(const FaultSubject& subject, int64_t position) {
  std::string place = std::string(subject.argument) + "[";
  if (subject.is_matrix) place += std::to_string(position >> 32) + ", ";
  return place + std::to_string(subject.is_matrix ? position & 0xffffffff : position) + "]";
}

std::string fault_need(const FaultSubject& subject, int64_t limit) {
  return subject.is_too_old ? std::to_string(limit) + " or more" : "0 to " + std::to_string(limit - 1);
}

}  // namespace kvio
