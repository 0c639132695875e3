// Norms and sums of lists of tensors: the C interface.
//
// A list is a table of int64 in device memory: one column of addresses per kind of tensor, then for each tensor its
// number of elements, the number of chunks of all tensors before it (one entry more: their sum), and its dtype codes.
// So one launch serves lists of any length, and any number of elements.
#pragma once

#include "base/portable.h"

namespace megatron {

constexpr int64_t kChunkElements = 1 << 16;  // the work of a block of threads

MEGATRON_HOST_DEVICE int64_t chunks_of(int64_t elements) { return (elements + kChunkElements - 1) / kChunkElements; }

// The columns of a table for `kinds` kinds of tensors.
struct TensorTable {
  const int64_t* entries;
  int64_t tensors;
  int kinds;

  MEGATRON_HOST_DEVICE int64_t address(int kind, int64_t tensor) const { return entries[kind * tensors + tensor]; }
  MEGATRON_HOST_DEVICE int64_t elements(int64_t tensor) const { return entries[kinds * tensors + tensor]; }
  MEGATRON_HOST_DEVICE int64_t first_chunk(int64_t tensor) const { return entries[(kinds + 1) * tensors + tensor]; }
  // The dtype code of the tensor of a kind: 8 bits each.
  MEGATRON_HOST_DEVICE int dtype(int kind, int64_t tensor) const {
    return static_cast<int>((entries[(kinds + 2) * tensors + 1 + tensor] >> (8 * kind)) & 0xff);
  }
};

}  // namespace megatron

extern "C" {

// 2-norms. `table` has one kind. `partial_sums` is scratch for one float64 per chunk; `norm` and, unless null, `norms` (one
// per tensor) are float32.
int megatron_multi_tensor_norm(float* norm, float* norms, double* partial_sums, const int64_t* table, int64_t tensors,
                               int64_t chunks, void* stream);

// total += addend, in float32. `table` has two kinds: totals, which are float32, and addends.
int megatron_multi_tensor_add(const int64_t* table, int64_t tensors, int64_t chunks, void* stream);
}
