// The one adapter between torch tensors and the request checks.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "request/tensor_view.h"

namespace kvio {

inline TensorView view_of(AtenTensorHandle handle) {
  static const int32_t kCpuType = aoti_torch_device_type_cpu();
  static const int32_t kGpuType = aoti_torch_device_type_cuda();
  static const int32_t kInt16 = aoti_torch_dtype_int16();
  static const int32_t kInt32 = aoti_torch_dtype_int32();
  static const int32_t kInt64 = aoti_torch_dtype_int64();
  TensorView view;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t device_type = 0;
  void* data = nullptr;
  int64_t storage_bytes = 0;
  int64_t storage_offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.ndim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &view.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &storage_bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &storage_offset));
  view.sizes = sizes;
  view.strides = strides;
  view.data = static_cast<char*>(data);
  view.element_size = static_cast<int64_t>(aoti_torch_dtype_element_size(view.dtype));
  view.storage_bytes = storage_bytes - storage_offset * view.element_size;
  view.is_int16 = view.dtype == kInt16;
  view.is_int32 = view.dtype == kInt32;
  view.is_int64 = view.dtype == kInt64;
  view.device =
      device_type == kCpuType ? DeviceKind::kCpu : (device_type == kGpuType ? DeviceKind::kGpu : DeviceKind::kOther);
  if (view.device == DeviceKind::kCpu) view.device_index = -1;
  return view;
}

inline TensorView view_of(const torch::stable::Tensor& tensor) { return view_of(tensor.get()); }

inline std::vector<TensorView> views_of(const std::vector<torch::stable::Tensor>& tensors) {
  std::vector<TensorView> views;
  views.reserve(tensors.size());
  for (const torch::stable::Tensor& t : tensors) views.push_back(view_of(t));
  return views;
}

// Arguments of a boxed call, owned for its duration: the views they give point into their tensors. Unboxing into stable
// tensors would cost one more allocation a tensor, which a 128-tensor call feels.
class BoxedTensor {
 public:
  explicit BoxedTensor(StableIValue value) : handle_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  BoxedTensor(BoxedTensor&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  ~BoxedTensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  BoxedTensor(const BoxedTensor&) = delete;
  BoxedTensor& operator=(const BoxedTensor&) = delete;

  TensorView view() const { return view_of(handle_); }

 private:
  AtenTensorHandle handle_;
};

class BoxedOptionalTensor {
 public:
  explicit BoxedOptionalTensor(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    if (handle) tensor_.emplace(torch::stable::detail::from(*handle));
  }

  std::optional<TensorView> view() const { return tensor_ ? std::optional<TensorView>(tensor_->view()) : std::nullopt; }

 private:
  std::optional<BoxedTensor> tensor_;
};

// Deleting the list frees only its array: every element is a handle of the callee's own.
class BoxedTensorList {
 public:
  explicit BoxedTensorList(StableIValue value) {
    const StableListHandle list = torch::stable::detail::to<StableListHandle>(value);
    size_t count = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
    tensors_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      StableIValue item = 0;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
      tensors_.emplace_back(item);
    }
    torch_delete_list(list);
  }

  std::vector<TensorView> views() const {
    std::vector<TensorView> views;
    views.reserve(tensors_.size());
    for (const BoxedTensor& tensor : tensors_) views.push_back(tensor.view());
    return views;
  }

 private:
  std::vector<BoxedTensor> tensors_;
};

// A boxed string argument, taken off its handle. Not torch's own conversion, which leaks a string a call (seen
// in 2.13).
inline std::string boxed_string(StableIValue value) {
  const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// Python's name of a dtype, for error texts.
inline std::string dtype_name(int32_t dtype) {
  using torch::headeronly::ScalarType;
  switch (static_cast<ScalarType>(dtype)) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return torch::headeronly::toString(static_cast<ScalarType>(dtype));
  }
}

}  // namespace kvio
