// Layer norm and RMS norm: the loops for the CPU, and the operators for both devices.

#include "norm/norm.h"


#include <algorithm>
#include <tuple>

#include "base/host.h"

namespace megatron::norm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kLanes = 64;  // partial sums of a row: four vectors of AVX-512, so that additions overlap

template <typename W>
MEGATRON_HOST_DEVICE W sum_of_lanes(W* lanes) {
  for (int64_t width = kLanes / 2; width >= 16; width /= 2) {
#pragma omp simd
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  W sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t lane = 0; lane < 16; ++lane) sum += lanes[lane];
  return sum;
}

// The sum of term(j) over the columns of a row.
template <typename W, typename Term>
MEGATRON_HOST_DEVICE W sum_of(int64_t columns, Term term) {
  W lanes[kLanes] = {};
  int64_t begin = 0;
  for (; begin + kLanes <= columns; begin += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(begin + lane);
  }
  W rest = 0;
#pragma omp simd reduction(+ : rest)
  for (int64_t j = begin; j < columns; ++j) rest += term(j);
  return sum_of_lanes(lanes) + rest;
}

// Prefetches the next row while the present one is processed in the first-level cache. Long
// rows are not prefetched: the processor detects their pattern, and two of them would not fit.
template <typename T>
MEGATRON_HOST_DEVICE void prefetch_row(const T* row, int64_t columns, bool is_written) {
  constexpr int64_t kCacheLine = 64, kLongestBytes = 8192;
  const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
  const char* begin = reinterpret_cast<const char*>(row);
  for (int64_t offset = 0; bytes <= kLongestBytes && offset < bytes; offset += kCacheLine) {
    if (is_written) {
      __builtin_prefetch(begin + offset, 1);
    } else {
      __builtin_prefetch(begin + offset, 0);
    }
  }
}

// A value as it would be read back after being stored as T.
template <typename T>
MEGATRON_HOST_DEVICE Wide<T> rounded(Wide<T> value) {
  T stored;
  store(&stored, value);
  return load(&stored);
}

template <typename T>
struct ForwardCall {
  T* y;
  T* total;             // null without a residual
  Wide<T>* mean;        // null for RMS norm
  Wide<T>* inverse;
  const T* x;
  const T* residual;    // null without one
  const Wide<T>* branch_bias;  // null without one; only with a residual
  const Wide<T>* scale;
  const Wide<T>* shift;  // null without a bias
  int64_t columns;
  Wide<T> eps;
  bool rounds_first;  // before the product with the weight: RMS norm whose weight is not zero-centred, as in Llama
};

template <typename T>
MEGATRON_HOST_DEVICE void scale_row(const ForwardCall<T>& call, T* y, const T* x, Wide<T> mean, Wide<T> inverse) {
  const Wide<T>*scale = call.scale, *shift = call.shift;
  if (shift != nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < call.columns; ++j) {
      store(y + j, normalized<Wide<T>>(load(x + j), mean, inverse) * scale[j] + shift[j]);
    }
  } else if (call.rounds_first) {
#pragma omp simd
    for (int64_t j = 0; j < call.columns; ++j) {
      store(y + j, rounded<T>(normalized<Wide<T>>(load(x + j), mean, inverse)) * scale[j]);
    }
  } else {
#pragma omp simd
    for (int64_t j = 0; j < call.columns; ++j) {
      store(y + j, normalized<Wide<T>>(load(x + j), mean, inverse) * scale[j]);
    }
  }
}

// The sum of a row, with one rounding at its end.
template <typename T>
MEGATRON_HOST_DEVICE void add_row(T* total, const T* x, const T* residual, const Wide<T>* branch_bias,
                                  int64_t columns) {
  if (branch_bias != nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) store(total + j, load(x + j) + branch_bias[j] + load(residual + j));
  } else {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) store(total + j, load(x + j) + load(residual + j));
  }
}

