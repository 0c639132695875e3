// residual + multiplier * dropout(x + bias) on a GPU: a thread per pair of columns, whose 32 random bits it draws.
#include "dropout_add/dropout_add.h"

#include "common/device.h"

namespace {

constexpr int kThreads = 256;

// One entry, rounded after each operation as the composition of torch's operations is; `__fmul_rn` and `__fadd_rn` are
// never contracted.
__device__ __forceinline__ float entry(float value, const float* bias, const float* residual, float factor,
                                       float multiplier) {
  if (bias != nullptr) value = __fadd_rn(value, *bias);
  value = __fmul_rn(__fmul_rn(value, factor), multiplier);
  return residual != nullptr ? __fadd_rn(value, *residual) : value;
}

template <typename T, typename B>
__global__ void __launch_bounds__(kThreads)
    add_rows(T* __restrict__ y, const T* __restrict__ x, const B* __restrict__ bias, const T* __restrict__ residual,
             const int64_t* __restrict__ rows, int64_t row_count, int64_t columns, int32_t threshold,
             uint64_t column_base, float scale, float multiplier) {
  const int64_t pairs = (columns + 1) / 2, all = row_count * pairs;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += step) {
    const int64_t row = i / pairs, pair = i - row * pairs;
    const uint32_t bits =
        threshold > 0
            ? megatron::pair_bits(static_cast<uint32_t>(rows[row]), megatron::column_hash(pair, column_base))
            : 0;
    MEGATRON_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int64_t column = 2 * pair + part, at = row * columns + column;
      if (column >= columns) continue;
      const float factor = threshold > 0 ? megatron::dropout_factor(bits >> (16 * part), threshold, scale) : 1.0f;
      const float own_bias = bias != nullptr ? to_float(bias[column]) : 0.0f;
      const float own_residual = residual != nullptr ? to_float(residual[at]) : 0.0f;
      y[at] = from_float<T>(entry(to_float(x[at]), bias != nullptr ? &own_bias : nullptr,
                                  residual != nullptr ? &own_residual : nullptr, factor, multiplier));
    }
  }
}

template <typename T, typename B>
int launch(void* y, const void* x, const void* bias, const void* residual, const int64_t* rows, int64_t row_count,
           int64_t columns, int32_t threshold, uint64_t column_base, float multiplier, void* stream) {
  const int64_t pairs = row_count * ((columns + 1) / 2);
  MEGATRON_LAUNCH((add_rows<T, B>), grid_size(pairs, kThreads), kThreads, 0, stream, static_cast<T*>(y),
                  static_cast<const T*>(x), static_cast<const B*>(bias), static_cast<const T*>(residual), rows,
                  row_count, columns, threshold, column_base, megatron::dropout_scale(threshold), multiplier);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

extern "C" int megatron_dropout_add_forward(void* y, const void* x, const void* bias, const void* residual,
                                            const int64_t* rows, int64_t row_count, int64_t columns, int dtype,
                                            int bias_dtype, int32_t threshold, uint64_t column_base,
                                            float multiplier, void* stream) {
  return with_type(dtype, [&](auto element) {
    return with_type(bias_dtype, [&](auto bias_element) {
      return launch<decltype(element), decltype(bias_element)>(y, x, bias, residual, rows, row_count, columns,
                                                               threshold, column_base, multiplier, stream);
    });
  });
}

extern "C" int megatron_dropout_add_backward(void* dx, const void* dy, const int64_t* rows, int64_t row_count,
                                             int64_t columns, int dtype, int32_t threshold, uint64_t column_base,
                                             float multiplier, void* stream) {
  return megatron_dropout_add_forward(dx, dy, nullptr, nullptr, rows, row_count, columns, dtype, megatron::kFloat32, threshold,
                                      column_base, multiplier, stream);
}
