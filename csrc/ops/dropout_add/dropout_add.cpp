// residual + multiplier * dropout(x + bias): CPU loops, and the operation as torch sees it.
#include "dropout_add/dropout_add.h"

#include <tuple>
#include <vector>

#include "base/host.h"
#include "base/row_sums.h"

namespace megatron::dropout_add {
namespace {

constexpr int64_t kBlock = 512;  // columns whose factors are held at once

// Arguments shared by all rows of a call.
template <typename T>
struct Settings {
  const Wide<T>* bias;            // [h] or null
  const uint32_t* column_hashes;  // [h / 2, rounded up]
  int64_t columns;
  int32_t threshold;
  Wide<T> scale, multiplier;
};

// Factors of a block of columns of a row: 0 or the dropout scale.
template <typename Real>
MEGATRON_CLONES void find_factors(Real* factors, uint32_t row, const uint32_t* column_hashes, int64_t pairs,
                                  int32_t threshold, Real scale) {
  uint32_t bits[kBlock / 2];
  uint16_t halves[kBlock];
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) bits[i] = pair_bits(row, column_hashes[i]);
  memcpy(halves, bits, sizeof(uint32_t) * pairs);
#pragma omp simd
  for (int64_t i = 0; i < 2 * pairs; ++i) factors[i] = is_kept(halves[i], threshold) ? scale : 0;
}

// One row in blocks of columns, so that factors stay in the nearest cache. `body(first, count, factors)`.
template <typename T, typename Body>
void for_blocks(uint32_t row, const Settings<T>& of, const Body& body) {
  alignas(64) Wide<T> factors[kBlock];
  if (of.threshold == 0) std::fill(factors, factors + kBlock, Wide<T>(1));
  for (int64_t first = 0; first < of.columns; first += kBlock) {
    const int64_t count = std::min(kBlock, of.columns - first);
    if (of.threshold > 0) {
      find_factors<Wide<T>>(factors, row, of.column_hashes + first / 2, (count + 1) / 2, of.threshold, of.scale);
    }
    body(first, count, factors);
  }
}

// Rounds after each operation, as the composition of torch's operations does (the build turns contraction off).
template <typename T>
MEGATRON_CLONES void add_block(T* y, const T* x, const T* residual, const Wide<T>* bias, const Wide<T>* factors,
                               Wide<T> multiplier, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    Wide<T> value = load(x + i);
    if (bias != nullptr) value += bias[i];
    value = value * factors[i] * multiplier;
    if (residual != nullptr) value += load(residual + i);
    store(y + i, value);
  }
}

// Adds the gradient of x to `sums`, unless that is null.
template <typename T>
MEGATRON_CLONES void gradient_block(T* dx, Wide<T>* sums, const T* dy, const Wide<T>* factors, Wide<T> multiplier,
                                    int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Wide<T> value = load(dy + i) * multiplier * factors[i];
    if (sums != nullptr) sums[i] += value;
    store(dx + i, value);
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

  uint32_t row_hash(int64_t row) const { return threshold > 0 ? static_cast<uint32_t>(rows[row]) : 0; }
};

template <typename T>
Settings<T> settings_of(const Dropout& dropout, const std::vector<uint32_t>& hashes, const at::Tensor& wide_bias,
                        int64_t columns, double multiplier) {
  const int32_t kept = kDropoutSteps - dropout.threshold;
  return {wide_bias.defined() ? data_of<Wide<T>>(wide_bias) : nullptr,
          hashes.data(),
          columns,
          dropout.threshold,
          static_cast<Wide<T>>(kept > 0 ? static_cast<double>(kDropoutSteps) / kept : 0.0),
          static_cast<Wide<T>>(multiplier)};
}

template <typename T>
void run_forward(const at::Tensor& y, const at::Tensor& x, const at::Tensor& wide_bias, const at::Tensor& residual,
                 const Dropout& dropout, double multiplier) {
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const auto hashes = column_hashes(dropout.threshold > 0 ? columns : 0, dropout.column_base);
  const Settings<T> settings = settings_of<T>(dropout, hashes, wide_bias, columns, multiplier);
  const T *from = data_of<T>(x), *added = residual.defined() ? data_of<T>(residual) : nullptr;
  T* to = mutable_data_of<T>(y);
  at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) {
      for_blocks<T>(dropout.row_hash(row), settings, [&](int64_t first, int64_t count, const Wide<T>* factors) {
        const int64_t at = row * columns + first;
        add_block<T>(to + at, from + at, added ? added + at : nullptr,
                     settings.bias ? settings.bias + first : nullptr, factors, settings.multiplier, count);
      });
    }
  });
}