template <typename T>
MEGATRON_CLONES void forward_rows(const ForwardCall<T>& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t columns = call.columns;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = call.x + row * columns;
    if (call.residual != nullptr) {
      T* total = call.total + row * columns;
      add_row(total, x, call.residual + row * columns, call.branch_bias, columns);
      x = total;
    }
    W mean = 0;
    if (call.mean != nullptr) {
      mean = sum_of<W>(columns, [&](int64_t j) __attribute__((always_inline)) { return load(x + j); }) / columns;
      call.mean[row] = mean;
    }
    if (row + 1 < end) {
      prefetch_row(call.x + (row + 1) * columns, columns, false);
      prefetch_row(call.y + (row + 1) * columns, columns, true);
    }
    const W squares = sum_of<W>(columns, [&](int64_t j) __attribute__((always_inline)) {
      const W centred = load(x + j) - mean;
      return centred * centred;
    });
    const W inverse = inverse_deviation<W>(squares, columns, call.eps);
    call.inverse[row] = inverse;
    scale_row(call, call.y + row * columns, x, mean, inverse);
  }
}

template <typename T>
struct BackwardCall {
  T* dx;
  Wide<T>* of_weight;       // partial sums of the row blocks, [blocks, h]
  Wide<T>* of_bias;         // null without a bias
  Wide<T>* of_branch_bias;  // null if not requested
  const T* dy;
  const T* direct;  // the gradient that bypasses the norm; without a residual one row of zeros for all rows
  const T* x;
  const Wide<T>* scale;
  const Wide<T>* mean;  // null for RMS norm
  const Wide<T>* inverse;
  int64_t direct_stride, rows, columns, rows_per_block;
};

// One row of the gradient: its arguments are resolved, so that the loops below see plain pointers.
template <typename T>
struct BackwardRow {
  T* dx;
  Wide<T>*of_weight, *of_bias, *of_branch_bias;
  const T *dy, *direct, *x;
  const Wide<T>* scale;
  Wide<T> mean, inverse;
  int64_t columns;
};

template <typename T>
MEGATRON_HOST_DEVICE GradientMeans<Wide<T>> gradient_means(const BackwardRow<T>& row, bool subtracts_mean) {
  using W = Wide<T>;
  const T *dy = row.dy, *x = row.x;
  const W *scale = row.scale, mean = row.mean, inverse = row.inverse, columns = static_cast<W>(row.columns);
  const W products = sum_of<W>(row.columns, [=](int64_t j) __attribute__((always_inline)) {
    return load(dy + j) * scale[j] * normalized<W>(load(x + j), mean, inverse);
  });
  if (!subtracts_mean) return {W(0), products / columns};
  const W gradients = sum_of<W>(row.columns, [=](int64_t j) __attribute__((always_inline)) {
    return load(dy + j) * scale[j];
  });
  return {gradients / columns, products / columns};
}

template <typename T, bool kHasBias, bool kSumsX>
MEGATRON_HOST_DEVICE void write_gradients(const BackwardRow<T>& row, GradientMeans<Wide<T>> means) {
  using W = Wide<T>;
  const T *dy = row.dy, *x = row.x, *direct = row.direct;
  const W *scale = row.scale, mean = row.mean, inverse = row.inverse;
  W *of_weight = row.of_weight, *of_bias = row.of_bias, *of_branch_bias = row.of_branch_bias;
  T* dx = row.dx;
#pragma omp simd
  for (int64_t j = 0; j < row.columns; ++j) {
    const W gradient = load(dy + j), normal = normalized<W>(load(x + j), mean, inverse);
    of_weight[j] += gradient * normal;
    if constexpr (kHasBias) of_bias[j] += gradient;
    const W of_x = input_gradient<W>(gradient * scale[j], normal, inverse, means) + load(direct + j);
    if constexpr (kSumsX) of_branch_bias[j] += of_x;
    store(dx + j, of_x);
  }
}

// The partial sums of a block, which begin as zeros.
template <typename W>
MEGATRON_HOST_DEVICE W* zeroed(W* partials, int64_t block, int64_t columns) {
  W* sums = partials + block * columns;
  std::fill_n(sums, columns, W(0));
  return sums;
}

