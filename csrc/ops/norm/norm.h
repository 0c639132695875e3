// Layer norm and RMS norm over the last dimension: the arithmetic of an element, the grouping of rows, and the launchers.
//
// The backward pass needs x, the inverse deviation of each row and, for layer norm, its mean: x is kept rather than
// recovered from y, since that would divide by the weight, which may be 0, and y is rounded to the element type.
#pragma once

#include "base/portable.h"

namespace megatron {

// 1 / sqrt(mean of squares + eps), from the sum of the squares of a row's (centred) elements.
// Source: Ba, Kiros, Hinton, "Layer normalization", 2016, equation 4; Zhang and Sennrich, "Root mean square layer
// normalization", 2019, equation 4.
template <typename T>
MEGATRON_HOST_DEVICE T inverse_deviation(T squares, int64_t columns, T eps) {
  return T(1) / sqrt_of(squares / static_cast<T>(columns) + eps);
}

// An element minus the mean, which is 0 for RMS norm, over the deviation.
template <typename T>
MEGATRON_HOST_DEVICE T normalized(T x, T mean, T inverse) {
  return (x - mean) * inverse;
}

// Terms shared by the gradients of a row's elements: the means over the row of the scaled gradient (0 for RMS norm) and of
// its product with the normalized elements.
template <typename T>
struct GradientMeans {
  T of_gradient, of_product;
};

// The gradient of an element of x, from that of the normalized one, which is the incoming gradient times the weight.
// Source: the derivative of the formulas above, with mean and deviation as functions of x.
template <typename T>
MEGATRON_HOST_DEVICE T input_gradient(T scaled_gradient, T normal, T inverse, GradientMeans<T> means) {
  return inverse * (scaled_gradient - means.of_gradient - normal * means.of_product);
}

// Gradients of weight and biases are summed over blocks of rows, then over the blocks. Their number depends only on the
// number of rows, so that the sums are the same for every number of threads and multiprocessors: on a GPU 256 or
// 396, one wave of two or three blocks on the 132 multiprocessors of an H100; on a CPU up to 128, of 64 rows or more.
MEGATRON_HOST_DEVICE int64_t device_rows_per_block(int64_t rows) {
  const int64_t blocks = rows < 16384 ? 256 : 396;
  return rows < blocks ? 1 : (rows + blocks - 1) / blocks;
}
MEGATRON_HOST_DEVICE int64_t host_rows_per_block(int64_t rows) {
  const int64_t share = (rows + 127) / 128;
  return share < 64 ? 64 : share;
}

}  // namespace megatron

extern "C" {

// Normalizes x, or with a residual total = x + branch_bias + residual, which is rounded once and written too. mean is null
// for RMS norm, either bias may be. With zero_centered the weight is its difference from 1.
// Shapes: y, total, x and residual `[n, h]`; mean and inverse `[n]`; weight, bias and branch_bias `[h]`.
int megatron_norm_forward(void* y, void* total, float* mean, float* inverse, const void* x, const void* residual,
                          const void* weight, const void* bias, const void* branch_bias, int64_t rows, int64_t columns,
                          float eps, int zero_centered, int dtype, int weight_dtype, int branch_bias_dtype,
                          void* stream);

// The gradients of x, weight, bias and branch_bias, which is the sum over the rows of that of x; total_gradient, which may
// be null, is added to the gradient of x. mean is null for RMS norm; dbias and dbranch_bias are null if they are not
// requested.
// Shapes: dx, dy, total_gradient and x `[n, h]`; dweight, dbias, dbranch_bias and weight `[h]`; mean and inverse `[n]`;
// partials `[1 to 3, ceil(n / device_rows_per_block(n)), h]`, as many as there are gradients of vectors.
int megatron_norm_backward(void* dx, void* dweight, void* dbias, void* dbranch_bias, float* partials, const void* dy,
                           const void* total_gradient, const void* x, const void* weight, const float* mean,
                           const float* inverse, int64_t rows, int64_t columns, int zero_centered, int dtype,
                           int weight_dtype, int branch_bias_dtype, void* stream);
}
