// Activation functions of x + bias and their gated forms: CPU loops, and the operation as torch sees it.
#include "activation/activation.h"

#include <tuple>

#include "base/host.h"
#include "base/row_sums.h"

namespace megatron::activation {
namespace {

// A row is taken a tile at a time: elements become float32 (or float64) in a buffer that stays in the nearest cache, the
// function is applied there, and the result is converted back. So each function is compiled once instead of once per
// dtype, and float32 without a bias is read and written in place.
constexpr int64_t kTile = 1024;

// Wide values of a tile of elements plus the bias.
template <typename T>
MEGATRON_CLONES void widen(Wide<T>* to, const T* from, const Wide<T>* bias, int64_t count) {
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = load(from + i);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = load(from + i) + bias[i];
  }
}

template <typename T>
MEGATRON_CLONES void narrow(T* to, const Wide<T>* from, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(to + i, from[i]);
}

template <typename Real>
MEGATRON_CLONES void add(Real* sums, const Real* values, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

// The loops of a function. A plain unit has only a gate; float64 is for gradient checks and has no clones.
template <typename Function, typename Real>
MEGATRON_HOST_DEVICE void value_loop(Real* y, const Real* gate, const Real* up, int64_t count) {
  if (up == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = Function::at(gate[i]).value;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = Function::at(gate[i]).value * up[i];
  }
}
template <typename Function>
MEGATRON_CLONES void values(float* y, const float* gate, const float* up, int64_t count) {
  value_loop<Function>(y, gate, up, count);
}
template <typename Function>
void values(double* y, const double* gate, const double* up, int64_t count) {
  value_loop<Function>(y, gate, up, count);
}

template <typename Function, typename Real>
MEGATRON_HOST_DEVICE void gradient_loop(Real* of_gate, Real* of_up, const Real* dy, const Real* gate, const Real* up,
                                        int64_t count) {
  if (up == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) of_gate[i] = dy[i] * Function::at(gate[i]).derivative;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const GatedGradient<Real> gradient = gated_gradient<Function>(gate[i], up[i], dy[i]);
      of_gate[i] = gradient.gate;
      of_up[i] = gradient.up;
    }
  }
}
template <typename Function>
MEGATRON_CLONES void gradients(float* of_gate, float* of_up, const float* dy, const float* gate, const float* up,
                               int64_t count) {
  gradient_loop<Function>(of_gate, of_up, dy, gate, up, count);
}
template <typename Function>
void gradients(double* of_gate, double* of_up, const double* dy, const double* gate, const double* up,
               int64_t count) {
  gradient_loop<Function>(of_gate, of_up, dy, gate, up, count);
}

template <typename Real>
struct Loops {
  void (*values)(Real*, const Real*, const Real*, int64_t);
  void (*gradients)(Real*, Real*, const Real*, const Real*, const Real*, int64_t);
};
template <typename Real, typename Function>
constexpr Loops<Real> kLoopsOf{&values<Function>, &gradients<Function>};

template <typename Real>
const Loops<Real>& loops_of(int64_t function) {
  switch (function) {
    case kGelu: return kLoopsOf<Real, Gelu>;
    case kGeluTanh: return kLoopsOf<Real, GeluTanh>;
    case kRelu: return kLoopsOf<Real, Relu>;
    case kSquaredRelu: return kLoopsOf<Real, SquaredRelu>;
    case kSilu: return kLoopsOf<Real, Silu>;
    default: return kLoopsOf<Real, Linear>;
  }
}

// A tile of wide values: a view of the elements if they are wide already and no bias is added, else a buffer.
template <typename T>
class Tile {
 public:
  const Wide<T>* read(const T* from, const Wide<T>* bias, int64_t count) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
      if (bias == nullptr) return from;
    }
    widen<T>(buffer_, from, bias, count);
    return buffer_;
  }

  // Where to write values that `finish` stores as elements.
  Wide<T>* target(T* to) {
    if constexpr (std::is_same_v<T, Wide<T>>) return to;
    return buffer_;
  }
  void finish(T* to, int64_t count) {
    if constexpr (!std::is_same_v<T, Wide<T>>) narrow<T>(to, buffer_, count);
  }

 private:
  alignas(64) Wide<T> buffer_[kTile];
};

// Arguments shared by all rows of a call.
template <typename T>
struct Row {
  const Loops<Wide<T>>& loops;
  const Wide<T>* bias;  // like a row of x, or null
  int64_t columns;      // of the result
  bool gated;