template <typename T, bool kHasBias, bool kSumsX>
MEGATRON_CLONES void backward_blocks(const BackwardCall<T>& call, int64_t begin, int64_t end) {
  const int64_t columns = call.columns;
  BackwardRow<T> row;
  row.columns = columns, row.scale = call.scale, row.of_bias = nullptr, row.of_branch_bias = nullptr;
  for (int64_t block = begin; block < end; ++block) {
    row.of_weight = zeroed(call.of_weight, block, columns);
    if constexpr (kHasBias) row.of_bias = zeroed(call.of_bias, block, columns);
    if constexpr (kSumsX) row.of_branch_bias = zeroed(call.of_branch_bias, block, columns);
    const int64_t first = block * call.rows_per_block, last = std::min(call.rows, first + call.rows_per_block);
    for (int64_t n = first; n < last; ++n) {
      row.dx = call.dx + n * columns, row.dy = call.dy + n * columns, row.x = call.x + n * columns;
      row.direct = call.direct + n * call.direct_stride;
      row.mean = call.mean != nullptr ? call.mean[n] : Wide<T>(0), row.inverse = call.inverse[n];
      const GradientMeans<Wide<T>> means = gradient_means(row, call.mean != nullptr);
      if (n + 1 < last) {
        prefetch_row(row.x + columns, columns, false);
        prefetch_row(row.dy + columns, columns, false);
        prefetch_row(row.dx + columns, columns, true);
      }
      write_gradients<T, kHasBias, kSumsX>(row, means);
    }
  }
}

// The sums over the row blocks of columns [begin, end).
template <typename W>
MEGATRON_CLONES void sum_blocks(W* sums, const W* partials, int64_t blocks, int64_t columns, int64_t begin,
                                int64_t end) {
  for (int64_t j = begin; j < end; ++j) sums[j] = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const W* part = partials + block * columns;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) sums[j] += part[j];
  }
}

// The dtype of statistics, and on the CPU of the arithmetic.
at::ScalarType wide_dtype(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

void check_device(const Tensor& tensor, const char* name, const Tensor& x) {
  TORCH_CHECK(tensor.device() == x.device(), "norm: ", name, " is on ", tensor.device(), " and x on ", x.device(),
              "; both must be on the same device");
}

void check_vector(const Tensor& vector, const char* name, const Tensor& x) {
  TORCH_CHECK(vector.dim() == 1 && vector.size(0) == x.size(-1), "norm: ", name, " must have one entry for each of the ",
              x.size(-1), " columns of x; its shape is ", vector.sizes());
  TORCH_CHECK(vector.is_floating_point(), "norm: ", name, " is ", vector.scalar_type(),
              "; it must have a floating-point dtype");
  check_device(vector, name, x);
}

void check_like(const Tensor& tensor, const char* name, const Tensor& x) {
  TORCH_CHECK(tensor.sizes() == x.sizes() && tensor.scalar_type() == x.scalar_type(), "norm: ", name, " is ",
              tensor.scalar_type(), tensor.sizes(), " and x is ", x.scalar_type(), x.sizes(),
              "; both must have the same shape and dtype");
  check_device(tensor, name, x);
}

void check_input(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() >= 1, "norm: x has no dimensions; it needs at least one");
  check_vector(weight, "weight", x);
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : tensor;
}

// Converts weight or bias for the CPU loops: contiguous, wide, and with 1 added to a zero-centered weight.
Tensor widened(const Tensor& vector, const Tensor& x, bool zero_centered) {
  const Tensor wide = vector.to(wide_dtype(x)).contiguous();
  return zero_centered ? wide.add(1) : wide;
}
OptionalTensor widened(const OptionalTensor& bias, const Tensor& x) {
  return bias.has_value() ? OptionalTensor(widened(*bias, x, false)) : bias;
}

// The normalized tensor: x, or its sum with a residual and optionally the bias of the branch.
struct Input {
  Tensor x;
  OptionalTensor residual, branch_bias;
};

struct Forward {
  Tensor y, total, mean, inverse;
};

