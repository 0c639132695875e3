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

// Asks for the memory of a row that is used next, while the row at hand is still being worked on in the first cache. Long
// rows are left alone: the processor sees their pattern by itself, and two of them would not fit.
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

template <typename T>
MEGATRON_CLONES void forward_rows(const ForwardCall<T>& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t columns = call.columns;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = call.x + row * columns;
    if (call.residual != nullptr) {
      const T* residual = call.residual + row * columns;
      T* total = call.total + row * columns;
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) store(total + j, load(x + j) + load(residual + j));
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
  Wide<T>* of_weight;  // partial sums of the row blocks, [blocks, h]
  Wide<T>* of_bias;    // null without a bias
  const T* dy;
  const T* direct;  // the gradient that comes past the norm; without a residual one row of zeros for all rows
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
  Wide<T>*of_weight, *of_bias;
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

template <typename T, bool kHasBias>
MEGATRON_HOST_DEVICE void write_gradients(const BackwardRow<T>& row, GradientMeans<Wide<T>> means) {
  using W = Wide<T>;
  const T *dy = row.dy, *x = row.x, *direct = row.direct;
  const W *scale = row.scale, mean = row.mean, inverse = row.inverse;
  W *of_weight = row.of_weight, *of_bias = row.of_bias;
  T* dx = row.dx;
#pragma omp simd
  for (int64_t j = 0; j < row.columns; ++j) {
    const W gradient = load(dy + j), normal = normalized<W>(load(x + j), mean, inverse);
    of_weight[j] += gradient * normal;
    if constexpr (kHasBias) of_bias[j] += gradient;
    store(dx + j, input_gradient<W>(gradient * scale[j], normal, inverse, means) + load(direct + j));
  }
}

template <typename T, bool kHasBias>
MEGATRON_CLONES void backward_blocks(const BackwardCall<T>& call, int64_t begin, int64_t end) {
  const int64_t columns = call.columns;
  BackwardRow<T> row;
  row.columns = columns, row.scale = call.scale, row.of_bias = nullptr;
  for (int64_t block = begin; block < end; ++block) {
    row.of_weight = call.of_weight + block * columns;
    std::fill_n(row.of_weight, columns, Wide<T>(0));
    if constexpr (kHasBias) {
      row.of_bias = call.of_bias + block * columns;
      std::fill_n(row.of_bias, columns, Wide<T>(0));
    }
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
      write_gradients<T, kHasBias>(row, means);
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

// Weight or bias as the CPU loops take it: contiguous, wide, and with the 1 that a zero-centred weight lacks.
Tensor widened(const Tensor& vector, const Tensor& x, bool zero_centered) {
  const Tensor wide = vector.to(wide_dtype(x)).contiguous();
  return zero_centered ? wide.add(1) : wide;
}

struct Forward {
  Tensor y, total, mean, inverse;
};

void forward_on_cpu(const Forward& out, const Tensor& x, const OptionalTensor& residual, const Tensor& weight,
                    const OptionalTensor& bias, double eps, bool zero_centered) {
  const Tensor scale = widened(weight, x, zero_centered);
  const OptionalTensor shift = bias.has_value() ? OptionalTensor(widened(*bias, x, false)) : bias;
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] {
    using W = Wide<T>;
    ForwardCall<T> call;
    call.y = mutable_data_of<T>(out.y);
    call.total = residual.has_value() ? mutable_data_of<T>(out.total) : nullptr;
    call.mean = out.mean.numel() > 0 ? mutable_data_of<W>(out.mean) : nullptr;
    call.inverse = mutable_data_of<W>(out.inverse);
    call.x = data_of<T>(x), call.residual = data_of<T>(residual);
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

void forward_on_device(const Forward& out, const Tensor& x, const OptionalTensor& residual, const Tensor& weight,
                       const OptionalTensor& bias, double eps, bool zero_centered) {
  const at::ScalarType dtype = device_dtype(weight, x);
  const Tensor scale = weight.to(dtype).contiguous();
  const Tensor shift = bias.has_value() ? bias->to(dtype).contiguous() : Tensor();
  const int64_t columns = x.size(-1);
  const int error = megatron_norm_forward(
      out.y.mutable_data_ptr(), residual.has_value() ? out.total.mutable_data_ptr() : nullptr,
      out.mean.numel() > 0 ? mutable_data_of<float>(out.mean) : nullptr, mutable_data_of<float>(out.inverse),
      x.const_data_ptr(), data_of<void>(residual), scale.const_data_ptr(),
      shift.defined() ? shift.const_data_ptr() : nullptr, x.numel() / columns, columns, static_cast<float>(eps),
      zero_centered, dtype_code(x.scalar_type()), dtype_code(dtype), stream_of(x));
  check_launch(error, "norm");
}

#endif

Forward normalize(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
                  double eps, bool subtract_mean, bool zero_centered) {
  check_input(x, weight);
  if (bias.has_value()) check_vector(*bias, "bias", x);
  if (residual.has_value()) check_like(*residual, "residual", x);
  const c10::DeviceGuard guard(x.device());
  const Tensor input = x.contiguous();
  const auto options = x.options().dtype(wide_dtype(x));
  const auto statistics = x.sizes().slice(0, x.dim() - 1);
  Forward out;
  out.y = at::empty(x.sizes(), x.options());
  if (residual.has_value()) out.total = at::empty(x.sizes(), x.options());
  out.mean = subtract_mean ? at::empty(statistics, options) : at::empty({0}, options);
  out.inverse = at::empty(statistics, options);
  if (x.numel() == 0) return out;
#if defined(MEGATRON_WITH_CUDA)
  const auto run = is_on_gpu(x) ? forward_on_device : forward_on_cpu;
#else
  const auto run = forward_on_cpu;
#endif
  run(out, input, contiguous(residual), weight, bias, eps, zero_centered);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double eps,
                                        bool subtract_mean, bool zero_centered) {
  Forward out = normalize(x, std::nullopt, weight, bias, eps, subtract_mean, zero_centered);
  return {out.y, out.mean, out.inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    const OptionalTensor& bias, double eps, bool subtract_mean,
                                                    bool zero_centered) {
  Forward out = normalize(x, residual, weight, bias, eps, subtract_mean, zero_centered);
  return {out.total, out.y, out.mean, out.inverse};
}

struct Gradients {
  Tensor of_x, of_weight, of_bias;  // of_bias is empty without a bias
};

Gradients backward_on_cpu(const Tensor& dy, const OptionalTensor& total_gradient, const Tensor& x,
                          const Tensor& weight, const Tensor& mean, const Tensor& inverse, bool zero_centered,
                          bool has_bias) {
  const Tensor scale = widened(weight, x, zero_centered);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const int64_t rows_per_block = host_rows_per_block(rows), blocks = (rows + rows_per_block - 1) / rows_per_block;
  const Tensor partials = at::empty({has_bias ? 2 : 1, blocks, columns}, scale.options());
  const Tensor of_weight = at::empty({columns}, scale.options());
  const Tensor of_bias = at::empty({has_bias ? columns : 0}, scale.options());
  const Tensor dx = at::empty(x.sizes(), x.options());
  const Tensor direct = total_gradient.has_value() ? *total_gradient : at::empty({columns}, x.options()).zero_();
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] {
    using W = Wide<T>;
    W* partial = mutable_data_of<W>(partials);
    BackwardCall<T> call;
    call.dx = mutable_data_of<T>(dx);
    call.of_weight = partial, call.of_bias = has_bias ? partial + blocks * columns : nullptr;
    call.dy = data_of<T>(dy), call.direct = data_of<T>(direct), call.x = data_of<T>(x);
    call.direct_stride = total_gradient.has_value() ? columns : 0;
    call.scale = data_of<W>(scale), call.inverse = data_of<W>(inverse);
    call.mean = mean.numel() > 0 ? data_of<W>(mean) : nullptr;
    call.rows = rows, call.columns = columns, call.rows_per_block = rows_per_block;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      has_bias ? backward_blocks<T, true>(call, begin, end) : backward_blocks<T, false>(call, begin, end);
    });
    at::parallel_for(0, columns, rows_per_task(blocks), [&](int64_t begin, int64_t end) {
      sum_blocks<W>(mutable_data_of<W>(of_weight), call.of_weight, blocks, columns, begin, end);
      if (has_bias) sum_blocks<W>(mutable_data_of<W>(of_bias), call.of_bias, blocks, columns, begin, end);
    });
  });
  return {dx, of_weight.to(weight.scalar_type()), of_bias.to(weight.scalar_type())};
}

#if defined(MEGATRON_WITH_CUDA)

Gradients backward_on_device(const Tensor& dy, const OptionalTensor& total_gradient, const Tensor& x,
                             const Tensor& weight, const Tensor& mean, const Tensor& inverse, bool zero_centered,
                             bool has_bias) {
  const at::ScalarType dtype = device_dtype(weight, x);
  const Tensor scale = weight.to(dtype).contiguous();
  const int64_t columns = x.size(-1), rows = x.numel() / columns, rows_per_block = device_rows_per_block(rows);
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  const Tensor partials = at::empty({has_bias ? 2 : 1, blocks, columns}, x.options().dtype(at::kFloat));
  const Tensor dx = at::empty(x.sizes(), x.options()), of_weight = at::empty({columns}, scale.options());
  const Tensor of_bias = at::empty({has_bias ? columns : 0}, scale.options());
  const int error = megatron_norm_backward(
      dx.mutable_data_ptr(), of_weight.mutable_data_ptr(), has_bias ? of_bias.mutable_data_ptr() : nullptr,
      mutable_data_of<float>(partials), dy.const_data_ptr(), data_of<void>(total_gradient), x.const_data_ptr(),
      scale.const_data_ptr(), mean.numel() > 0 ? data_of<float>(mean) : nullptr, data_of<float>(inverse), rows,
      columns, zero_centered, dtype_code(x.scalar_type()), dtype_code(dtype), stream_of(x));
  check_launch(error, "norm_backward");
  return {dx, of_weight.to(weight.scalar_type()), of_bias.to(weight.scalar_type())};
}

#endif

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& dy, const OptionalTensor& total_gradient,
                                                 const Tensor& x, const Tensor& weight, const Tensor& mean,
                                                 const Tensor& inverse, bool zero_centered, bool has_bias) {
  check_input(x, weight);
  check_like(dy, "gradient", x);
  if (total_gradient.has_value()) check_like(*total_gradient, "gradient of the sum", x);
  const c10::DeviceGuard guard(x.device());
  if (x.numel() == 0) {
    return {at::empty(x.sizes(), x.options()), at::empty(weight.sizes(), weight.options()).zero_(),
            at::empty({has_bias ? weight.size(0) : 0}, weight.options()).zero_()};
  }
#if defined(MEGATRON_WITH_CUDA)
  const auto run = is_on_gpu(x) ? backward_on_device : backward_on_cpu;
#else
  const auto run = backward_on_cpu;
#endif
  Gradients out = run(dy.contiguous(), contiguous(total_gradient), x.contiguous(), weight, mean.contiguous(),
                      inverse.contiguous(), zero_centered, has_bias);
  return {out.of_x, out.of_weight, out.of_bias};
}

}  // namespace
}  // namespace megatron::norm

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool subtract_mean, bool zero_centered)"
      " -> (Tensor y, Tensor mean, Tensor inverse)");
  library.def(
      "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool subtract_mean,"
      " bool zero_centered) -> (Tensor total, Tensor y, Tensor mean, Tensor inverse)");
  library.def(
      "norm_backward(Tensor dy, Tensor? total_gradient, Tensor x, Tensor weight, Tensor mean, Tensor inverse,"
      " bool zero_centered, bool has_bias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
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
