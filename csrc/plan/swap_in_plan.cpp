#include "plan/swap_in_plan.h"

#include <algorithm>
#include <unordered_map>

#include "error.h"

namespace kvio {
namespace {

constexpr const char* kOp = "swap_in";
constexpr int32_t kNone = -1;

// A short request keeps every token in the slot of its position. With device_locs there are no short ones: its tokens
// may lie in the regular pool.
bool is_short(const SwapInRequest& request, int64_t seq_len) {
  return !request.device_locs.has_value() && seq_len <= request.hot_buffer_size;
}

// What an entry of a location tensor has to be below, and why.
struct Pool {
  const char* name;
  SlotLimit limit;
};

void check_location(const char* op, const char* argument, int64_t row, int64_t column, int64_t value,
                    const Pool& pool) {
  if (value >= 0 && value < pool.limit.slots) return;
  if (pool.limit.slots == INT64_MAX) {
    fail(op, argument, "[", row, ", ", column, "] is ", value, "; it needs 0 or more");
  }
  fail(op, argument, "[", row, ", ", column, "] is ", value, "; it needs 0 to ", pool.limit.slots - 1, " (", pool.name,
       "[", pool.limit.position, "] has ", pool.limit.slots, " token slots)");
}

// The distinct tokens of one row that need a slot of the hot buffer, in the order of their first entries.
struct Wanted {
  std::vector<int32_t> tokens;
  std::vector<int32_t> slots;                    // of each, kNone until one is found
  std::unordered_map<int32_t, size_t> position;  // token -> position in both

  size_t add(int32_t token) {
    const auto [it, fresh] = position.emplace(token, tokens.size());
    if (fresh) {
      tokens.push_back(token);
      slots.push_back(kNone);
    }
    return it->second;
  }
};

// The slots of one request in the order in which they were used, split by whether their token is wanted.
struct Slots {
  std::vector<int16_t> evictable;
  std::vector<int16_t> hits;
};

class RowResolver {
 public:
  RowResolver(const SwapInRequest& request, int64_t b)
      : request_(request),
        b_(b),
        slot_row_(request.req_pool_indices.at(b)),
        seq_len_(request.seq_lens.at(b)),
        device_pool_{"device_buffer", request.pools.device_limit},
        host_pool_{"host_cache", request.pools.host_limit} {
    row_.locs.assign(static_cast<size_t>(request.top_k), kNone);
  }

  SwapInRow resolve() {
    if (is_short(request_, seq_len_)) {
      resolve_directly();
      return std::move(row_);
    }
    classify();
    if (wanted_.tokens.empty()) return std::move(row_);
    const Slots slots = walk_slots();
    const size_t used = fill_misses(slots.evictable);
    row_.order.reserve(slots.evictable.size() + slots.hits.size());
    const auto first_unused = slots.evictable.begin() + static_cast<ptrdiff_t>(used);
    row_.order.insert(row_.order.end(), first_unused, slots.evictable.end());
    row_.order.insert(row_.order.end(), slots.evictable.begin(), first_unused);
    row_.order.insert(row_.order.end(), slots.hits.begin(), slots.hits.end());
    for (size_t i = 0; i < row_.locs.size(); ++i) {
      if (entry_[i] != kNone) row_.locs[i] = slot_location(wanted_.slots[static_cast<size_t>(entry_[i])]);
    }
    return std::move(row_);
  }

 private:
  int32_t token(size_t i) const { return request_.top_k_tokens.at(b_, static_cast<int64_t>(i)); }

  void check_token(size_t i, int64_t limit) const {
    if (token(i) < limit) return;
    fail(kOp, "top_k_tokens[", b_, ", ", i, "] is ", token(i), "; it needs 0 to ", limit - 1,
         ", or a negative entry for none (seq_lens[", b_, "] is ", seq_len_, ", host_cache_locs has ", request_.max_len,
         " columns)");
  }

  // A location that is given out.
  int32_t slot_location(int64_t slot) const {
    const int32_t loc = request_.device_buffer_locs.at(slot_row_, slot);
    check_location(kOp, "device_buffer_locs", slot_row_, slot, loc, device_pool_);
    return loc;
  }

  void resolve_directly() {
    const size_t count = static_cast<size_t>(std::min(seq_len_, request_.top_k));
    for (size_t i = 0; i < count; ++i) {
      if (token(i) < 0) continue;
      check_token(i, seq_len_);
      row_.locs[i] = slot_location(token(i));
    }
  }

  // Entries that need no slot of the hot buffer get their locations; the others become wanted.
  void classify() {
    entry_.assign(row_.locs.size(), kNone);
    const int64_t limit = std::min(seq_len_, request_.max_len);
    for (size_t i = 0; i < row_.locs.size(); ++i) {
      if (token(i) < 0) continue;
      check_token(i, limit);
      const int32_t passed = request_.device_locs ? request_.device_locs->at(slot_row_, token(i)) : kNone;
      if (passed >= 0) {
        check_location(kOp, "device_locs", slot_row_, token(i), passed, device_pool_);
        row_.locs[i] = passed;
      } else if (token(i) == seq_len_ - 1) {
        row_.locs[i] = slot_location(request_.hot_buffer_size);
      } else {
        entry_[i] = static_cast<int32_t>(wanted_.add(token(i)));
      }
    }
  }

