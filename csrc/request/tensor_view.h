// What the request checks need to know of a tensor: plain facts, so that they run (and are tested) without torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvio {

enum class DeviceKind : uint8_t { kCpu, kGpu, kOther };

// Borrowed view: `sizes` and `strides` (in elements) live as long as the tensor they describe.
struct TensorView {
  char* data = nullptr;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t ndim = 0;
  int64_t element_size = 0;   // bytes
  int64_t storage_bytes = 0;  // of its storage, from `data` on
  int32_t dtype = 0;          // the caller's code: only compared, and named through dtype_name
  bool is_int16 = false;
  bool is_int32 = false;
  bool is_int64 = false;
  DeviceKind device = DeviceKind::kCpu;
  int32_t device_index = -1;
};

using DtypeName = std::string (*)(int32_t dtype);

inline std::string device_name(DeviceKind kind, int32_t index) {
  if (kind == DeviceKind::kCpu) return "cpu";
  const char* base = kind == DeviceKind::kGpu ? "cuda:" : "device:";
  return base + std::to_string(index);
}

inline std::string shape_text(const int64_t* sizes, int64_t ndim) {
  std::string text = "[";
  for (int64_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

inline bool is_empty(const TensorView& t) {
  for (int64_t i = 0; i < t.ndim; ++i) {
    if (t.sizes[i] == 0) return true;
  }
  return false;
}

// Bytes from the first to one past the last byte that the view can touch; 0 for an empty tensor.
inline int64_t extent_bytes(const TensorView& t) {
  if (is_empty(t)) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i < t.ndim; ++i) {
    if (t.sizes[i] > 1) last += (t.sizes[i] - 1) * t.strides[i];
  }
  return (last + 1) * t.element_size;
}

}  // namespace kvio
