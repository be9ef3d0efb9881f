// Which backend serves a request: a pure function of facts and one table of rates, so that it can be tested and
// explained without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "plan/platform.h"
#include "request/request.h"

namespace kvio {

enum class Backend : uint8_t { kCpu, kRegister, kTma, kCopyEngine };
constexpr int kNumGpuBackends = 3;  // register, tma, copy_engine, in this order in the table

enum class Direction : uint8_t { kHostToDevice, kDeviceToHost, kDeviceToDevice, kHostToHost };

const char* backend_name(Backend backend);

// What the caller knows about the GPU and its stream. All false/zero without one.
struct GpuFacts {
  Platform platform = Platform::kCuda;
  int compute_major = 0;         // compute capability, 0 for no NVIDIA GPU
  bool capturing = false;        // the caller's stream is being captured into a graph
  bool legacy_stream = false;    // it is the legacy default stream
  bool has_batch_call = false;   // the driver has the batched copy
  bool has_tensor_maps = false;  // the driver can encode tensor maps
  bool has_bulk_code = true;     // this build has bulk copies for the GPU, if the GPU has any
};

// What the environment says about `auto`, read per call.
struct BackendOverrides {
  bool no_tma = false;          // KVIO_TMA=0
  bool no_copy_engine = false;  // KVIO_COPY_ENGINE=0
  int num_ordered = 0;          // KVIO_BACKEND_ORDER: `auto` takes the first that can serve; 0 when it is not set
  Backend order[kNumGpuBackends] = {};
};

struct BackendFacts {
  bool any_gpu = false;  // a pool or the indices are on a GPU
  bool indices_on_cpu = false;
  Direction direction = Direction::kHostToHost;
  GpuFacts gpu;
  bool host_rows_apart =
      false;                  // rows of a page do not follow each other on the host side (or, device to device, on one)
  int64_t row_bytes = 0;      // of the rows that hold most of the payload
  int64_t run_bytes = 0;      // mean bytes of one run: counted with CPU indices, promised by page_size with GPU indices
  int64_t stretch_bytes = 0;  // the same of slots that follow each other, whether or not their rows touch in memory
  int64_t num_entries = 0;    // copies a driver would be given, all buffers; 0 when the indices are on the GPU
  int64_t payload_bytes = 0;
  int64_t host_span_bytes = 0;        // of the largest host buffer
  const char* tma_refusal = nullptr;  // why the tma backend cannot move these rows, null when it can
  bool tma_single_rows = false;       // the tma backend loads rows one by one even where their slots follow each other
  Prefer prefer = Prefer::kThroughput;
  BackendOverrides overrides;
};

struct BackendChoice {
  Backend backend;
  const char* reason;
};

// Runs are counted, and the environment read, when the choice depends on them: with backend "auto". Without that, runs
// are taken as promised by page_size. CPU indices must have been checked.
BackendFacts facts_of(const TransferRequest& request, const GpuFacts& gpu);

// The same with everything counted, for explain.
BackendFacts complete_facts_of(const TransferRequest& request, const GpuFacts& gpu);

// Throws when a variable names a backend that does not exist.
BackendOverrides overrides_from_environment(const char* op);

struct RateTable;

// Throws when `wanted` is unknown or cannot serve the request, naming what is missing. Uses the current rates.
BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts);
BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts,
                             const RateTable& rates);

// Payload GB/s that the table promises of a backend for these facts; 0 where it has no figure (cpu, device to device).
// A call too small to hide what precedes its first byte is rated by its own time.
double expected_gbps(const RateTable& rates, Backend backend, const BackendFacts& facts);

// The first lines of what explain says: the choice, and what it rests on.
std::string describe(const BackendChoice& choice);
std::string describe(const BackendChoice& choice, const BackendFacts& facts);

// What a CUDA graph would keep of a call that asks for `wanted`; nothing where no GPU takes part.
std::string describe_capture(const std::string& wanted, const BackendFacts& facts);

}  // namespace kvio
