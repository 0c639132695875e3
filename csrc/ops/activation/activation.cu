// Activation functions of x + bias and their gated forms on a GPU, in tiles.
#include "activation/activation.h"

#include <type_traits>

#include "base/tiles.h"

namespace {

using megatron::ActivationFunction;

constexpr int kRowsPerThread = 4;  // without a sum over rows; more blocks are better for small tensors

// Arguments shared by all blocks.
struct Call {
  int64_t rows, columns;
  ActivationFunction function;
  ColumnVector bias;
  bool aligned;  // all rows of all tensors begin at 16-byte boundaries
};

// The logistic function of a number whose 2^-number is `inverse`, and 1 minus it without cancellation. An `inverse` that
// overflows gives 0 and 0.
__device__ __forceinline__ megatron::Logistic<float> fast_logistic(float inverse) {
  const float value = fast_reciprocal(1.0f + inverse);
  return {value, fminf(inverse, 0x1p127f) * value};
}

// GeluTanh and Silu for elements in half precision, in a third of the instructions: log2(e) is part of the constants.
struct FastGeluTanh {
  static __device__ __forceinline__ megatron::Evaluated<float> at(float x) {
    constexpr float kSlope = 1.59576912160573071176f, kCubic = 0.044715f, kLog2E = 1.44269504088896340736f;
    const float square = x * x;
    const auto s = fast_logistic(fast_exp2(-x * (kSlope * kLog2E + kSlope * kCubic * kLog2E * square)));
    const float inner = kSlope + 3.0f * kSlope * kCubic * fminf(square, 1e8f);  // beyond, s is 0 or 1
    return {x * s.value, s.value + x * inner * (s.value * s.rest)};
  }
};

struct FastSilu {
  static __device__ __forceinline__ megatron::Evaluated<float> at(float x) {
    const auto s = fast_logistic(fast_exp2(x * -1.44269504088896340736f));
    return {x * s.value, s.value + x * (s.value * s.rest)};
  }
};

// Calls `body(Function())` with the function of a code, which is the same for all threads, for elements of T.
template <typename T, typename Body>
__device__ __forceinline__ void with_function(ActivationFunction function, const Body& body) {
  constexpr bool kIsHalf = sizeof(T) == 2;
  switch (function) {
    case megatron::kGelu: return body(megatron::Gelu());
    case megatron::kGeluTanh: return body(std::conditional_t<kIsHalf, FastGeluTanh, megatron::GeluTanh>());
    case megatron::kRelu: return body(megatron::Relu());
    case megatron::kSquaredRelu: return body(megatron::SquaredRelu());
    case megatron::kSilu: return body(std::conditional_t<kIsHalf, FastSilu, megatron::Silu>());
    default: return body(megatron::Linear());
  }
}

template <typename T, bool kGated>
__global__ void __launch_bounds__(kTileThreads, kGated ? 4 : 6)
    forward(T* __restrict__ y, const T* __restrict__ x, Call call) {
  const OwnColumns<T> own(call.columns, call.aligned);
  if (own.is_empty()) return;
  const int64_t width = kGated ? 2 * call.columns : call.columns;
  const Values<T> gate_bias = own.load_vector(call.bias);
  Values<T> up_bias = {};
  if (kGated) up_bias = own.load_vector(call.bias, call.columns);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kTileRows;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + threadIdx.y; row < call.rows; row += step) {
    const T* from = x + row * width;
    Values<T> gate = own.load(from), up = {};
    if (kGated) up = own.load(from + call.columns);
    add(gate, gate_bias);
    add(up, up_bias);
    with_function<T>(call.function, [&](auto function) {
      MEGATRON_UNROLL
      for (int i = 0; i < Packet<T>::kSize; ++i) {
        gate.of[i] = decltype(function)::at(gate.of[i]).value * (kGated ? up.of[i] : 1.0f);
      }
    });
    own.store(y + row * call.columns, gate);
  }
}