  const Wide<T>* up_bias() const { return bias != nullptr ? bias + columns : nullptr; }
};

template <typename T>
void forward_row(T* y, const T* x, const Row<T>& row) {
  Tile<T> gate, up, result;
  for (int64_t first = 0; first < row.columns; first += kTile) {
    const int64_t count = std::min(kTile, row.columns - first);
    const Wide<T>* gates = gate.read(x + first, row.bias ? row.bias + first : nullptr, count);
    const Wide<T>* ups = nullptr;
    if (row.gated) ups = up.read(x + row.columns + first, row.bias ? row.up_bias() + first : nullptr, count);
    row.loops.values(result.target(y + first), gates, ups, count);
    result.finish(y + first, count);
  }
}

// Adds the gradient of x to `sums`, which is null without a bias.
template <typename T>
void backward_row(T* dx, Wide<T>* sums, const T* dy, const T* x, const Row<T>& row) {
  Tile<T> gate, up, gradient, of_gate, of_up;
  for (int64_t first = 0; first < row.columns; first += kTile) {
    const int64_t count = std::min(kTile, row.columns - first), second = row.columns + first;
    const Wide<T>* dys = gradient.read(dy + first, nullptr, count);
    const Wide<T>* gates = gate.read(x + first, row.bias ? row.bias + first : nullptr, count);
    Wide<T>* of_gates = of_gate.target(dx + first);
    if (row.gated) {
      const Wide<T>* ups = up.read(x + second, row.bias ? row.up_bias() + first : nullptr, count);
      Wide<T>* of_ups = of_up.target(dx + second);
      row.loops.gradients(of_gates, of_ups, dys, gates, ups, count);
      if (sums != nullptr) add(sums + second, of_ups, count);
      of_up.finish(dx + second, count);
    } else {
      row.loops.gradients(of_gates, nullptr, dys, gates, nullptr, count);
    }
    if (sums != nullptr) add(sums + first, of_gates, count);
    of_gate.finish(dx + first, count);
  }
}

// The shape of a call, and its checked and contiguous arguments.
struct Call {
  at::Tensor x, bias;  // bias may be undefined
  int64_t rows, columns, function;
  bool gated;

  int64_t input_columns() const { return gated ? 2 * columns : columns; }

  // Without a bias, the tensor can be reshaped to rows of any length.
  Call folded() const {
    constexpr int64_t kColumns = 1024;
    Call call = *this;
    if (!gated && !bias.defined() && (rows * columns) % kColumns == 0) {
      call.rows = rows * columns / kColumns;
      call.columns = kColumns;
    }
    return call;
  }
};

Call call_of(const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t function, bool gated) {
  TORCH_CHECK(gated ? x.dim() >= 2 && x.size(-2) == 2 : x.dim() >= 1, "activation: x has the shape ", x.sizes(),
              gated ? "; a gated unit needs [..., 2, f], gate and up" : "; it needs at least one dimension");
  TORCH_CHECK(function >= kGelu && function <= kLinear, "activation: function is ", function,
              "; the codes run from 0 (gelu) to 5 (linear)");
  const int64_t columns = x.size(-1), width = gated ? 2 * columns : columns;
  at::Tensor own_bias;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == width && bias->device() == x.device(), "activation: bias is ",
                bias->sizes(), " on ", bias->device(), "; for x ", x.sizes(), " on ", x.device(), " it must be [",
                width, "] there");
    own_bias = bias->contiguous();
  }
  return {x.contiguous(), own_bias, width > 0 ? x.numel() / width : 0, columns, function, gated};
}

at::Tensor wide_bias(const Call& call) {
  if (!call.bias.defined()) return call.bias;
  return call.bias.to(call.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

template <typename T>
Row<T> row_of(const Call& call, const at::Tensor& bias) {
  return {loops_of<Wide<T>>(call.function), bias.defined() ? data_of<Wide<T>>(bias) : nullptr, call.columns,
          call.gated};
}

template <typename T>
void run_forward(const at::Tensor& y, const Call& call) {
  const at::Tensor bias = wide_bias(call);
  const Row<T> row = row_of<T>(call, bias);
  const T* from = data_of<T>(call.x);
  T* to = mutable_data_of<T>(y);
  at::parallel_for(0, call.rows, rows_per_task(call.columns), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) forward_row(to + i * call.columns, from + i * call.input_columns(), row);
  });
}

