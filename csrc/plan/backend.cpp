#include "plan/backend.h"

#include "error.h"
#include "plan/tma_plan.h"

namespace kvio {

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

std::string describe(const BackendChoice& choice) {
  return std::string("backend: ") + backend_name(choice.backend) + "\nreason: " + choice.reason + "\n";
}

BackendFacts facts_of(const TransferRequest& request, const GpuFacts& gpu) {
  BackendFacts facts;
  facts.any_gpu = request.gpu_index >= 0;
  facts.indices_on_cpu = request.index_device == DeviceKind::kCpu;
  facts.gpu = gpu;
  facts.tma_refusal = tma_refusal(request);
  return facts;
}

BackendChoice choose_backend(const char* op, const std::string& wanted, const BackendFacts& facts) {
  if (wanted == "tma" && facts.any_gpu) {
    if (facts.tma_refusal != nullptr)
      fail(op, "backend is 'tma' but ", facts.tma_refusal, "; it needs another backend");
    return {Backend::kTma, "asked for by the caller"};
  }
  if (wanted != "auto" && wanted != "register" && wanted != "cpu") {
    fail(op, "backend is '", wanted, "'; it needs 'auto', 'register' or 'cpu'");
  }
  if (!facts.any_gpu) {
    if (wanted == "register") {
      fail(op, "backend is 'register' but every tensor is on the CPU; it needs a GPU tensor (or backend='auto')");
    }
    return {Backend::kCpu, "every tensor is on the CPU"};
  }
  if (wanted == "cpu") {
    fail(op, "backend is 'cpu' but a tensor is on a GPU; it needs CPU tensors only (or backend='auto')");
  }
  if (facts.indices_on_cpu && facts.gpu.capturing) {
    fail(op,
         "dst_indices is on the CPU while the stream is being captured; a graph needs indices on the GPU, whose "
         "values it reads at replay");
  }
  return {Backend::kRegister, wanted == "register" ? "asked for by the caller" : "serves any row size and alignment"};
}

}  // namespace kvio