// Block row `y` takes `rows_each` rows, striding over the grid; with a bias, each such part of the
// rows has a row of `parts`.
template <typename T, bool kGated>
__global__ void __launch_bounds__(kTileThreads, kGated ? 3 : 4)
    backward(T* __restrict__ dx, float* __restrict__ parts, const T* __restrict__ dy, const T* __restrict__ x,
             Call call, int64_t rows_each) {
  const OwnColumns<T> own(call.columns, call.aligned);
  const int64_t width = kGated ? 2 * call.columns : call.columns;
  const Values<T> gate_bias = own.load_vector(call.bias);
  Values<T> up_bias = {};
  if (kGated) up_bias = own.load_vector(call.bias, call.columns);
  for (int64_t part = blockIdx.y; part * rows_each < call.rows; part += gridDim.y) {
    const int64_t end = (part + 1) * rows_each < call.rows ? (part + 1) * rows_each : call.rows;
    Values<T> gate_sums = {}, up_sums = {};
    for (int64_t row = part * rows_each + threadIdx.y; row < end && !own.is_empty(); row += kTileRows) {
      const T* from = x + row * width;
      T* to = dx + row * width;
      const Values<T> gradient = own.load(dy + row * call.columns);
      Values<T> gate = own.load(from), up = {};
      if (kGated) up = own.load(from + call.columns);
      add(gate, gate_bias);
      add(up, up_bias);
      with_function<T>(call.function, [&](auto function) {
        MEGATRON_UNROLL
        for (int i = 0; i < Packet<T>::kSize; ++i) {
          const auto both = megatron::gated_gradient<decltype(function)>(gate.of[i], kGated ? up.of[i] : 1.0f,
                                                                         gradient.of[i]);
          gate.of[i] = both.gate;
          up.of[i] = both.up;
        }
      });
      own.store(to, gate);
      if (kGated) own.store(to + call.columns, up);
      add(gate_sums, gate);
      add(up_sums, up);
    }
    if (call.bias.entries != nullptr) {
      own.store_part(parts + part * width, gate_sums);
      if (kGated) own.store_part(parts + part * width + call.columns, up_sums);
    }
  }
}

}  // namespace

extern "C" int megatron_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t columns,
                                           int function, int gated, int dtype, int bias_dtype, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned = is_aligned(y) && is_aligned(x) && columns % Packet<T>::kSize == 0;
    const Call call{rows, columns, static_cast<ActivationFunction>(function),
                    {bias, static_cast<DType>(bias_dtype)}, aligned};
    const dim3 grid = tile_grid<T>(rows, kTileRows * kRowsPerThread, columns), block = tile_block();
    T* to = static_cast<T*>(y);
    const T* from = static_cast<const T*>(x);
    if (gated) {
      MEGATRON_LAUNCH((forward<T, true>), grid, block, 0, stream, to, from, call);
    } else {
      MEGATRON_LAUNCH((forward<T, false>), grid, block, 0, stream, to, from, call);
    }
    return static_cast<int>(cudaGetLastError());
  });
}

extern "C" int megatron_activation_backward(void* dx, void* bias_gradient, float* bias_parts, const void* dy,
                                            const void* x, const void* bias, int64_t rows, int64_t columns,
                                            int function, int gated, int dtype, int bias_dtype, void* stream) {
  const int64_t rows_each = bias != nullptr ? megatron::rows_per_part(rows) : kTileRows * kRowsPerThread;
  const int error = with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned = is_aligned(dx) && is_aligned(dy) && is_aligned(x) && columns % Packet<T>::kSize == 0;
    const Call call{rows, columns, static_cast<ActivationFunction>(function),
                    {bias, static_cast<DType>(bias_dtype)}, aligned};
    const dim3 grid = tile_grid<T>(rows, rows_each, columns), block = tile_block();
    T* to = static_cast<T*>(dx);
    const T *gradient = static_cast<const T*>(dy), *from = static_cast<const T*>(x);
    if (gated) {
      MEGATRON_LAUNCH((backward<T, true>), grid, block, 0, stream, to, bias_parts, gradient, from, call, rows_each);
    } else {
      MEGATRON_LAUNCH((backward<T, false>), grid, block, 0, stream, to, bias_parts, gradient, from, call, rows_each);
    }
    return static_cast<int>(cudaGetLastError());
  });
  if (bias == nullptr || error != 0) return error;
  return launch_sum_parts(bias_gradient, bias_dtype, bias_parts, blocks_for(rows, rows_each),
                          gated ? 2 * columns : columns, stream);
}
