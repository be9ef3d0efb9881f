#include "plan/rates.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "error.h"

namespace kvio {
namespace {

// One H200, PCIe gen5 x16, driver 580, where contiguous copies reach 55 both ways and SM kernels at most 51 H2D and 52
// D2H: `python -m sgl_kvio calibrate` (host pool of 4 GiB, flows of 128 MiB calls) and, where bench/crossover.py found
// less on another machine, what lies between. Columns: runs of 512 B, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 KiB, 1, 2,
// 4 MiB. Runs of 512 B are single rows, which calls of that size move in host-address
// order (tma: those of smaller calls, which are not). Runs of 1 to 8 KiB (D2H
// 16) in random order over 4 GiB wait for address translation, and two CTAs of the ring have too few of them under way.
// copy_engine at 32 KiB is bound by the CPU that submits: 31 to 47 on five machines.
const RateTable kBuiltIn = {
    {
        {{{49.5, 48.5, 50.1, 50.3, 50.4, 50.4, 50.4, 50.6, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7},
          {50.0, 50.4, 50.4, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7}},
         {{50.0, 48.5, 51.5, 51.5, 51.7, 51.8, 51.8, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0},
          {48.0, 50.6, 50.9, 51.8, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0, 52.0}}},
        {{{28.1, 32.5, 35.0, 35.0, 36.0, 50.2, 50.5, 50.5, 50.6, 50.6, 50.7, 50.7, 50.7, 50.7},
          {48.0, 49.9, 50.0, 46.8, 47.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7, 50.7}},
         {{20.4, 23.0, 26.5, 37.5, 38.5, 46.0, 51.8, 52.0, 52.0, 52.0, 52.0, 52.1, 52.1, 52.1},
          {28.9, 30.7, 31.6, 43.5, 46.1, 51.4, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2, 52.2}}},
        {{{0.8, 1.7, 3.4, 7.0, 13.0, 27.5, 40.0, 52.8, 53.4, 53.5, 53.6, 54.0, 54.3, 54.3},
          {0.8, 1.8, 3.7, 7.5, 13.5, 30.0, 45.0, 53.4, 53.8, 54.2, 54.4, 54.5, 54.6, 54.6}},
         {{0.9, 2.2, 4.0, 8.0, 13.0, 24.0, 36.0, 48.5, 50.4, 52.3, 53.4, 54.1, 54.5, 54.8},
          {0.9, 2.1, 4.3, 8.5, 14.5, 30.0, 45.0, 53.0, 53.5, 53.8, 54.0, 54.3, 54.6, 54.8}}},
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
