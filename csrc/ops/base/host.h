// Common code of CPU loops and bindings; only `.cpp` files include it. torch's headers are included one by one,
// since the umbrella header takes four times as long to compile.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#if defined(MEGATRON_WITH_CUDA) && !defined(MEGATRON_SIMT)
#include <c10/cuda/CUDAStream.h>
#endif

#include "base/portable.h"

// Row loops are compiled for several instruction sets; the machine's is selected when the library is loaded. Functions
// that they call must be inlined, and they must be called from the body of a parallel loop, never the other way.
#if !defined(MEGATRON_NATIVE) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGATRON_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGATRON_CLONES
#endif

namespace megatron {

// 16-bit elements in memory; arithmetic is in float32.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

MEGATRON_HOST_DEVICE float load(const float* from) { return *from; }
MEGATRON_HOST_DEVICE double load(const double* from) { return *from; }
MEGATRON_HOST_DEVICE float load(const BFloat16* from) {
  return bit_cast<float>(static_cast<uint32_t>(from->bits) << 16);
}
MEGATRON_HOST_DEVICE float load(const Half* from) {
  // Moves exponent and mantissa into place; the product turns the biased exponent into float32's and is exact for
  // subnormal numbers too. Source: the usual bit layout of IEEE 754 binary16.
  const uint32_t size = static_cast<uint32_t>(from->bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(from->bits & 0x8000) << 16;
  const float finite = bit_cast<float>(size) * 5.192296858534828e+33f;  // 2^112
  const uint32_t bits = size < 0x0f800000u ? bit_cast<uint32_t>(finite) : (size | 0x7f800000u);
  return bit_cast<float>(bits | sign);
}

MEGATRON_HOST_DEVICE void store(float* to, float value) { *to = value; }
MEGATRON_HOST_DEVICE void store(double* to, double value) { *to = value; }
MEGATRON_HOST_DEVICE void store(BFloat16* to, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  to->bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}
MEGATRON_HOST_DEVICE void store(Half* to, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), size = bits & 0x7fffffffu;
  const uint32_t normal = (size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u) >> 13;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  uint32_t result = size < 0x38800000u ? subnormal : normal;
  result = size >= 0x477ff000u ? 0x7c00u : result;
  result = size > 0x7f800000u ? 0x7e00u : result;
  to->bits = static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
}

// The element type in memory of a torch dtype.
#define MEGATRON_ELEMENTS(dtype, T, ...)                                                       \
  [&] {                                                                                        \
    switch (dtype) {                                                                           \
      case at::kFloat: { using T = float; return __VA_ARGS__(); }                              \
      case at::kDouble: { using T = double; return __VA_ARGS__(); }                            \
      case at::kHalf: { using T = ::megatron::Half; return __VA_ARGS__(); }                    \
      case at::kBFloat16: { using T = ::megatron::BFloat16; return __VA_ARGS__(); }            \
      default: TORCH_CHECK(false, "expected float32, float64, float16 or bfloat16, not ", dtype); \
    }                                                                                          \
  }()

template <typename T>
const T* data_of(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* mutable_data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <typename T>
const T* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? data_of<T>(*tensor) : nullptr;
}

// The dtype code of the C launchers.
inline int dtype_code(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return kFloat32;
    case at::kHalf: return kFloat16;
    case at::kBFloat16: return kBFloat16;
    default: TORCH_CHECK(false, "expected float32, float16 or bfloat16 on a GPU, not ", dtype);
  }
}

// True if a launcher handles a tensor. With MEGATRON_SIMT, the launchers are those of the tests' emulator, whose GPU is
// the CPU.
inline bool is_on_gpu(const at::Tensor& tensor) {
#if defined(MEGATRON_SIMT)
  return tensor.is_cpu();
#else
  return tensor.is_cuda();
#endif
}

// The stream that torch uses on the tensor's device.
inline void* stream_of(const at::Tensor& tensor) {
#if defined(MEGATRON_SIMT)
  static_cast<void>(tensor);
  return nullptr;
#elif defined(MEGATRON_WITH_CUDA)
  return c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
#else
  TORCH_CHECK(false, "this library was built without CUDA, and the tensor is on ", tensor.device());
#endif
}

// Raises the error of a failed launch.
inline void check_launch(int error, const char* operation) {
  TORCH_CHECK(error == 0, operation, " failed on the GPU with CUDA error ", error);
}

constexpr int64_t kElementsPerTask = 1 << 15;

// Rows per task of a parallel loop, enough to pay for starting a task.
inline int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
}

}  // namespace megatron
