// driver.h for AMD's GPUs, where driver and runtime are one.
#include <algorithm>

#include "gpu/driver.h"
#include "gpu/hip_runtime.h"

namespace kvio::gpu {
namespace {

// Copies that one batch may hold: more were seen to fault (vLLM pull request 43018).
constexpr size_t kMaxBatch = 8192;

// Of HIP 7 to 10; a later one may have another prototype under the same name, as CUDA 13 has. Without attributes, which
// 7.2 refuses. It batches from 7.14 on; before, it loops over ordinary copies (ROCm/clr issue 273).
using BatchCopy = hipError_t (*)(void**, void**, size_t*, size_t, void*, size_t*, size_t, size_t*, hipStream_t);

BatchCopy batch_copy_call() {
  static const auto function = [] {
    const int major = hip_version() / 10'000'000;
    const bool known = major >= 7 && major <= 10;
    return known ? reinterpret_cast<BatchCopy>(hip_symbol("hipMemcpyBatchAsync")) : nullptr;
  }();
  return function;
}

}  // namespace

HostRange query_host_range(const void* address) {
  HostRange range;
  void* alias = nullptr;
  hipDeviceptr_t begin = nullptr;
  size_t size = 0;
  const bool page_locked = hipHostGetDevicePointer(&alias, const_cast<void*>(address), 0) == hipSuccess &&
                           alias != nullptr && hipMemGetAddressRange(&begin, &size, alias) == hipSuccess && size != 0;
  if (!page_locked) {
    (void)hipGetLastError();
    return range;
  }
  range.page_locked = true;
  range.alias = reinterpret_cast<uintptr_t>(begin);
  range.begin = reinterpret_cast<uintptr_t>(address) - (reinterpret_cast<uintptr_t>(alias) - range.alias);
  range.end = range.begin + size;
  return range;
}

// Asking costs nothing here, and waiting for a device that nobody uses next to nothing.
bool has_context(int) { return true; }

bool has_tensor_maps() { return false; }

bool encode_box_map(const BoxShape&, const void*, void*) { return false; }

bool has_batch_copy() { return batch_copy_call() != nullptr; }

Error batch_copy(uint64_t* dst, uint64_t* src, size_t* nbytes, size_t count, BatchSides, Stream stream) {
  for (size_t done = 0; done < count; done += kMaxBatch) {
    size_t failed = 0;
    const hipError_t error =
        batch_copy_call()(reinterpret_cast<void**>(dst + done), reinterpret_cast<void**>(src + done), nbytes + done,
                          std::min(kMaxBatch, count - done), nullptr, nullptr, 0, &failed, stream);
    if (error == hipSuccess) continue;
    (void)hipGetLastError();
    return error;
  }
  return hipSuccess;
}

std::vector<EntryPoint> entry_points() {
  return {{"hipHostGetDevicePointer", hip_symbol("hipHostGetDevicePointer") != nullptr},
          {"hipMemcpyBatchAsync", has_batch_copy()}};
}

}  // namespace kvio::gpu
