// residual + multiplier * dropout(x + bias): CPU loops, and the operation as torch sees it.
#include "dropout_add/dropout_add.h"

#include <vector>

#include "common/host.h"

namespace megatron {
namespace {

constexpr int64_t kBlockPairs = 256;  // pairs of columns whose random bits are held at once

// What every row of a call shares.
template <typename T>
struct Settings {
  const Wide<T>* bias;            // [h] or null
  const uint32_t* column_hashes;  // [h / 2, rounded up]
  int64_t columns;
  int32_t threshold;
  Wide<T> scale, multiplier;
};

// One row: a block of columns at a time, first their random bits, then the arithmetic, so that both loops vectorise.
// Rounds after each operation, as the composition of torch's operations does (the build turns contraction off).
template <typename T>
MEGATRON_CLONES void add_row(T* y, const T* x, const T* residual, uint32_t row, const Settings<T>& of) {
  uint32_t bits[kBlockPairs];
  uint16_t halves[2 * kBlockPairs];
  for (int64_t first = 0; first < of.columns; first += 2 * kBlockPairs) {
    const int64_t count = std::min(2 * kBlockPairs, of.columns - first), pairs = (count + 1) / 2;
    if (of.threshold > 0) {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) bits[i] = pair_bits(row, of.column_hashes[first / 2 + i]);
      memcpy(halves, bits, sizeof(uint32_t) * pairs);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      Wide<T> value = load(x + first + i);
      if (of.bias != nullptr) value += of.bias[first + i];
      if (of.threshold > 0) value *= is_kept(halves[i], of.threshold) ? of.scale : 0;
      value *= of.multiplier;
      if (residual != nullptr) value += load(residual + first + i);
      store(y + first + i, value);
    }
  }
}

std::vector<uint32_t> column_hashes(int64_t columns, uint64_t column_base) {
  std::vector<uint32_t> hashes((columns + 1) / 2);
  for (size_t pair = 0; pair < hashes.size(); ++pair) hashes[pair] = column_hash(pair, column_base);
  return hashes;
}

// Row numbers are the hashed coordinates' low halves.
struct Dropout {
  const int64_t* rows;
  int32_t threshold;
  uint64_t column_base;
};

template <typename T>
void run(const at::Tensor& y, const at::Tensor& x, const at::Tensor& wide_bias, const at::Tensor& residual,
         const Dropout& dropout, double multiplier) {
  const int64_t columns = x.size(-1), rows = columns > 0 ? x.numel() / columns : 0;
  const auto hashes = column_hashes(dropout.threshold > 0 ? columns : 0, dropout.column_base);
  const Settings<T> settings{wide_bias.defined() ? data_of<Wide<T>>(wide_bias) : nullptr,
                             hashes.data(),
                             columns,
                             dropout.threshold,
                             static_cast<Wide<T>>(dropout.threshold < kDropoutSteps
                                                      ? 65536.0 / (kDropoutSteps - dropout.threshold)
                                                      : 0.0),
                             static_cast<Wide<T>>(multiplier)};
  const T* from = data_of<T>(x);
  const T* added = residual.defined() ? data_of<T>(residual) : nullptr;
  T* to = mutable_data_of<T>(y);
  at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const uint32_t hash = dropout.threshold > 0 ? static_cast<uint32_t>(dropout.rows[row]) : 0;
      add_row<T>(to + row * columns, from + row * columns, added ? added + row * columns : nullptr, hash, settings);
    }
  });
}

void check(const at::Tensor& x, const at::Tensor& other, const char* name) {
  TORCH_CHECK(other.sizes() == x.sizes() && other.scalar_type() == x.scalar_type(), "dropout_add: ", name, " is ",
              other.scalar_type(), other.sizes(), " and x is ", x.scalar_type(), x.sizes(),
              "; both must have the same shape and dtype");
}