// Returns the gradient of the bias, float32 or float64, if requested.
template <typename T>
at::Tensor run_backward(const at::Tensor& dx, const at::Tensor& dy, const Dropout& dropout, double multiplier,
                        bool needs_bias) {
  const int64_t columns = dy.size(-1), rows = dy.numel() / columns;
  const auto hashes = column_hashes(dropout.threshold > 0 ? columns : 0, dropout.column_base);
  const Settings<T> settings = settings_of<T>(dropout, hashes, at::Tensor(), columns, multiplier);
  const T* from = data_of<T>(dy);
  T* to = mutable_data_of<T>(dx);
  const auto run = [&](int64_t first_row, int64_t last_row, Wide<T>* sums) {
    for (int64_t row = first_row; row < last_row; ++row) {
      for_blocks<T>(dropout.row_hash(row), settings, [&](int64_t first, int64_t count, const Wide<T>* factors) {
        const int64_t at = row * columns + first;
        gradient_block<T>(to + at, sums ? sums + first : nullptr, from + at, factors, settings.multiplier, count);
      });
    }
  };
  if (needs_bias) {
    const auto wide = dy.options().dtype(std::is_same_v<T, double> ? at::kDouble : at::kFloat);
    return column_sums<Wide<T>>(rows, columns, wide, run);
  }
  at::parallel_for(0, rows, rows_per_task(columns),
                   [&](int64_t first_row, int64_t last_row) { run(first_row, last_row, nullptr); });
  return at::Tensor();
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
                  rows->device() == x.device() && rows->numel() * x.size(-1) == x.numel(),
              "dropout_add: rows must be a contiguous int64 tensor on ", x.device(),
              " with one entry for each row of x ", x.sizes());
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
  if (is_on_gpu(x)) {
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
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] { run_forward<T>(result, from, wide_bias, added, dropout, multiplier); });
  return result;
}

// The second result, the gradient of the bias, is empty without a dtype for it.
std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& gradient, const std::optional<at::Tensor>& rows,
                                            int64_t threshold, int64_t column_base, double multiplier,
                                            std::optional<at::ScalarType> bias_dtype) {
  const Dropout dropout = dropout_of(gradient, rows, threshold, column_base);
  const c10::OptionalDeviceGuard guard(gradient.device());
  const at::Tensor from = gradient.contiguous(), result = at::empty_like(from);
  const int64_t columns = from.size(-1);
  const auto options = from.options().dtype(bias_dtype.value_or(from.scalar_type()));
  const at::Tensor of_bias = at::empty({bias_dtype.has_value() ? columns : 0}, options);
  if (gradient.numel() == 0) return {result, of_bias.zero_()};
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(gradient)) {
    const int64_t row_count = from.numel() / columns;
    const at::Tensor parts =
        at::empty({bias_dtype.has_value() ? part_count(row_count) : 0, columns}, options.dtype(at::kFloat));
    check_launch(megatron_dropout_add_backward(
                     result.mutable_data_ptr(), bias_dtype.has_value() ? of_bias.mutable_data_ptr() : nullptr,
                     parts.mutable_data_ptr<float>(), from.const_data_ptr(), dropout.rows, row_count, columns,
                     dtype_code(from.scalar_type()), dtype_code(of_bias.scalar_type()), dropout.threshold,
                     dropout.column_base, static_cast<float>(multiplier), stream_of(from)),
                 "dropout_add_backward");
    return {result, of_bias};
  }
#endif
  MEGATRON_ELEMENTS(from.scalar_type(), T, [&] {
    const at::Tensor sums = run_backward<T>(result, from, dropout, multiplier, bias_dtype.has_value());
    if (sums.defined()) of_bias.copy_(sums);
  });
  return {result, of_bias};
}

}  // namespace
}  // namespace megatron::dropout_add

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor? rows, int threshold, int column_base, "
      "float multiplier) -> Tensor");
  library.def(
      "dropout_add_backward(Tensor gradient, Tensor? rows, int threshold, int column_base, float multiplier, "
      "ScalarType? bias_dtype) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("dropout_add", &megatron::dropout_add::forward);
  library.impl("dropout_add_backward", &megatron::dropout_add::backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("dropout_add", &megatron::dropout_add::forward);
  library.impl("dropout_add_backward", &megatron::dropout_add::backward);
}
#endif