  Slots walk_slots() {
    Slots slots;
    std::vector<bool> seen(static_cast<size_t>(request_.hot_buffer_size), false);
    for (int64_t j = 0; j < request_.hot_buffer_size; ++j) {
      const int16_t slot = request_.lru_slots.at(slot_row_, j);
      if (slot < 0 || slot >= request_.hot_buffer_size || seen[static_cast<size_t>(slot)]) {
        fail(kOp, "lru_slots[", slot_row_, ", ", j, "] is ", slot, "; it needs 0 to ", request_.hot_buffer_size - 1,
             ", each once in a row");
      }
      seen[static_cast<size_t>(slot)] = true;
      const int32_t resident = request_.device_buffer_tokens.at(slot_row_, slot);
      const auto it = wanted_.position.find(resident);  // an empty slot's -1 is never wanted
      if (it == wanted_.position.end()) {
        slots.evictable.push_back(slot);
        continue;
      }
      int32_t& found = wanted_.slots[it->second];
      if (found != kNone) {
        fail(kOp, "device_buffer_tokens[", slot_row_, ", ", slot, "] is ", resident, ", as device_buffer_tokens[",
             slot_row_, ", ", found, "] is; it needs a token once in a row");
      }
      found = slot;
      slots.hits.push_back(slot);
    }
    return slots;
  }

  // Returns how many evictable slots are taken: there are enough, since no row selects more tokens than it has slots.
  size_t fill_misses(const std::vector<int16_t>& evictable) {
    for (size_t w = 0; w < wanted_.tokens.size(); ++w) {
      if (wanted_.slots[w] != kNone) continue;
      Miss miss;
      miss.token = wanted_.tokens[w];
      miss.slot = evictable[row_.misses.size()];
      miss.device_loc = slot_location(miss.slot);
      miss.host_loc = request_.host_cache_locs.at(slot_row_, miss.token);
      check_location(kOp, "host_cache_locs", slot_row_, miss.token, miss.host_loc, host_pool_);
      wanted_.slots[w] = miss.slot;
      row_.misses.push_back(miss);
    }
    return row_.misses.size();
  }

  const SwapInRequest& request_;
  const int64_t b_;
  const int64_t slot_row_;  // of the state tensors
  const int64_t seq_len_;
  const Pool device_pool_;
  const Pool host_pool_;
  Wanted wanted_;
  std::vector<int32_t> entry_;  // per top-k entry: its token's position in wanted_, kNone where it needs no slot
  SwapInRow row_;
};

}  // namespace

void check_batch(const SwapInRequest& request, int64_t num_rows) {
  std::unordered_map<int64_t, int64_t> owner;  // of each hot buffer that the call works on
  for (int64_t b = 0; b < num_rows; ++b) {
    const int64_t slot_row = request.req_pool_indices.at(b);
    if (slot_row < 0 || slot_row >= request.pool_slots) {
      fail(kOp, "req_pool_indices[", b, "] is ", slot_row, "; it needs 0 to ", request.pool_slots - 1,
           ", a row of the state tensors");
    }
    const int64_t seq_len = request.seq_lens.at(b);
    if (seq_len < 0) fail(kOp, "seq_lens[", b, "] is ", seq_len, "; it needs 0 or more");
    if (is_short(request, seq_len)) continue;
    const auto [it, fresh] = owner.emplace(slot_row, b);
    if (!fresh) {
      fail(kOp, "req_pool_indices[", b, "] is ", slot_row, ", as req_pool_indices[", it->second,
           "] is; it needs a hot buffer once in a batch");
    }
  }
}

SwapInRow resolve_row(const SwapInRequest& request, int64_t b) { return RowResolver(request, b).resolve(); }

PlannedMoves planned_moves(const CopyPlannedRequest& request, int64_t num_rows) {
  constexpr const char* op = "copy_planned";
  const Pool device_pool{"device_buffer", request.pools.device_limit};
  const Pool host_pool{"host_cache", request.pools.host_limit};
  PlannedMoves moves;
  for (int64_t b = 0; b < num_rows; ++b) {
    const int64_t count = request.plan.miss_count.at(b);
    if (count < 0 || count > request.max_misses) {
      fail(op, "miss_count[", b, "] is ", count, "; it needs 0 to ", request.max_misses, ", the columns of miss_src");
    }
    for (int64_t m = 0; m < count; ++m) {
      moves.host_locs.push_back(request.plan.miss_src.at(b, m));
      moves.device_locs.push_back(request.plan.miss_dst.at(b, m));
      check_location(op, "miss_src", b, m, moves.host_locs.back(), host_pool);
      check_location(op, "miss_dst", b, m, moves.device_locs.back(), device_pool);
    }
  }
  return moves;
}

}  // namespace kvio