void forward_on_cpu(const Forward& out, const Input& of, const Tensor& weight, const OptionalTensor& bias, double eps,
                    bool zero_centered) {
  const Tensor &x = of.x, scale = widened(weight, x, zero_centered);
  const OptionalTensor shift = widened(bias, x), branch_bias = widened(of.branch_bias, x);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] {
    using W = Wide<T>;
    ForwardCall<T> call;
    call.y = mutable_data_of<T>(out.y);
    call.total = of.residual.has_value() ? mutable_data_of<T>(out.total) : nullptr;
    call.mean = out.mean.numel() > 0 ? mutable_data_of<W>(out.mean) : nullptr;
    call.inverse = mutable_data_of<W>(out.inverse);
    call.x = data_of<T>(x), call.residual = data_of<T>(of.residual), call.branch_bias = data_of<W>(branch_bias);
    call.scale = data_of<W>(scale), call.shift = data_of<W>(shift);
    call.columns = columns, call.eps = static_cast<W>(eps);
    call.rounds_first = call.mean == nullptr && !zero_centered;
    at::parallel_for(0, rows, rows_per_task(columns),
                     [&](int64_t begin, int64_t end) { forward_rows<T>(call, begin, end); });
  });
}

#if defined(MEGATRON_WITH_CUDA)

// The dtype in which kernels take weight and bias: that of x, or float32.
at::ScalarType device_dtype(const Tensor& weight, const Tensor& x) {
  return weight.scalar_type() == x.scalar_type() ? x.scalar_type() : at::kFloat;
}

// A vector in a dtype that kernels take.
OptionalTensor on_device(const OptionalTensor& vector, at::ScalarType dtype) {
  return vector.has_value() ? OptionalTensor(vector->to(dtype).contiguous()) : vector;
}

void forward_on_device(const Forward& out, const Input& of, const Tensor& weight, const OptionalTensor& bias,
                       double eps, bool zero_centered) {
  const Tensor& x = of.x;
  const at::ScalarType dtype = device_dtype(weight, x);
  const at::ScalarType branch_dtype = of.branch_bias.has_value() ? device_dtype(*of.branch_bias, x) : dtype;
  const Tensor scale = weight.to(dtype).contiguous();
  const OptionalTensor shift = on_device(bias, dtype), branch_bias = on_device(of.branch_bias, branch_dtype);
  const int64_t columns = x.size(-1);
  const int error = megatron_norm_forward(
      out.y.mutable_data_ptr(), of.residual.has_value() ? out.total.mutable_data_ptr() : nullptr,
      out.mean.numel() > 0 ? mutable_data_of<float>(out.mean) : nullptr, mutable_data_of<float>(out.inverse),
      x.const_data_ptr(), data_of<void>(of.residual), scale.const_data_ptr(), data_of<void>(shift),
      data_of<void>(branch_bias), x.numel() / columns, columns, static_cast<float>(eps), zero_centered,
      dtype_code(x.scalar_type()), dtype_code(dtype), dtype_code(branch_dtype), stream_of(x));
  check_launch(error, "norm");
}

#endif

