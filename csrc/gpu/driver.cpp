#include "gpu/driver.h"

#include <cuda.h>

#include <stdexcept>

#include "gpu/platform.h"

namespace kvio::gpu {
namespace {

// Null when the driver lacks the call.
void* entry_point(const char* symbol, unsigned int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(symbol, &function, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encode_tiled() {
  static const auto function = reinterpret_cast<EncodeTiled>(entry_point("cuTensorMapEncodeTiled", 12000));
  return function;
}

// The call had an argument more, the index of what failed, before CUDA 13. A driver serves every version up to its own,
// so which prototype is right depends on the version that was asked for and not on the driver's.
using BatchCopy12080 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                                    size_t*, CUstream);
using BatchCopy13000 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                                    CUstream);
struct BatchCopyCalls {
  BatchCopy13000 v13000 = reinterpret_cast<BatchCopy13000>(entry_point("cuMemcpyBatchAsync", 13000));
  BatchCopy12080 v12080 =
      v13000 == nullptr ? reinterpret_cast<BatchCopy12080>(entry_point("cuMemcpyBatchAsync", 12080)) : nullptr;
};

const BatchCopyCalls& batch_copy_calls() {
  static const BatchCopyCalls calls;
  return calls;
}

// Driver calls need a current context, which a new thread gets from the runtime only.
bool bind_context() {
  int device = 0;
  const bool bound = cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  if (!bound) (void)cudaGetLastError();
  return bound;
}

CUmemLocation location_of(int side) {
  CUmemLocation location = {};
  location.type = side == kHostSide ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = side == kHostSide ? 0 : side;
  return location;
}

}  // namespace

HostRange query_host_range(const void* address) {
  using GetAttributes = CUresult (*)(unsigned int, CUpointer_attribute*, void**, CUdeviceptr);
  static const auto get_attributes = reinterpret_cast<GetAttributes>(entry_point("cuPointerGetAttributes", 7000));
  HostRange range;
  if (get_attributes == nullptr) return range;

  CUmemorytype type = static_cast<CUmemorytype>(0);
  CUdeviceptr alias = 0;
  CUdeviceptr begin = 0;
  size_t size = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* out[] = {&type, &alias, &begin, &size};
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const auto is_page_locked = [&] {
    const CUresult result = get_attributes(4, wanted, out, static_cast<CUdeviceptr>(at));
    return result == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST && alias != 0 && size != 0;
  };
  // A thread without a context has no device address of anything; the answer is then no.
  if (!is_page_locked() && !(bind_context() && is_page_locked())) return range;
  range.page_locked = true;
  // The driver reports the range in device addresses; the host address of its start follows from this address.
  const uintptr_t before = static_cast<uintptr_t>(alias - begin);
  range.begin = at - before;
  range.end = range.begin + size;
  range.alias = static_cast<uintptr_t>(begin);
  return range;
}

bool has_context(int device) {
  using GetState = CUresult (*)(CUdevice, unsigned int*, int*);
  static const auto get_state = reinterpret_cast<GetState>(entry_point("cuDevicePrimaryCtxGetState", 7000));
  unsigned int flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

bool has_tensor_maps() { return encode_tiled() != nullptr; }

bool encode_box_map(const BoxShape& shape, const void* base, void* map) {
  constexpr int64_t kElement = 8;
  const auto dim = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t dims[] = {dim(shape.piece_bytes / kElement), dim(shape.dims[0]), dim(shape.dims[1]),
                             dim(shape.dims[2])};
  const cuuint64_t strides[] = {dim(shape.strides[0]), dim(shape.strides[1]), dim(shape.strides[2])};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(shape.piece_bytes / kElement),
                            static_cast<cuuint32_t>(shape.box[0]), static_cast<cuuint32_t>(shape.box[1]), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto call = [&] {
    return encode_tiled()(static_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_INT64, 4, const_cast<void*>(base),
                          dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                          CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = call();
  if (result == CUDA_ERROR_INVALID_CONTEXT && bind_context()) result = call();
  return result == CUDA_SUCCESS;
}

bool has_batch_copy() {
  const BatchCopyCalls& calls = batch_copy_calls();
  return calls.v13000 != nullptr || calls.v12080 != nullptr;
}

Error batch_copy(uint64_t* dst, uint64_t* src, size_t* nbytes, size_t count, BatchSides sides, Stream stream) {
  static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t), "addresses are handed over as they are");
  CUmemcpyAttributes attributes = {};  // one for all copies; no flags, which weaken the order of source accesses
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.srcLocHint = location_of(sides.src);
  attributes.dstLocHint = location_of(sides.dst);
  size_t first = 0;
  size_t failed = 0;
  CUdeviceptr* to = reinterpret_cast<CUdeviceptr*>(dst);
  CUdeviceptr* from = reinterpret_cast<CUdeviceptr*>(src);
  const BatchCopyCalls& calls = batch_copy_calls();
  const auto call = [&] {
    return calls.v13000 != nullptr ? calls.v13000(to, from, nbytes, count, &attributes, &first, 1, stream)
                                   : calls.v12080(to, from, nbytes, count, &attributes, &first, 1, &failed, stream);
  };
  CUresult result = call();
  if (result == CUDA_ERROR_INVALID_CONTEXT && bind_context()) result = call();
  return static_cast<Error>(result);
}

std::vector<EntryPoint> entry_points() {
  std::vector<EntryPoint> points;
  for (const char* name : {"cuPointerGetAttributes", "cuDevicePrimaryCtxGetState"}) {
    points.push_back({name, entry_point(name, 7000) != nullptr});
  }
  points.push_back({"cuTensorMapEncodeTiled", has_tensor_maps()});
  points.push_back({"cuMemcpyBatchAsync", has_batch_copy()});
  return points;
}

}  // namespace kvio::gpu
