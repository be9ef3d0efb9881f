// The steps by which a CTA resolves a swap-in (gpu/swap_in_resolve.h), on the CPU: in every step all threads one after
// the other, in an order drawn anew.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gpu/swap_in_resolve.h"

namespace py = pybind11;

namespace kvio {
namespace {

using gpu::Job;
using gpu::ResolveParams;
using gpu::SwapInArgument;
using gpu::Thread;
using gpu::Workspace;

using Fault = std::tuple<int, int64_t, int64_t, int64_t>;  // argument, position, value, limit

struct HostEnv {
  const ResolveParams* p;
  const Job* job;
  std::vector<Fault>* faults;

  int32_t claim(int32_t* at, int32_t expected, int32_t value) const {
    const int32_t before = *at;
    if (before == expected) *at = value;
    return before;
  }
  void raise(int32_t* at, int32_t most) const { *at = std::max(*at, most); }
  void note(SwapInArgument argument, int32_t column, int64_t value) const {
    faults->emplace_back(static_cast<int>(argument), gpu::fault_position(*job, argument, column), value,
                         gpu::fault_limit(*p, *job, argument));
  }
};

// Threads of a CTA, and their order in each step.
class Cta {
 public:
  Cta(int32_t count, uint64_t seed) : order_(static_cast<size_t>(count)), random_(seed) {
    std::iota(order_.begin(), order_.end(), 0);
  }

  template <class Step>
  void all(Step step) {
    std::shuffle(order_.begin(), order_.end(), random_);
    const int32_t count = static_cast<int32_t>(order_.size());
    for (const int32_t number : order_) step(Thread{number, count});
  }

