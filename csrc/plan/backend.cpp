#include "plan/backend.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "error.h"
#include "plan/rates.h"
#include "plan/run_stats.h"
#include "plan/tma_plan.h"

namespace kvio {
namespace {

// The least disturbing neighbour of a forward pass first: the copy engine takes no SM, the ring 2, the kernel 4.
constexpr Backend kByDisturbance[] = {Backend::kCopyEngine, Backend::kTma, Backend::kRegister};

constexpr double kTie = 0.97;        // of the best rate: closer than runs of one machine repeat
constexpr double kQuietShare = 0.9;  // of the best rate, which prefer="quiet" may give away

// A flow of calls hides what precedes the first byte of each: the next call is submitted while this one copies. That
// needs copying that lasts longer than a first sub-batch of 64 entries takes to submit, 58 us or 3 MiB. A smaller call
// is rated by its own time instead: about 20 us before the first byte whatever the backend (H200, pages of 32 KiB:
// 23 us for 128 KiB; a single driver copy of 1 MiB takes 34 us, 15 of them before the copying), and for the copy engine
// the submission of every entry. So it gets small calls only when their entries are few and long.
constexpr int64_t kSmallCallBytes = int64_t{3} << 20;
constexpr double kCallUs = 20;
constexpr double kEntryUs = 0.9;
constexpr double kUnbatchedEntryUs = 3;  // of one asynchronous copy: 15.6 GB/s with 64 KiB, 41.8 with 512 KiB

// Boxes shorter than this load no faster than single rows: 512 B rows 50 GB/s in boxes of 4 KiB, 26 in boxes of 2 KiB.
constexpr int64_t kShortBoxBytes = 4 << 10;

bool crosses_link(const BackendFacts& facts) {
  return facts.direction == Direction::kHostToDevice || facts.direction == Direction::kDeviceToHost;
}

// What no request of the caller can change; null when there is nothing of the kind.
const char* why_not(Backend backend, const BackendFacts& facts) {
  switch (backend) {
    case Backend::kTma:
      if (facts.gpu.platform == Platform::kRocm) {
        return "AMD GPUs have no bulk copies, of which it consists; it needs an NVIDIA GPU";
      }
      if (facts.gpu.compute_major < 9) return "the GPU has no bulk copies; it needs compute capability 9.0 or later";
      if (!facts.gpu.has_bulk_code) {
        return "this build has no bulk copies for the GPU; it needs KVIO_CUDA_ARCHS to name 90 or later, up to the "
               "GPU's";
      }
      return facts.tma_refusal;
    case Backend::kCopyEngine:
      return facts.indices_on_cpu ? nullptr
                                  : "the indices are on the GPU; it needs CPU indices, since the host cannot read the "
                                    "others without waiting for the GPU";
    default:
      return nullptr;
  }
}

// The same, and what keeps `auto` away.
const char* why_not_auto(Backend backend, const BackendFacts& facts) {
  if (backend == Backend::kRegister) return nullptr;
  if (!crosses_link(facts)) return "no host link to fill";
  if (backend == Backend::kTma && facts.overrides.no_tma) return "KVIO_TMA is off";
  if (backend == Backend::kCopyEngine && facts.overrides.no_copy_engine) return "KVIO_COPY_ENGINE is off";
  if (backend == Backend::kCopyEngine && facts.gpu.capturing) return "the stream is being captured";
  return why_not(backend, facts);
}

// The table's figure for long flows.
double flow_gbps(const RateTable& rates, Backend backend, const BackendFacts& facts) {
  const double run_bytes = static_cast<double>(facts.run_bytes);
  // Without boxes, or with boxes of a few rows, the ring issues a copy for little more than a row, wherever it lies.
  const bool no_boxes = !facts.gpu.has_tensor_maps || facts.tma_single_rows || facts.stretch_bytes < kShortBoxBytes;
  const bool apart = facts.host_rows_apart && !(backend == Backend::kTma && no_boxes);
  const double rate = rate_of(rates, backend, facts.direction, apart, run_bytes);
  if (backend != Backend::kCopyEngine || facts.gpu.has_batch_call || run_bytes <= 0) return rate;
  const double alone_us = kUnbatchedEntryUs + run_bytes / (link_rate(rates, facts.direction) * 1e3);
  return std::min(rate, run_bytes / (alone_us * 1e3));
}

double call_gbps(const RateTable& rates, Backend backend, const BackendFacts& facts) {
  const double bytes = static_cast<double>(facts.payload_bytes);
  double gbps = flow_gbps(rates, backend, facts);
  double us = kCallUs;
  if (gbps <= 0) return 0;
  if (backend == Backend::kCopyEngine) {
    // Nothing overlaps, so the entries are submitted first and copied then.
    us += static_cast<double>(facts.num_entries) * (facts.gpu.has_batch_call ? kEntryUs : kUnbatchedEntryUs);
    gbps = link_rate(rates, facts.direction);
  }
  return bytes / ((us + bytes / (gbps * 1e3)) * 1e3);
}

BackendChoice first_of_order(const BackendFacts& facts) {
  const BackendOverrides& o = facts.overrides;
  for (int i = 0; i < o.num_ordered; ++i) {
    if (why_not_auto(o.order[i], facts) == nullptr) return {o.order[i], "first of KVIO_BACKEND_ORDER that can serve"};
  }
  return {Backend::kRegister, "nothing in KVIO_BACKEND_ORDER can serve, and this serves any row size and alignment"};
}

const char* reason_of(double rate, double best, Prefer prefer) {
  if (rate >= best) return "the highest rate for these runs";
  if (rate >= kTie * best) return "as fast as the best, and disturbs compute less";
  return prefer == Prefer::kQuiet ? "prefer is 'quiet': disturbs compute least of those within 90% of the best rate"
                                  : "the highest rate for these runs";
}

BackendChoice choose_by_rate(const BackendFacts& facts, const RateTable& rates) {
  double gbps[std::size(kByDisturbance)] = {};
  double best = 0;
  int serving = 0;
  for (size_t i = 0; i < std::size(kByDisturbance); ++i) {
    if (why_not_auto(kByDisturbance[i], facts) != nullptr) continue;
    ++serving;
    gbps[i] = expected_gbps(rates, kByDisturbance[i], facts);
    best = std::max(best, gbps[i]);
  }
  const double enough = best * (facts.prefer == Prefer::kQuiet ? kQuietShare : kTie);
  if (serving > 1 && best > 0) {
    for (size_t i = 0; i < std::size(kByDisturbance); ++i) {
      if (gbps[i] > 0 && gbps[i] >= enough) return {kByDisturbance[i], reason_of(gbps[i], best, facts.prefer)};
    }
  }
  return {Backend::kRegister, "serves any row size and alignment"};
}

Backend backend_named(const char* op, const std::string& wanted) {
  for (const Backend backend : {Backend::kRegister, Backend::kTma, Backend::kCopyEngine, Backend::kCpu}) {
    if (wanted == backend_name(backend)) return backend;
  }
  fail(op, "backend is '", wanted, "'; it needs 'auto', 'register', 'tma', 'copy_engine' or 'cpu'");
}

BackendChoice choose_on_cpu(const char* op, const std::string& wanted) {
  if (wanted != "auto" && wanted != "cpu") {
    fail(op, "backend is '", wanted, "' but every tensor is on the CPU; it needs a GPU tensor (or backend='auto')");
  }
  return {Backend::kCpu, "every tensor is on the CPU"};
}

BackendChoice forced(const char* op, Backend backend, const BackendFacts& facts) {
  if (backend == Backend::kCpu) {
    fail(op, "backend is 'cpu' but a tensor is on a GPU; it needs CPU tensors only (or backend='auto')");
  }
  if (const char* reason = why_not(backend, facts)) {
    fail(op, "backend is '", backend_name(backend), "' but ", reason, " (or backend='auto')");
  }
  if (backend == Backend::kCopyEngine && facts.gpu.capturing) {
    return {backend, "asked for by the caller; the graph keeps the index values of this call"};
  }
  return {backend, "asked for by the caller"};
}

bool is_off(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr) return false;
  const std::string_view text(value);
  return text == "0" || text == "false" || text == "off" || text == "no";
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

void add_to_order(const char* op, std::string_view name, BackendOverrides* overrides) {
  for (const Backend backend : kByDisturbance) {
    if (name != backend_name(backend)) continue;
    const Backend* end = overrides->order + overrides->num_ordered;
    if (std::find(static_cast<const Backend*>(overrides->order), end, backend) == end) {
      overrides->order[overrides->num_ordered++] = backend;
    }
    return;
  }
  fail(op, "KVIO_BACKEND_ORDER names '", name, "'; it needs a list of 'copy_engine', 'tma' and 'register'");
}

Direction direction_of(const TransferRequest& request) {
  const bool to_gpu = request.dst_device == DeviceKind::kGpu;
  if (request.src_device == DeviceKind::kGpu) return to_gpu ? Direction::kDeviceToDevice : Direction::kDeviceToHost;
  return to_gpu ? Direction::kHostToDevice : Direction::kHostToHost;
}

bool rows_touch(const PoolView& view) {
  return view.token_stride == view.row_bytes() && (view.num_pieces == 1 || view.piece_stride == view.piece_bytes);
}

// What the geometry of the groups says, by where most of the payload is.
void describe_groups(const TransferRequest& request, BackendFacts* facts) {
  const bool dst_counts = request.dst_device == DeviceKind::kCpu || facts->direction == Direction::kDeviceToDevice;
  const bool src_counts = request.src_device == DeviceKind::kCpu || facts->direction == Direction::kDeviceToDevice;
  int64_t together = 0;
  int64_t apart = 0;
  int64_t most = 0;
  for (const BufferGroup& group : request.groups) {
    const int64_t bytes = group.dst.row_bytes() * static_cast<int64_t>(group.dst_base.size());
    const bool touch = (!dst_counts || rows_touch(group.dst)) && (!src_counts || rows_touch(group.src));
    (touch ? together : apart) += bytes;
    if (bytes > most) facts->row_bytes = group.dst.row_bytes();
    most = std::max(most, bytes);
    if (request.dst_device == DeviceKind::kCpu) {
      facts->host_span_bytes = std::max(facts->host_span_bytes, group.dst_extent);
    }
    if (request.src_device == DeviceKind::kCpu) {
      facts->host_span_bytes = std::max(facts->host_span_bytes, group.src_extent);
    }
  }
  facts->host_rows_apart = apart > together;
}

void set_runs(const RunStats& stats, BackendFacts* facts) {
  if (stats.runs == 0) return;
  facts->run_bytes = facts->payload_bytes / stats.runs;
  facts->stretch_bytes = facts->payload_bytes / stats.stretches;
  if (facts->indices_on_cpu) facts->num_entries = stats.runs;
}

// The largest group decides: boxes are planned by what page_size promises, whatever runs the indices turn out to have.
bool loads_single_rows(const TransferRequest& request, const GpuFacts& gpu) {
  const auto bytes = [](const BufferGroup& g) { return g.dst.row_bytes() * static_cast<int64_t>(g.dst_base.size()); };
  const auto group = std::max_element(request.groups.begin(), request.groups.end(),
                                      [&](const auto& a, const auto& b) { return bytes(a) < bytes(b); });
  if (group == request.groups.end() || group->src.packed()) return false;
  return make_tma_plan(request, *group, 1, gpu.has_tensor_maps).box_tokens == 0;
}

void judge_tma(const TransferRequest& request, BackendFacts* facts) {
  facts->tma_refusal = tma_refusal(request);
  if (facts->tma_refusal != nullptr || facts->payload_bytes == 0 || !facts->host_rows_apart) return;
  facts->tma_single_rows = loads_single_rows(request, facts->gpu);
}

BackendFacts plain_facts_of(const TransferRequest& request, const GpuFacts& gpu) {
  BackendFacts facts;
  facts.any_gpu = request.gpu_index >= 0;
  facts.indices_on_cpu = request.index_device == DeviceKind::kCpu;
  facts.direction = direction_of(request);
  facts.gpu = gpu;
  facts.payload_bytes = request.payload_bytes();
  facts.prefer = request.prefer;
  describe_groups(request, &facts);
  return facts;
}

void count_everything(const char* op, const TransferRequest& request, BackendFacts* facts) {
  facts->overrides = overrides_from_environment(op);
  if (facts->payload_bytes == 0) return;
  set_runs(facts->indices_on_cpu ? count_runs(request) : promised_runs(request), facts);
}

const char* prefer_name(const BackendFacts& facts) { return facts.prefer == Prefer::kQuiet ? "quiet" : "throughput"; }

void list_candidates(const BackendFacts& facts, const RateTable& rates, std::ostringstream* text) {
  const char* separator = "candidates: ";
  for (const Backend backend : kByDisturbance) {
    if (backend == Backend::kTma && facts.gpu.platform == Platform::kRocm) continue;  // there is no such thing
    *text << separator << backend_name(backend);
    separator = "; ";
    const char* reason = why_not_auto(backend, facts);
    if (reason != nullptr) {
      *text << " no, " << std::string_view(reason).substr(0, std::string_view(reason).find(';'));
    } else if (crosses_link(facts)) {
      *text << " " << expected_gbps(rates, backend, facts) << " GB/s";
    }
  }
  *text << " (prefer " << prefer_name(facts) << ", " << (rates.built_in ? "built-in" : "measured") << " rates)\n";
}

}  // namespace

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kCpu:
      return "cpu";
    case Backend::kRegister:
      return "register";
    case Backend::kTma:
      return "tma";
    default:
      return "copy_engine";
  }
}