Forward normalize(const Input& of, const Tensor& weight, const OptionalTensor& bias, double eps, bool subtract_mean,
                  bool zero_centered) {
  const Tensor& x = of.x;
  check_input(x, weight);
  if (bias.has_value()) check_vector(*bias, "bias", x);
  if (of.residual.has_value()) check_like(*of.residual, "residual", x);
  if (of.branch_bias.has_value()) check_vector(*of.branch_bias, "branch_bias", x);
  const c10::DeviceGuard guard(x.device());
  const auto options = x.options().dtype(wide_dtype(x));
  const auto statistics = x.sizes().slice(0, x.dim() - 1);
  Forward out;
  out.y = at::empty(x.sizes(), x.options());
  if (of.residual.has_value()) out.total = at::empty(x.sizes(), x.options());
  out.mean = subtract_mean ? at::empty(statistics, options) : at::empty({0}, options);
  out.inverse = at::empty(statistics, options);
  if (x.numel() == 0) return out;
#if defined(MEGATRON_WITH_CUDA)
  const auto run = is_on_gpu(x) ? forward_on_device : forward_on_cpu;
#else
  const auto run = forward_on_cpu;
#endif
  run(out, {x.contiguous(), contiguous(of.residual), of.branch_bias}, weight, bias, eps, zero_centered);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double eps,
                                        bool subtract_mean, bool zero_centered) {
  Forward out = normalize({x, std::nullopt, std::nullopt}, weight, bias, eps, subtract_mean, zero_centered);
  return {out.y, out.mean, out.inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    const OptionalTensor& bias, const OptionalTensor& branch_bias,
                                                    double eps, bool subtract_mean, bool zero_centered) {
  Forward out = normalize({x, residual, branch_bias}, weight, bias, eps, subtract_mean, zero_centered);
  return {out.total, out.y, out.mean, out.inverse};
}

struct Gradients {
  Tensor of_x, of_weight, of_bias, of_branch_bias;  // those of biases are empty if not requested
};

// The requested gradients of biases.
struct Wanted {
  bool bias;
  std::optional<at::ScalarType> branch_dtype;  // of the gradient of the branch's bias, if requested

  bool branch_bias() const { return branch_dtype.has_value(); }
  int64_t sums() const { return 1 + bias + branch_bias(); }
};

// The gradients in the requested dtypes.
Gradients in_dtypes(const Gradients& of, const Tensor& weight, const Wanted& wanted) {
  const at::ScalarType dtype = weight.scalar_type();
  return {of.of_x, of.of_weight.to(dtype), of.of_bias.to(dtype),
          of.of_branch_bias.to(wanted.branch_dtype.value_or(dtype))};
}

Gradients backward_on_cpu(const Tensor& dy, const OptionalTensor& total_gradient, const Tensor& x,
                          const Tensor& weight, const Tensor& mean, const Tensor& inverse, bool zero_centered,
                          const Wanted& wanted) {
  const Tensor scale = widened(weight, x, zero_centered);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const int64_t rows_per_block = host_rows_per_block(rows), blocks = (rows + rows_per_block - 1) / rows_per_block;
  const Tensor partials = at::empty({wanted.sums(), blocks, columns}, scale.options());
  const auto sums = [&](bool is_wanted) { return at::empty({is_wanted ? columns : 0}, scale.options()); };
  const Gradients out{at::empty(x.sizes(), x.options()), sums(true), sums(wanted.bias), sums(wanted.branch_bias())};
  const Tensor direct = total_gradient.has_value() ? *total_gradient : at::empty({columns}, x.options()).zero_();
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] {
    using W = Wide<T>;
    W* partial = mutable_data_of<W>(partials);
    BackwardCall<T> call;
    call.dx = mutable_data_of<T>(out.of_x);
    call.of_weight = partial;
    call.of_bias = wanted.bias ? partial + blocks * columns : nullptr;
    call.of_branch_bias = wanted.branch_bias() ? partial + (wanted.sums() - 1) * blocks * columns : nullptr;
    call.dy = data_of<T>(dy), call.direct = data_of<T>(direct), call.x = data_of<T>(x);
    call.direct_stride = total_gradient.has_value() ? columns : 0;
    call.scale = data_of<W>(scale), call.inverse = data_of<W>(inverse);
    call.mean = mean.numel() > 0 ? data_of<W>(mean) : nullptr;
    call.rows = rows, call.columns = columns, call.rows_per_block = rows_per_block;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      switch (2 * wanted.branch_bias() + wanted.bias) {
        case 0: return backward_blocks<T, false, false>(call, begin, end);
        case 1: return backward_blocks<T, true, false>(call, begin, end);
        case 2: return backward_blocks<T, false, true>(call, begin, end);
        default: return backward_blocks<T, true, true>(call, begin, end);
      }
    });
    at::parallel_for(0, columns, rows_per_task(blocks), [&](int64_t begin, int64_t end) {
      const auto sum = [&](const Tensor& sums, const W* partials) {
        if (partials != nullptr) sum_blocks<W>(mutable_data_of<W>(sums), partials, blocks, columns, begin, end);
      };
      sum(out.of_weight, call.of_weight), sum(out.of_bias, call.of_bias), sum(out.of_branch_bias, call.of_branch_bias);
    });
  });
  return in_dtypes(out, weight, wanted);
}

#if defined(MEGATRON_WITH_CUDA)