Dropout dropout_of(const at::Tensor& x, const std::optional<at::Tensor>& rows, int64_t threshold,
                   int64_t column_base) {
  TORCH_CHECK(x.dim() > 0, "dropout_add: x has no dimensions; it needs at least one");
  TORCH_CHECK(threshold >= 0 && threshold <= kDropoutSteps, "dropout_add: threshold is ", threshold,
              "; it must be between 0 and 65536");
  if (threshold == 0) return {nullptr, 0, 0};
  TORCH_CHECK(rows.has_value() && rows->scalar_type() == at::kLong && rows->is_contiguous() &&
                  rows->numel() * x.size(-1) == x.numel(),
              "dropout_add: rows must be a contiguous int64 tensor with one entry for each row of x ", x.sizes());
  return {rows->const_data_ptr<int64_t>(), static_cast<int32_t>(threshold), static_cast<uint64_t>(column_base)};
}

at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& rows,
                   int64_t threshold, int64_t column_base, double multiplier) {
  const Dropout dropout = dropout_of(x, rows, threshold, column_base);
  if (residual.has_value()) check(x, *residual, "residual");
  TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == x.size(-1)),
              "dropout_add: bias must have one entry for each of the ", x.size(-1), " columns");
  const c10::OptionalDeviceGuard guard(x.device());
  const at::Tensor from = x.contiguous(), added = residual.has_value() ? residual->contiguous() : at::Tensor();
  const at::Tensor result = at::empty_like(from);
  if (x.numel() == 0) return result;
#if defined(MEGATRON_WITH_CUDA)
  if (x.is_cuda()) {
    const at::Tensor own_bias = bias.has_value() ? bias->contiguous() : at::Tensor();
    check_launch(megatron_dropout_add_forward(
                     result.mutable_data_ptr(), from.const_data_ptr(),
                     own_bias.defined() ? own_bias.const_data_ptr() : nullptr,
                     added.defined() ? added.const_data_ptr() : nullptr, dropout.rows, x.numel() / x.size(-1),
                     x.size(-1), dtype_code(x.scalar_type()),
                     own_bias.defined() ? dtype_code(own_bias.scalar_type()) : kFloat32, dropout.threshold,
                     dropout.column_base, static_cast<float>(multiplier), stream_of(x)),
                 "dropout_add");
    return result;
  }
#endif
  const at::ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide_bias = bias.has_value() ? bias->to(wide).contiguous() : at::Tensor();
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] { run<T>(result, from, wide_bias, added, dropout, multiplier); });
  return result;
}

at::Tensor backward(const at::Tensor& gradient, const std::optional<at::Tensor>& rows, int64_t threshold,
                    int64_t column_base, double multiplier) {
  const Dropout dropout = dropout_of(gradient, rows, threshold, column_base);
  const c10::OptionalDeviceGuard guard(gradient.device());
  const at::Tensor from = gradient.contiguous(), result = at::empty_like(from);
  if (gradient.numel() == 0) return result;
#if defined(MEGATRON_WITH_CUDA)
  if (gradient.is_cuda()) {
    check_launch(megatron_dropout_add_backward(result.mutable_data_ptr(), from.const_data_ptr(), dropout.rows,
                                               from.numel() / from.size(-1), from.size(-1),
                                               dtype_code(from.scalar_type()), dropout.threshold,
                                               dropout.column_base, static_cast<float>(multiplier), stream_of(from)),
                 "dropout_add");
    return result;
  }
#endif
  MEGATRON_ELEMENTS(from.scalar_type(), T,
                    [&] { run<T>(result, from, at::Tensor(), at::Tensor(), dropout, multiplier); });
  return result;
}

}  // namespace
}  // namespace megatron

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor? rows, int threshold, int column_base, "
      "float multiplier) -> Tensor");
  library.def(
      "dropout_add_backward(Tensor gradient, Tensor? rows, int threshold, int column_base, float multiplier) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("dropout_add", &megatron::forward);
  library.impl("dropout_add_backward", &megatron::backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("dropout_add", &megatron::forward);
  library.impl("dropout_add_backward", &megatron::backward);
}
#endif