BackendOverrides overrides_from_environment(const char* op) {
  BackendOverrides overrides;
  overrides.no_tma = is_off("KVIO_TMA");
  overrides.no_copy_engine = is_off("KVIO_COPY_ENGINE");
  const char* order = std::getenv("KVIO_BACKEND_ORDER");
  if (order == nullptr) return overrides;
  std::string_view rest = trimmed(order);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    add_to_order(op, trimmed(rest.substr(0, comma)), &overrides);
    rest = comma == std::string_view::npos ? std::string_view() : trimmed(rest.substr(comma + 1));
  }
  return overrides;
}

BackendFacts facts_of(const TransferRequest& request, const GpuFacts& gpu) {
  BackendFacts facts = plain_facts_of(request, gpu);
  if (!facts.any_gpu) return facts;
  const bool is_auto = request.backend == "auto";
  if (is_auto) {
    count_everything("transfer", request, &facts);
    judge_tma(request, &facts);
  } else if (request.backend == "tma") {
    facts.tma_refusal = tma_refusal(request);
  }
  return facts;
}

BackendFacts complete_facts_of(const TransferRequest& request, const GpuFacts& gpu) {
  BackendFacts facts = plain_facts_of(request, gpu);
  count_everything("explain", request, &facts);
  if (facts.any_gpu) judge_tma(request, &facts);
  return facts;
}

