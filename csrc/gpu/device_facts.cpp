#include "gpu/device_facts.h"

#include <atomic>

#include "gpu/driver.h"
#include "gpu/stream.h"
#include "gpu/transfer_tma.h"

namespace kvio::gpu {
namespace {

// One attribute of every device, read once.
class DeviceAttribute {
 public:
  constexpr explicit DeviceAttribute(cudaDeviceAttr attribute) : attribute_(attribute) {}

  int of(const char* op, int device) {
    std::atomic<int>& known = values_[device];
    int value = known.load(std::memory_order_relaxed);
    if (value == 0) {
      check(op, "reading an attribute of the device", cudaDeviceGetAttribute(&value, attribute_, device));
      known.store(value, std::memory_order_relaxed);
    }
    return value;
  }

 private:
  cudaDeviceAttr attribute_;
  std::atomic<int> values_[kMaxDevices] = {};
};

}  // namespace

int sm_count(const char* op, int device) {
  static DeviceAttribute count(cudaDevAttrMultiProcessorCount);
  return count.of(op, device);
}

int shared_memory_limit(const char* op, int device) {
  static DeviceAttribute bytes(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return bytes.of(op, device);
}

void allow_shared_memory(const char* op, const void* kernel, int device, int bytes) {
  // Kernels that were told, one after the other: few, and written once.
  constexpr int kMostKernels = 16;
  static std::atomic<const void*> told[kMaxDevices][kMostKernels];
  int free = 0;
  for (; free < kMostKernels; ++free) {
    const void* known = told[device][free].load(std::memory_order_acquire);
    if (known == kernel) return;
    if (known == nullptr) break;
  }
  const RelaxedCapture relaxed;  // it loads the kernel
  check(op, "raising a kernel's shared memory",
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  for (; free < kMostKernels; ++free) {
    const void* none = nullptr;
    if (told[device][free].compare_exchange_strong(none, kernel) || none == kernel) return;
  }
}

GpuFacts gpu_facts(const char* op, int device, Stream stream, bool capturing) {
  static DeviceAttribute major(cudaDevAttrComputeCapabilityMajor);
  GpuFacts gpu;
  gpu.platform = kPlatform;
  if (kPlatform == Platform::kCuda) gpu.compute_major = major.of(op, device);
  gpu.capturing = capturing;
  gpu.legacy_stream = is_legacy_stream(stream);
  gpu.has_batch_call = has_batch_copy();
  gpu.has_tensor_maps = has_tensor_maps();
  gpu.has_bulk_code = has_bulk_code(gpu.compute_major);
  return gpu;
}

}  // namespace kvio::gpu