// Returns the gradient of the bias, if there is one.
template <typename T>
at::Tensor run_backward(const at::Tensor& dx, const at::Tensor& gradient, const Call& call) {
  const at::Tensor bias = wide_bias(call);
  const Row<T> row = row_of<T>(call, bias);
  const int64_t width = call.input_columns();
  const T *dy = data_of<T>(gradient), *x = data_of<T>(call.x);
  T* to = mutable_data_of<T>(dx);
  const auto run = [&](int64_t first, int64_t last, Wide<T>* sums) {
    for (int64_t i = first; i < last; ++i) {
      backward_row(to + i * width, sums, dy + i * call.columns, x + i * width, row);
    }
  };
  if (!bias.defined()) {
    at::parallel_for(0, call.rows, rows_per_task(call.columns),
                     [&](int64_t first, int64_t last) { run(first, last, nullptr); });
    return at::empty({0}, call.x.options());
  }
  return column_sums<Wide<T>>(call.rows, width, bias.options(), run).to(call.bias.scalar_type());
}

at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t function, bool gated) {
  const c10::OptionalDeviceGuard guard(x.device());
  const Call call = call_of(x, bias, function, gated);
  std::vector<int64_t> shape = x.sizes().vec();
  if (gated) shape.erase(shape.end() - 2);
  const at::Tensor y = at::empty(shape, x.options());
  if (y.numel() == 0) return y;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(x)) {
    check_launch(megatron_activation_forward(
                     y.mutable_data_ptr(), call.x.const_data_ptr(),
                     call.bias.defined() ? call.bias.const_data_ptr() : nullptr, call.rows, call.columns,
                     static_cast<int>(function), gated, dtype_code(x.scalar_type()),
                     call.bias.defined() ? dtype_code(call.bias.scalar_type()) : kFloat32, stream_of(x)),
                 "activation");
    return y;
  }
#endif
  const Call folded = call.folded();
  MEGATRON_ELEMENTS(x.scalar_type(), T, [&] { run_forward<T>(y, folded); });
  return y;
}

// The second result is empty without a bias.
std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& gradient, const at::Tensor& x,
                                            const std::optional<at::Tensor>& bias, int64_t function, bool gated) {
  const c10::OptionalDeviceGuard guard(x.device());
  const Call call = call_of(x, bias, function, gated);
  TORCH_CHECK(gradient.numel() == call.rows * call.columns && gradient.scalar_type() == x.scalar_type(),
              "activation: the gradient is ", gradient.scalar_type(), gradient.sizes(), " for x ", x.scalar_type(),
              x.sizes(), "; it must be of the same dtype and have the shape of the result");
  const at::Tensor dy = gradient.contiguous(), dx = at::empty_like(call.x);
  const at::Tensor none = at::empty({0}, x.options());
  if (dy.numel() == 0) return {dx, call.bias.defined() ? at::empty_like(call.bias).zero_() : none};
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(x)) {
    const at::Tensor scratch = at::empty({call.bias.defined() ? part_count(call.rows) : 0, call.input_columns()},
                                         x.options().dtype(at::kFloat));
    const at::Tensor bias_gradient = call.bias.defined() ? at::empty_like(call.bias) : none;
    check_launch(megatron_activation_backward(
                     dx.mutable_data_ptr(), call.bias.defined() ? bias_gradient.mutable_data_ptr() : nullptr,
                     scratch.mutable_data_ptr<float>(), dy.const_data_ptr(), call.x.const_data_ptr(),
                     call.bias.defined() ? call.bias.const_data_ptr() : nullptr, call.rows, call.columns,
                     static_cast<int>(function), gated, dtype_code(x.scalar_type()),
                     call.bias.defined() ? dtype_code(call.bias.scalar_type()) : kFloat32, stream_of(x)),
                 "activation_backward");
    return {dx, bias_gradient};
  }
#endif
  const Call folded = call.folded();
  return {dx, MEGATRON_ELEMENTS(x.scalar_type(), T, [&] { return run_backward<T>(dx, dy, folded); })};
}

}  // namespace
}  // namespace megatron::activation

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("activation(Tensor x, Tensor? bias, int function, bool gated) -> Tensor");
  library.def(
      "activation_backward(Tensor gradient, Tensor x, Tensor? bias, int function, bool gated) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("activation", &megatron::activation::forward);
  library.impl("activation_backward", &megatron::activation::backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("activation", &megatron::activation::forward);
  library.impl("activation_backward", &megatron::activation::backward);
}
#endif