Gradients backward_on_device(const Tensor& dy, const OptionalTensor& total_gradient, const Tensor& x,
                             const Tensor& weight, const Tensor& mean, const Tensor& inverse, bool zero_centered,
                             const Wanted& wanted) {
  const at::ScalarType dtype = device_dtype(weight, x);
  const at::ScalarType branch_dtype = wanted.branch_dtype == x.scalar_type() ? x.scalar_type() : at::kFloat;
  const Tensor scale = weight.to(dtype).contiguous();
  const int64_t columns = x.size(-1), rows = x.numel() / columns, rows_per_block = device_rows_per_block(rows);
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  const Tensor partials = at::empty({wanted.sums(), blocks, columns}, x.options().dtype(at::kFloat));
  const auto sums = [&](bool is_wanted, at::ScalarType dtype) {
    return at::empty({is_wanted ? columns : 0}, x.options().dtype(dtype));
  };
  const Gradients out{at::empty(x.sizes(), x.options()), sums(true, dtype), sums(wanted.bias, dtype),
                      sums(wanted.branch_bias(), branch_dtype)};
  const int error = megatron_norm_backward(
      out.of_x.mutable_data_ptr(), out.of_weight.mutable_data_ptr(),
      wanted.bias ? out.of_bias.mutable_data_ptr() : nullptr,
      wanted.branch_bias() ? out.of_branch_bias.mutable_data_ptr() : nullptr, mutable_data_of<float>(partials),
      dy.const_data_ptr(), data_of<void>(total_gradient), x.const_data_ptr(), scale.const_data_ptr(),
      mean.numel() > 0 ? data_of<float>(mean) : nullptr, data_of<float>(inverse), rows, columns, zero_centered,
      dtype_code(x.scalar_type()), dtype_code(dtype), dtype_code(branch_dtype), stream_of(x));
  check_launch(error, "norm_backward");
  return in_dtypes(out, weight, wanted);
}

#endif

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const OptionalTensor& total_gradient,
                                                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                                                         const Tensor& inverse, bool zero_centered, bool has_bias,
                                                         std::optional<at::ScalarType> branch_dtype) {
  check_input(x, weight);
  check_like(dy, "gradient", x);
  if (total_gradient.has_value()) check_like(*total_gradient, "gradient of the sum", x);
  const c10::DeviceGuard guard(x.device());
  const Wanted wanted{has_bias, branch_dtype};
  if (x.numel() == 0) {
    const auto zeros = [&](bool is_wanted, at::ScalarType dtype) {
      return at::empty({is_wanted ? weight.size(0) : 0}, weight.options().dtype(dtype)).zero_();
    };
    const at::ScalarType dtype = weight.scalar_type();
    return {at::empty(x.sizes(), x.options()), zeros(true, dtype), zeros(has_bias, dtype),
            zeros(wanted.branch_bias(), branch_dtype.value_or(dtype))};
  }
#if defined(MEGATRON_WITH_CUDA)
  const auto run = is_on_gpu(x) ? backward_on_device : backward_on_cpu;
#else
  const auto run = backward_on_cpu;
#endif
  Gradients out = run(dy.contiguous(), contiguous(total_gradient), x.contiguous(), weight, mean.contiguous(),
                      inverse.contiguous(), zero_centered, wanted);
  return {out.of_x, out.of_weight, out.of_bias, out.of_branch_bias};
}

}  // namespace
}  // namespace megatron::norm

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool subtract_mean, bool zero_centered)"
      " -> (Tensor y, Tensor mean, Tensor inverse)");
  library.def(
      "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, Tensor? branch_bias, float eps,"
      " bool subtract_mean, bool zero_centered) -> (Tensor total, Tensor y, Tensor mean, Tensor inverse)");
  library.def(
      "norm_backward(Tensor dy, Tensor? total_gradient, Tensor x, Tensor weight, Tensor mean, Tensor inverse,"
      " bool zero_centered, bool has_bias, ScalarType? branch_dtype)"
      " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dbranch_bias)");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("norm", &megatron::norm::norm);
  library.impl("add_norm", &megatron::norm::add_norm);
  library.impl("norm_backward", &megatron::norm::norm_backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("norm", &megatron::norm::norm);
  library.impl("add_norm", &megatron::norm::add_norm);
  library.impl("norm_backward", &megatron::norm::norm_backward);
}
#endif