double expected_gbps(const RateTable& rates, Backend backend, const BackendFacts& facts) {
  if (backend == Backend::kCpu || !crosses_link(facts)) return 0;
  return facts.payload_bytes < kSmallCallBytes ? call_gbps(rates, backend, facts) : flow_gbps(rates, backend, facts);
}

BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts) {
  return choose_backend(op, wanted, facts, current_rates());
}

BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts,
                             const RateTable& rates) {
  const bool is_auto = wanted == "auto";
  const Backend backend = is_auto ? Backend::kCpu : backend_named(op, wanted);
  if (!facts.any_gpu) return choose_on_cpu(op, wanted);
  if (facts.indices_on_cpu && facts.gpu.capturing && backend != Backend::kCopyEngine &&
      (is_auto || backend != Backend::kCpu)) {
    fail(op,
         "dst_indices is on the CPU while the stream is being captured; a graph needs indices on the GPU, whose "
         "values it reads at replay (or backend='copy_engine', which keeps their values in the graph)");
  }
  if (!is_auto) return forced(op, backend, facts);
  return facts.overrides.num_ordered > 0 ? first_of_order(facts) : choose_by_rate(facts, rates);
}

std::string describe(const BackendChoice& choice) {
  return std::string("backend: ") + backend_name(choice.backend) + "\nreason: " + choice.reason + "\n";
}

