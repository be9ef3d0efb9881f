// Names of the GPU runtime, and what differs between the two vendors' GPUs. The only file that says whose GPU it is:
// everything else is written in CUDA's names, which KVIO_ROCM maps to HIP's here. Kernels take their instructions from
// primitives.cuh.
#pragma once

#ifdef KVIO_ROCM
#include <hip/hip_runtime_api.h>
#else
#include <cuda_runtime.h>
#endif

#include <sstream>
#include <stdexcept>

#include "plan/platform.h"

#ifdef KVIO_ROCM

#undef __align__
#undef __launch_bounds__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define KVIO_COLD __forceinline__  // a call would need scratch memory

#define cudaDeviceAttr hipDeviceAttribute_t
#define cudaDevAttrComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMajor
#define cudaDevAttrMaxSharedMemoryPerBlockOptin hipDeviceAttributeMaxSharedMemoryPerBlock
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaDriverGetVersion hipDriverGetVersion
#define cudaErrorCapturedEvent hipErrorCapturedEvent
#define cudaErrorHostMemoryAlreadyRegistered hipErrorHostMemoryAlreadyRegistered
#define cudaErrorInvalidValue hipErrorInvalidValue
#define cudaErrorNotReady hipErrorNotReady
#define cudaErrorNotSupported hipErrorNotSupported
#define cudaErrorStreamCaptureImplicit hipErrorStreamCaptureImplicit
#define cudaErrorStreamCaptureUnsupported hipErrorStreamCaptureUnsupported
#define cudaErrorStreamCaptureWrongThread hipErrorStreamCaptureWrongThread
#define cudaErrorUnknown hipErrorUnknown
#define cudaError_t hipError_t
#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaEventQuery hipEventQuery
#define cudaEventRecord hipEventRecord
#define cudaEvent_t hipEvent_t
#define cudaFreeHost hipHostFree
#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize
#define cudaFuncSetAttribute hipFuncSetAttribute
#define cudaGetDevice hipGetDevice
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaGetSymbolAddress(address, symbol) hipGetSymbolAddress(address, &symbol)
#define cudaHostAlloc hipHostMalloc
#define cudaHostAllocMapped hipHostMallocMapped
#define cudaHostAllocPortable hipHostMallocPortable
#define cudaHostGetDevicePointer hipHostGetDevicePointer
#define cudaHostRegister hipHostRegister
#define cudaHostRegisterMapped hipHostRegisterMapped
#define cudaHostRegisterPortable hipHostRegisterPortable
#define cudaHostUnregister hipHostUnregister
#define cudaLaunchKernel hipLaunchKernel
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpyDefault hipMemcpyDefault
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyKind hipMemcpyKind
#define cudaMemsetAsync hipMemsetAsync
#define cudaSetDevice hipSetDevice
#define cudaStreamCaptureMode hipStreamCaptureMode
#define cudaStreamCaptureModeRelaxed hipStreamCaptureModeRelaxed
#define cudaStreamCaptureStatus hipStreamCaptureStatus
#define cudaStreamCaptureStatusNone hipStreamCaptureStatusNone
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamIsCapturing hipStreamIsCapturing
#define cudaStreamLegacy (reinterpret_cast<hipStream_t>(1))  // HIP 6 and later name it
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamWaitEvent hipStreamWaitEvent
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
#define cudaThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode

#else

// Device code that is hardly ever reached.
#define KVIO_COLD __noinline__

#endif  // KVIO_ROCM

namespace kvio::gpu {

#ifdef KVIO_ROCM
constexpr Platform kPlatform = Platform::kRocm;
constexpr size_t kMaxParameterBytes = 4096;  // of a launch; HIP promises no more
#else
constexpr Platform kPlatform = Platform::kCuda;
constexpr size_t kMaxParameterBytes = 32764;  // CUDA 12.1 and later, sm_70 and later
#endif
constexpr PlatformPolicy kPolicy = policy_of(kPlatform);

// Lanes that run together, which shuffles and votes are among. All lanes of a wave belong to one item of work.
constexpr uint32_t kWave = static_cast<uint32_t>(kPolicy.wave_lanes);

constexpr int kMaxDevices = 64;  // of one machine

using Stream = cudaStream_t;
using Event = cudaEvent_t;
using Error = cudaError_t;

// Throws "kvio::<op>: <what> failed: <error>" and clears the sticky copy of the error, so that a later, unrelated
// call does not report it again.
inline void check(const char* op, const char* what, Error error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  std::ostringstream text;
  text << "kvio::" << op << ": " << what << " failed: " << cudaGetErrorString(error) << " (error "
       << static_cast<int>(error) << ")";
  throw std::runtime_error(text.str());
}

// Lets a lazy allocation happen while some stream of this thread is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct LaunchShape {
  unsigned blocks = 1;
  unsigned threads = 1;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks that form a cluster: 1 where the GPU has none
  bool early = false;    // may begin before what is ahead in the stream has ended, and waits for that itself
};

inline Error launch_kernel(const void* kernel, const LaunchShape& shape, void** arguments, Stream stream) {
#ifndef KVIO_ROCM
  if (shape.cluster > 1 || shape.early) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.blocks);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (shape.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.early) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }
#endif
  return cudaLaunchKernel(kernel, dim3(shape.blocks), dim3(shape.threads), arguments, shape.shared_bytes, stream);
}

}  // namespace kvio::gpu