 private:
  std::vector<int32_t> order_;
  std::mt19937_64 random_;
};

using Address = std::tuple<uint64_t, int64_t>;  // of entry 0, and entries from row to row

template <class T>
gpu::ShortRows<T> rows_at(const Address& at) {
  return {reinterpret_cast<T*>(std::get<0>(at)), static_cast<uint32_t>(std::get<1>(at) * sizeof(T))};
}

// Of the threads before each; `all` of all.
std::vector<int32_t> sums_before(const std::vector<int32_t>& counts, int32_t* all) {
  std::vector<int32_t> before;
  *all = 0;
  for (const int32_t count : counts) {
    before.push_back(*all);
    *all += count;
  }
  return before;
}

int32_t resolve(const ResolveParams& p, const Workspace& w, const Job& job, int32_t threads, uint64_t seed,
                std::vector<Fault>* faults) {
  HostEnv env{&p, &job, faults};
  Cta cta(threads, seed);
  const size_t count = static_cast<size_t>(threads);
  std::vector<gpu::First> first(count);
  std::vector<int32_t> counts(count);
  const auto of = [](auto& values, const Thread& t) { return &values[static_cast<size_t>(t.number)]; };
  cta.all([&](const Thread& t) {
    gpu::begin(p, job.batch_row, t, of(first, t));
    gpu::clear(p, w, t);
    gpu::fetch(p, job, t, of(first, t));
  });
  cta.all([&](const Thread& t) { gpu::insert(env, p, w, job, t, *of(first, t)); });
  if (*w.repeated != 0) cta.all([&](const Thread& t) { gpu::settle(env, p, w, t); });
  cta.all([&](const Thread& t) { gpu::mark(env, p, w, job, t, *of(first, t)); });
  int32_t misses = 0;
  cta.all([&](const Thread& t) { *of(counts, t) = gpu::find_misses(env, p, w, job, t); });
  std::vector<int32_t> misses_before = sums_before(counts, &misses);
  cta.all([&](const Thread& t) { gpu::list_misses(p, w, t, *of(misses_before, t)); });
  int32_t hits = 0;
  cta.all([&](const Thread& t) { *of(counts, t) = gpu::count_hits(env, p, w, job, t, *of(first, t)); });
  std::vector<int32_t> hits_before = sums_before(counts, &hits);
  const gpu::Use use = gpu::use_of(p, hits, misses);
  cta.all([&](const Thread& t) { gpu::place(p, w, t, *of(hits_before, t), use); });
  cta.all([&](const Thread& t) { gpu::assign(env, p, w, job, t, misses, use); });
  if (*w.repeated != 0) {
    cta.all([&](const Thread& t) { gpu::tell(p, w, t, *of(misses_before, t)); });
    if (job.records) cta.all([&](const Thread& t) { gpu::repeat(p, w, job, t); });
  }
  return misses;
}

}  // namespace

void bind_swap_in_steps(py::module_& m) {
  m.def(
      "resolve_swap_in_row",
      [](const Address& top_k_tokens, const Address& tokens, const Address& locs, const Address& host_locs,
         bool wide_host_locs, const Address& lru, const Address& out, const Address& device_locs,
         const Address& miss_src, const Address& miss_dst, const Address& miss_count, int64_t host_slots,
         int64_t device_slots, int32_t max_len, int32_t top_k, int32_t hot_slots, int32_t batch_row, uint32_t request,
         int32_t seq_len, bool records, int32_t threads, int64_t most_bytes, uint64_t seed) {
        ResolveParams p{};
        p.top_k_tokens = rows_at<const int32_t>(top_k_tokens);
        p.device_buffer_tokens = rows_at<int32_t>(tokens);
        p.device_buffer_locs = rows_at<const int32_t>(locs);
        p.host_is_int64 = wide_host_locs;
        p.host_cache_locs = rows_at<const char>(host_locs);
        p.host_cache_locs.stride *= wide_host_locs ? 8 : 4;
        p.lru_slots = rows_at<int16_t>(lru);
        p.top_k_device_locs = rows_at<int32_t>(out);
        p.device_locs = rows_at<const int32_t>(device_locs);
        p.miss_src = rows_at<int64_t>(miss_src);
        p.miss_dst = rows_at<int32_t>(miss_dst);
        p.miss_count = {reinterpret_cast<int32_t*>(std::get<0>(miss_count)), std::get<1>(miss_count)};
        p.host_slots = host_slots;
        p.device_slots = static_cast<uint32_t>(std::min<int64_t>(device_slots, int64_t{1} << 31));
        p.max_len = max_len;
        p.top_k = top_k;
        p.hot_slots = hot_slots;
        p.layout = gpu::lay_out_workspace(top_k, hot_slots, threads, most_bytes, 0);
        gpu::find_packs(&p);
        std::vector<char> memory(static_cast<size_t>(p.layout.bytes) + 16, static_cast<char>(0x5a));
        char* base = memory.data() + (16 - reinterpret_cast<uint64_t>(memory.data()) % 16) % 16;
        const Workspace w = gpu::workspace_at(base, p.layout);
        const Job job = gpu::make_job(p, batch_row, request, seq_len, records);
        std::vector<Fault> faults;
        std::vector<std::tuple<int64_t, int32_t>> moves;
        if (!gpu::is_long(p, seq_len)) {
          HostEnv env{&p, &job, &faults};
          for (int32_t i = 0; i < top_k; ++i) {
            gpu::row_of(p.top_k_device_locs, batch_row)[i] = gpu::direct_result(env, p, job, i);
          }
          gpu::record_misses(p, batch_row, 0);
          return std::make_tuple(moves, faults);
        }
        const int32_t misses = resolve(p, w, job, threads, seed, &faults);
        for (int32_t miss = 0; miss < misses; ++miss) moves.emplace_back(w.miss_src[miss], w.miss_dst[miss]);
        return std::make_tuple(moves, faults);
      },
      py::kw_only(), py::arg("top_k_tokens"), py::arg("tokens"), py::arg("locs"), py::arg("host_locs"),
      py::arg("wide_host_locs"), py::arg("lru"), py::arg("out"), py::arg("device_locs"), py::arg("miss_src"),
      py::arg("miss_dst"), py::arg("miss_count"), py::arg("host_slots"), py::arg("device_slots"), py::arg("max_len"),
      py::arg("top_k"), py::arg("hot_slots"), py::arg("batch_row"), py::arg("request"), py::arg("seq_len"),
      py::arg("records"), py::arg("threads"), py::arg("most_bytes"), py::arg("seed"),
      "((host location, device location) of each miss, faults)");
}

}  // namespace kvio