std::string describe(const BackendChoice& choice, const BackendFacts& facts) {
  const RateTable& rates = current_rates();
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(1);
  text << describe(choice);
  if (facts.payload_bytes == 0) return text.str();
  if (facts.indices_on_cpu) {
    text << "entries: " << facts.num_entries << ", " << facts.run_bytes << " bytes on average\n";
  } else {
    text << "runs: " << facts.run_bytes << " bytes, as page_size promises\n";
  }
  if (!facts.any_gpu) return text.str();
  const double gbps = expected_gbps(rates, choice.backend, facts);
  const double link = gbps > 0 ? link_rate(rates, facts.direction) : 0;
  if (link > 0) {
    text << "expected: " << gbps << " GB/s, " << static_cast<int>(100 * gbps / link + 0.5) << "% of the link"
         << (facts.payload_bytes < kSmallCallBytes ? " (one small call by itself)\n" : "\n");
  }
  list_candidates(facts, rates, &text);
  return text.str();
}

std::string describe_capture(const std::string& wanted, const BackendFacts& facts) {
  if (!facts.any_gpu) return "";
  if (!facts.indices_on_cpu) return "capture: indices and rows are read at every replay\n";
  if (wanted == backend_name(Backend::kCopyEngine)) {
    return "capture: the graph keeps the values of these indices; rows are read at every replay\n";
  }
  return "capture: refused, the indices are on the CPU; backend='copy_engine' keeps their values\n";
}

}  // namespace kvio
