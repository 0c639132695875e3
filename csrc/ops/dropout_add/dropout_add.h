// residual + multiplier * dropout(x + bias), with the stateless dropout: the arithmetic of an entry, and the launchers.
#pragma once

#include "base/hash.h"

namespace megatron {

// The factor of an entry whose 16 random bits are given: 0, or the dropout scale.
MEGATRON_HOST_DEVICE float dropout_factor(uint32_t bits_16, int32_t threshold, float scale) {
  return is_kept(bits_16, threshold) ? scale : 0.0f;
}

}  // namespace megatron

extern "C" {

// Rows `[n]` int64 are the hashed coordinates of rows; null without dropout. bias and residual may be null.
// Shapes: y, x and residual `[n, h]`, bias `[h]`.
int megatron_dropout_add_forward(void* y, const void* x, const void* bias, const void* residual, const int64_t* rows,
                                 int64_t row_count, int64_t columns, int dtype, int bias_dtype, int32_t threshold,
                                 uint64_t column_base, float multiplier, void* stream);

// The gradients of x and, unless it is null, of the bias. Shapes: dx and dy `[n, h]`, bias_gradient `[h]`; bias_parts,
// float32 `[parts, h]` with one part for `rows_per_part` rows, is scratch.
int megatron_dropout_add_backward(void* dx, void* bias_gradient, float* bias_parts, const void* dy,
                                  const int64_t* rows, int64_t row_count, int64_t columns, int dtype, int bias_dtype,
                                  int32_t threshold, uint64_t column_base, float multiplier, void* stream);
}
