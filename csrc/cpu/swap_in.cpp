#include "cpu/swap_in.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "cpu/transfer.h"
#include "plan/swap_in_plan.h"

namespace kvio::cpu {
namespace {

constexpr int64_t kGrainEntries = 16 << 10;  // of top-k entries and slots: below this a second thread costs more

void copy_rows(const SwapInPools& pools, const PlannedMoves& moves) {
  if (!pools.moves_bytes() || moves.device_locs.empty()) return;
  TransferRequest request;
  request.groups = pools.groups;
  request.dst_indices = {moves.device_locs.data(), 1, true};
  request.src_indices = {moves.host_locs.data(), 1, true};
  request.num_indices = static_cast<int64_t>(moves.device_locs.size());
  transfer(request);
}

void write_state(const SwapInRequest& request, int64_t b, const SwapInRow& row) {
  std::copy(row.locs.begin(), row.locs.end(), request.top_k_device_locs.row(b));
  const int64_t slot_row = request.req_pool_indices.at(b);
  for (const Miss& miss : row.misses) request.device_buffer_tokens.at(slot_row, miss.slot) = miss.token;
  std::copy(row.order.begin(), row.order.end(), request.lru_slots.row(slot_row));
}

void write_plan(const RecordedPlan& plan, int64_t b, const SwapInRow& row) {
  for (size_t m = 0; m < row.misses.size(); ++m) {
    plan.miss_src.at(b, static_cast<int64_t>(m)) = row.misses[m].host_loc;
    plan.miss_dst.at(b, static_cast<int64_t>(m)) = row.misses[m].device_loc;
  }
  plan.miss_count.at(b) = static_cast<int32_t>(row.misses.size());
}

void write_padding(const SwapInRequest& request, int64_t b) {
  int32_t* locs = request.top_k_device_locs.row(b);
  std::fill(locs, locs + request.top_k, -1);
  if (request.plan) request.plan->miss_count.at(b) = 0;
}

// No exception leaves a task of the thread pool: the first row's is thrown when all are through.
std::vector<SwapInRow> resolve_rows(const SwapInRequest& request, int64_t num_rows, int64_t grain) {
  std::vector<SwapInRow> rows(static_cast<size_t>(num_rows));
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_rows));
  torch::stable::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      try {
        rows[static_cast<size_t>(b)] = resolve_row(request, b);
      } catch (...) {
        errors[static_cast<size_t>(b)] = std::current_exception();
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return rows;
}

}  // namespace

void swap_in(const SwapInRequest& request) {
  const int64_t num_real = real_rows("swap_in", request.num_real_reqs, request.batch);
  check_batch(request, num_real);
  const int64_t grain = std::max<int64_t>(1, kGrainEntries / (request.top_k + request.hot_buffer_size));
  const std::vector<SwapInRow> rows = resolve_rows(request, num_real, grain);

  PlannedMoves moves;
  for (int64_t b = 0; b < num_real; ++b) {
    const SwapInRow& row = rows[static_cast<size_t>(b)];
    write_state(request, b, row);
    if (request.plan) write_plan(*request.plan, b, row);
    for (const Miss& miss : row.misses) {
      moves.device_locs.push_back(miss.device_loc);
      moves.host_locs.push_back(miss.host_loc);
    }
  }
  for (int64_t b = num_real; b < request.batch; ++b) write_padding(request, b);
  copy_rows(request.pools, moves);
}

void copy_planned(const CopyPlannedRequest& request) {
  const int64_t num_real = real_rows("copy_planned", request.num_real_reqs, request.batch);
  copy_rows(request.pools, planned_moves(request, num_real));
}

}  // namespace kvio::cpu
