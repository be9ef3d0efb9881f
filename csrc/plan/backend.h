// Which backend serves a request: a pure function of facts, so that it can be tested and explained without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "request/request.h"

namespace kvio {

enum class Backend : uint8_t { kCpu, kRegister };

const char* backend_name(Backend backend);

struct BackendFacts {
  bool any_gpu = false;  // a pool or the indices are on a GPU
  bool indices_on_cpu = false;
  bool capturing = false;  // the caller's stream is being captured into a graph
};

struct BackendChoice {
  Backend backend;
  const char* reason;
};

// The first lines of what explain says.
std::string describe(const BackendChoice& choice);

BackendFacts facts_of(const TransferRequest& request, bool capturing);

// Throws when `wanted` is unknown or cannot serve the request, naming what is missing.
BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts);

}  // namespace kvio
