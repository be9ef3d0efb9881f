#include "gpu/hip_runtime.h"

#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <link.h>

#include <string>
#include <string_view>
#include <type_traits>

namespace kvio::gpu {
namespace {

// Whatever its version and folder: ROCm's own, or the one inside torch's package.
int remember_runtime(dl_phdr_info* object, size_t, void* path) {
  const std::string_view name = object->dlpi_name != nullptr ? object->dlpi_name : "";
  const size_t slash = name.rfind('/');
  const std::string_view file = slash == std::string_view::npos ? name : name.substr(slash + 1);
  if (file.rfind("libamdhip64.so", 0) != 0) return 0;
  *static_cast<std::string*>(path) = name;
  return 1;
}

// Kernels are registered when the extension is loaded, which is after torch: what is not loaded by then stays unused.
void* runtime() {
  static void* const handle = []() -> void* {
    std::string path;
    if (dl_iterate_phdr(remember_runtime, &path) == 0) return nullptr;
    return dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  }();
  return handle;
}

// What a function answers without a runtime.
template <class Result>
Result missing() {
  if constexpr (std::is_same_v<Result, hipError_t>) {
    return hipErrorNoDevice;
  } else {
    return Result();
  }
}

}  // namespace

void* hip_symbol(const char* name) { return runtime() != nullptr ? dlsym(runtime(), name) : nullptr; }

int hip_version() {
  int version = 0;
  return hipRuntimeGetVersion(&version) == hipSuccess ? version : 0;
}

}  // namespace kvio::gpu

// Functions of the runtime under their own names, for this extension only (csrc/gpu/exports.map keeps them inside), as
// the compiler's registration of kernels needs them.
#define KVIO_FORWARD(result, name, parameters, ...)                                      \
  result name parameters {                                                               \
    using Function = result(*) parameters;                                               \
    static const auto loaded = reinterpret_cast<Function>(kvio::gpu::hip_symbol(#name)); \
    return loaded != nullptr ? loaded(__VA_ARGS__) : kvio::gpu::missing<result>();       \
  }

extern "C" {

KVIO_FORWARD(hipError_t, hipDeviceGetAttribute, (int* value, hipDeviceAttribute_t attribute, int device), value,
             attribute, device)
KVIO_FORWARD(hipError_t, hipDeviceSynchronize, ())
KVIO_FORWARD(hipError_t, hipDriverGetVersion, (int* version), version)
KVIO_FORWARD(hipError_t, hipEventCreateWithFlags, (hipEvent_t * event, unsigned flags), event, flags)
KVIO_FORWARD(hipError_t, hipEventQuery, (hipEvent_t event), event)
KVIO_FORWARD(hipError_t, hipEventRecord, (hipEvent_t event, hipStream_t stream), event, stream)
KVIO_FORWARD(hipError_t, hipFuncSetAttribute, (const void* function, hipFuncAttribute attribute, int value), function,
             attribute, value)
KVIO_FORWARD(hipError_t, hipGetDevice, (int* device), device)
KVIO_FORWARD(hipError_t, hipGetDeviceCount, (int* count), count)
KVIO_FORWARD(hipError_t, hipGetLastError, ())
KVIO_FORWARD(hipError_t, hipGetSymbolAddress, (void** address, const void* symbol), address, symbol)
KVIO_FORWARD(hipError_t, hipHostFree, (void* host), host)
KVIO_FORWARD(hipError_t, hipHostGetDevicePointer, (void** alias, void* host, unsigned flags), alias, host, flags)
KVIO_FORWARD(hipError_t, hipHostMalloc, (void** host, size_t nbytes, unsigned flags), host, nbytes, flags)
KVIO_FORWARD(hipError_t, hipHostRegister, (void* host, size_t nbytes, unsigned flags), host, nbytes, flags)
KVIO_FORWARD(hipError_t, hipHostUnregister, (void* host), host)
KVIO_FORWARD(hipError_t, hipLaunchKernel,
             (const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared, hipStream_t stream),
             kernel, blocks, threads, arguments, shared, stream)
KVIO_FORWARD(hipError_t, hipMemGetAddressRange, (hipDeviceptr_t * begin, size_t* nbytes, hipDeviceptr_t address), begin,
             nbytes, address)
KVIO_FORWARD(hipError_t, hipMemcpyAsync,
             (void* dst, const void* src, size_t nbytes, hipMemcpyKind kind, hipStream_t stream), dst, src, nbytes,
             kind, stream)
KVIO_FORWARD(hipError_t, hipMemsetAsync, (void* dst, int value, size_t nbytes, hipStream_t stream), dst, value, nbytes,
             stream)
KVIO_FORWARD(hipError_t, hipRuntimeGetVersion, (int* version), version)
KVIO_FORWARD(hipError_t, hipSetDevice, (int device), device)
KVIO_FORWARD(hipError_t, hipStreamCreateWithFlags, (hipStream_t * stream, unsigned flags), stream, flags)
KVIO_FORWARD(hipError_t, hipStreamIsCapturing, (hipStream_t stream, hipStreamCaptureStatus* status), stream, status)
KVIO_FORWARD(hipError_t, hipStreamWaitEvent, (hipStream_t stream, hipEvent_t event, unsigned flags), stream, event,
             flags)
KVIO_FORWARD(hipError_t, hipThreadExchangeStreamCaptureMode, (hipStreamCaptureMode * mode), mode)

const char* hipGetErrorString(hipError_t error) {
  static const auto loaded = reinterpret_cast<const char* (*)(hipError_t)>(kvio::gpu::hip_symbol("hipGetErrorString"));
  return loaded != nullptr ? loaded(error) : "torch has loaded no HIP runtime";
}

// What the compiler calls when the extension is loaded and unloaded, and before a kernel is launched.
void** __hipRegisterFatBinary(const void* data);
void __hipRegisterFunction(void** modules, const void* host, char* device, const char* name, unsigned threads,
                           void* thread_id, void* block_id, void* block_size, void* grid_size, int* wave);
void __hipRegisterVar(void** modules, void* host, char* host_name, char* device_name, int is_extern, size_t nbytes,
                      int is_constant, int is_global);
void __hipUnregisterFatBinary(void** modules);
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream);

KVIO_FORWARD(void**, __hipRegisterFatBinary, (const void* data), data)
KVIO_FORWARD(void, __hipRegisterFunction,
             (void** modules, const void* host, char* device, const char* name, unsigned threads, void* thread_id,
              void* block_id, void* block_size, void* grid_size, int* wave),
             modules, host, device, name, threads, thread_id, block_id, block_size, grid_size, wave)
KVIO_FORWARD(void, __hipRegisterVar,
             (void** modules, void* host, char* host_name, char* device_name, int is_extern, size_t nbytes,
              int is_constant, int is_global),
             modules, host, host_name, device_name, is_extern, nbytes, is_constant, is_global)
KVIO_FORWARD(void, __hipUnregisterFatBinary, (void** modules), modules)
KVIO_FORWARD(hipError_t, __hipPopCallConfiguration, (dim3 * grid, dim3* block, size_t* shared, hipStream_t* stream),
             grid, block, shared, stream)

}  // extern "C"
