#include "plan/rates.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "error.h"

namespace kvio {
namespace {

// One H200, PCIe gen5 x16, driver 580; contiguous copies reach 54.5 H2D and 55.0 D2H there, SM kernels at most 50.8 and
// 52.4. Columns: runs of 512 B, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 KiB, 1, 2, 4 MiB. Pools of 1 to 4 GiB.
//
// register: 4 CTAs, rows of 512 to 2048 bytes measured (scattered tokens and pages), and runs of 32 KiB.
// tma: 2 CTAs, 3 where rows are apart H2D. Measured: scattered rows of 512, 1152 and 2048 B, pages of 32 KiB, 2-D boxes
// of 512, 1024 and 2048 B rows. Scattered rows D2H are taken to be as slow as H2D.
// copy_engine: one call in sub-batches on one stream, entries of 4, 16, 32, 64, 128, 512 KiB measured, 8 and 256 KiB in
// between; 2 MiB from one batch. Shorter entries by their cost, 0.65 us each. Rows apart are entries of one row.
const RateTable kBuiltIn = {
    {
        {{{50.2, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7},
          {50.3, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7}},
         {{52.0, 52.1, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2},
          {52.1, 51.7, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0}}},
        {{{28.1, 32.4, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8, 50.8},
          {49.6, 49.0, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8, 49.8}},
         {{28.1, 32.4, 50.8, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2},
          {52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2}}},
        {{{0.8, 1.6, 3.1, 6.1, 9.0, 12.7, 45.3, 49.9, 52.0, 53.0, 53.7, 53.7, 53.7, 53.7},
          {0.8, 1.6, 3.1, 6.1, 9.0, 12.7, 45.3, 49.9, 52.0, 53.0, 53.7, 53.7, 53.7, 53.7}},
         {{1.0, 2.0, 3.9, 7.9, 12.4, 19.4, 41.6, 45.9, 49.4, 51.6, 53.2, 53.5, 53.9, 53.9},
          {1.0, 2.0, 3.9, 7.9, 12.4, 19.4, 41.6, 45.9, 49.4, 51.6, 53.2, 53.5, 53.9, 53.9}}},
    },
    true};

std::atomic<const RateTable*> g_current{&kBuiltIn};

// Tables of earlier calls stay: a thread may be reading one.
void keep(std::unique_ptr<const RateTable> table) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unique_ptr<const RateTable>>();
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(table));
}

using Row = const double (&)[kNumRateBuckets];

Row row_of(const RateTable& table, Backend backend, Direction direction, bool rows_apart) {
  const int b = static_cast<int>(backend) - static_cast<int>(Backend::kRegister);
  return table.gbps[b][direction == Direction::kDeviceToHost ? 1 : 0][rows_apart ? 1 : 0];
}

}  // namespace

const RateTable& built_in_rates() { return kBuiltIn; }

const RateTable& current_rates() { return *g_current.load(std::memory_order_acquire); }

void set_rates(const char* op, const std::vector<double>& rates) {
  if (rates.empty()) {
    g_current.store(&kBuiltIn, std::memory_order_release);
    return;
  }
  if (static_cast<int64_t>(rates.size()) != kNumRates) {
    fail(op, "rates has ", rates.size(), " entries; it needs ", kNumRates, ", or none for the built-in table");
  }
  for (size_t i = 0; i < rates.size(); ++i) {
    if (!std::isfinite(rates[i]) || rates[i] < 0) {
      fail(op, "rates[", i, "] is ", rates[i], "; it needs GB/s, 0 or more");
    }
  }
  auto table = std::make_unique<RateTable>();
  std::copy(rates.begin(), rates.end(), &table->gbps[0][0][0][0]);
  table->built_in = false;
  g_current.store(table.get(), std::memory_order_release);
  keep(std::move(table));
}

double rate_of(const RateTable& table, Backend backend, Direction direction, bool rows_apart, double run_bytes) {
  Row row = row_of(table, backend, direction, rows_apart);
  const double steps = run_bytes / static_cast<double>(kShortestRunBytes);
  if (steps <= 1) return row[0] * std::max(steps, 0.0);
  int below = 0;
  const double fraction = 2 * std::frexp(steps, &below) - 1;  // steps = 2^(below - 1) * (1 + fraction)
  --below;
  if (below >= kNumRateBuckets - 1) return row[kNumRateBuckets - 1];
  return row[below] + (row[below + 1] - row[below]) * fraction;
}

double link_rate(const RateTable& table, Direction direction) {
  double best = 0;
  for (const Backend backend : {Backend::kRegister, Backend::kTma, Backend::kCopyEngine}) {
    Row row = row_of(table, backend, direction, false);
    best = std::max(best, *std::max_element(row, row + kNumRateBuckets));
  }
  return best;
}

}  // namespace kvio
