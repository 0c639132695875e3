// Lists of tensors on the host: checks, chunks for CPU loops, and the table of a launch; only `.cpp` files include it.
#pragma once

#include <ATen/core/List.h>

#include <type_traits>
#include <vector>

#include "base/host.h"
#include "multi_tensor/multi_tensor.h"

namespace megatron {

constexpr int64_t kHostChunkElements = 1 << 14;

// The part of a tensor that one CPU task works on.
struct HostChunk {
  int64_t tensor, first, count;
};

inline std::vector<HostChunk> host_chunks(at::TensorList tensors) {
  std::vector<HostChunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t elements = tensors[i].numel();
    for (int64_t first = 0; first < elements; first += kHostChunkElements) {
      chunks.push_back({static_cast<int64_t>(i), first, std::min(kHostChunkElements, elements - first)});
    }
  }
  return chunks;
}

// Calls `body` with a value of the element type of a dtype of at most 32 bits.
template <typename Body>
auto with_element(const at::Tensor& tensor, Body body) {
  switch (dtype_code(tensor.scalar_type())) {
    case kFloat16: return body(Half());
    case kBFloat16: return body(BFloat16());
    default: return body(float());
  }
}

constexpr int64_t kBlock = 1024;  // elements converted at once

template <typename T>
MEGATRON_CLONES static void load_scaled(float* to, const T* from, int64_t count, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = load(from + i) * factor;
}

template <typename T>
MEGATRON_CLONES static void store_all(T* to, const float* from, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(to + i, from[i]);
}

// Checks that tensors have no gaps and two lists the same memory layout, so that both can be gone through as flat memory.
inline void check_list(at::TensorList tensors, at::TensorList others, const char* operation, const char* name) {
  TORCH_CHECK(tensors.size() == others.size(), operation, ": ", name, " are ", others.size(), " tensors for ",
              tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor &tensor = tensors[i], &other = others[i];
    TORCH_CHECK(other.scalar_type() == at::kFloat || other.scalar_type() == at::kHalf ||
                    other.scalar_type() == at::kBFloat16,
                operation, ": ", name, "[", i, "] is ", other.scalar_type(),
                "; it must be float32, float16 or bfloat16");
    TORCH_CHECK(other.is_non_overlapping_and_dense(), operation, ": ", name, "[", i, "] of shape ", other.sizes(),
                " and strides ", other.strides(), " has gaps; call contiguous() first");
    TORCH_CHECK(tensor.numel() == other.numel() && tensor.device() == other.device() &&
                    (tensor.strides() == other.strides() || (tensor.is_contiguous() && other.is_contiguous())),
                operation, ": ", name, "[", i, "] is ", other.sizes(), " on ", other.device(), ", and should be ",
                tensor.sizes(), " on ", tensor.device(), " with the same memory layout");
    TORCH_CHECK(tensor.device() == tensors[0].device(), operation, ": tensors are on ", tensors[0].device(), " and ",
                tensor.device(), "; all must be on one device");
  }
}

// The table of a launch, on the tensors' device. The address of an undefined tensor is 0.
struct DeviceTable {
  at::Tensor entries;
  int64_t chunks;
};

inline DeviceTable device_table(const std::vector<std::vector<at::Tensor>>& kinds, at::Device device) {
  const std::vector<at::Tensor>& first = kinds[0];
  const int64_t tensors = static_cast<int64_t>(first.size()), columns = static_cast<int64_t>(kinds.size());
  const at::Tensor entries = at::empty({(columns + 3) * tensors + 1}, at::TensorOptions().dtype(at::kLong));
  int64_t* to = entries.mutable_data_ptr<int64_t>();
  int64_t chunks = 0;
  for (int64_t i = 0; i < tensors; ++i) {
    int64_t codes = 0;
    for (int64_t kind = 0; kind < columns; ++kind) {
      const at::Tensor& tensor = kinds[kind][i];
      to[kind * tensors + i] = tensor.defined() ? reinterpret_cast<int64_t>(tensor.const_data_ptr()) : 0;
      if (tensor.defined()) codes |= static_cast<int64_t>(dtype_code(tensor.scalar_type())) << (8 * kind);
    }
    to[columns * tensors + i] = first[i].numel();
    to[(columns + 1) * tensors + i] = chunks;
    to[(columns + 2) * tensors + 1 + i] = codes;
    chunks += chunks_of(first[i].numel());
  }
  to[(columns + 2) * tensors] = chunks;
  return {entries.to(device, /*non_blocking=*/true), chunks};
}

}  // namespace megatron
