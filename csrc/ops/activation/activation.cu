// Activation functions of x + bias and their gated forms on a GPU.
//
// A block covers 32 packets of 16 bytes of a row and strides over rows. So a thread meets the same columns in each of its
// rows: it loads their bias once, and adds up their part of the bias gradient in registers.
#include "activation/activation.h"

#include "common/device.h"

namespace {

using megatron::ActivationFunction;

constexpr int kRowThreads = 8;
constexpr int kThreads = kWarp * kRowThreads;
constexpr int kRowsPerThread = 4;  // fewer loads of the bias; more blocks are better for small tensors
constexpr int kPartThreads = 16;

// What all blocks share.
struct Call {
  int64_t rows, columns;
  ActivationFunction function;
  const void* bias;  // or null
  DType bias_dtype;
  bool aligned;  // all rows of all tensors begin at 16-byte boundaries
};

template <typename T>
struct Values {
  static constexpr int kSize = Packet<T>::kSize;
  float of[kSize];
};

// The elements of a packet; those beyond `count` are 0.
template <typename T>
__device__ __forceinline__ Values<T> load_values(const T* from, int count, bool aligned) {
  Values<T> values;
  if (aligned && count == Packet<T>::kSize) {
    const Packet<T> packet = load_packet(from);
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) values.of[i] = to_float(packet.values[i]);
  } else {
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) values.of[i] = i < count ? to_float(from[i]) : 0.0f;
  }
  return values;
}

template <typename T>
__device__ __forceinline__ void store_values(T* to, const Values<T>& values, int count, bool aligned) {
  if (aligned && count == Packet<T>::kSize) {
    Packet<T> packet;
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) packet.values[i] = from_float<T>(values.of[i]);
    store_packet(to, packet);
  } else {
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) {
      if (i < count) to[i] = from_float<T>(values.of[i]);
    }
  }
}

// The bias of `count` columns from `first` on, 0 without a bias. Its dtype is asked for here, since a thread comes here
// once, and kernels need not be compiled for each pair of dtypes.
template <typename T>
__device__ __forceinline__ Values<T> load_bias(const Call& call, int64_t first, int count) {
  Values<T> values = {};
  if (call.bias == nullptr) return values;
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) {
    if (i >= count) continue;
    switch (call.bias_dtype) {
      case DType::kFloat16: values.of[i] = to_float(static_cast<const __half*>(call.bias)[first + i]); break;
      case DType::kBFloat16: values.of[i] = to_float(static_cast<const __nv_bfloat16*>(call.bias)[first + i]); break;
      default: values.of[i] = static_cast<const float*>(call.bias)[first + i];
    }
  }
  return values;
}

template <typename T>
__device__ __forceinline__ void add(Values<T>& to, const Values<T>& values) {
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) to.of[i] += values.of[i];
}

// Calls `body(Function())` with the function of a code, which is the same for all threads.
template <typename Body>
__device__ __forceinline__ void with_function(ActivationFunction function, const Body& body) {
  switch (function) {
    case megatron::kGelu: return body(megatron::Gelu());
    case megatron::kGeluTanh: return body(megatron::GeluTanh());
    case megatron::kRelu: return body(megatron::Relu());
    case megatron::kSquaredRelu: return body(megatron::SquaredRelu());
    case megatron::kSilu: return body(megatron::Silu());
    default: return body(megatron::Linear());
  }
}

// The columns of this thread.
template <typename T>
struct Columns {
  int64_t first;
  int count;  // 0 beyond the last column

  __device__ __forceinline__ explicit Columns(int64_t columns) {
    first = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * Packet<T>::kSize;
    const int64_t left = columns - first;
    count = left < 0 ? 0 : static_cast<int>(left < Packet<T>::kSize ? left : Packet<T>::kSize);
  }
};

template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads)
    forward(T* __restrict__ y, const T* __restrict__ x, Call call) {
  const Columns<T> own(call.columns);
  if (own.count == 0) return;
  const int64_t width = kGated ? 2 * call.columns : call.columns;
  const Values<T> gate_bias = load_bias<T>(call, own.first, own.count);
  Values<T> up_bias = {};
  if (kGated) up_bias = load_bias<T>(call, call.columns + own.first, own.count);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kRowThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kRowThreads + threadIdx.y; row < call.rows; row += step) {
    const T* from = x + row * width + own.first;
    Values<T> gate = load_values(from, own.count, call.aligned), up = {};
    if (kGated) up = load_values(from + call.columns, own.count, call.aligned);
    add(gate, gate_bias);
    add(up, up_bias);
    with_function(call.function, [&](auto function) {
      MEGATRON_UNROLL
      for (int i = 0; i < Packet<T>::kSize; ++i) {
        gate.of[i] = decltype(function)::at(gate.of[i]).value * (kGated ? up.of[i] : 1.0f);
      }
    });
    store_values(y + row * call.columns + own.first, gate, own.count, call.aligned);
  }
}

// Writes the sums of a block's columns over its threads' rows, in the order of the threads.
template <typename T>
__device__ __forceinline__ void store_part(float* part, const Values<T>& sums, int64_t columns) {
  constexpr int kColumns = kWarp * Packet<T>::kSize;
  __shared__ float shared[kRowThreads][kColumns];
  __syncthreads();  // a gated unit comes here twice
  for (int i = 0; i < Packet<T>::kSize; ++i) shared[threadIdx.y][threadIdx.x * Packet<T>::kSize + i] = sums.of[i];
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  for (int column = threadIdx.y * kWarp + threadIdx.x; column < kColumns; column += kThreads) {
    float sum = 0.0f;
    for (int thread = 0; thread < kRowThreads; ++thread) sum += shared[thread][column];
    if (first + column < columns) part[first + column] = sum;
  }
}

// Block row `y` of the grid takes `rows_each` rows, then others at the grid's distance; with a bias, each such part of the
// rows has its row of `parts`.
template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads)
    backward(T* __restrict__ dx, float* __restrict__ parts, const T* __restrict__ dy, const T* __restrict__ x,
             Call call, int64_t rows_each) {
  const Columns<T> own(call.columns);
  const int64_t width = kGated ? 2 * call.columns : call.columns;
  const Values<T> gate_bias = load_bias<T>(call, own.first, own.count);
  Values<T> up_bias = {};
  if (kGated) up_bias = load_bias<T>(call, call.columns + own.first, own.count);
  for (int64_t part = blockIdx.y; part * rows_each < call.rows; part += gridDim.y) {
    const int64_t end = (part + 1) * rows_each < call.rows ? (part + 1) * rows_each : call.rows;
    Values<T> gate_sums = {}, up_sums = {};
    for (int64_t row = part * rows_each + threadIdx.y; row < end && own.count > 0; row += kRowThreads) {
      const T* from = x + row * width + own.first;
      T* to = dx + row * width + own.first;
      const Values<T> gradient = load_values(dy + row * call.columns + own.first, own.count, call.aligned);
      Values<T> gate = load_values(from, own.count, call.aligned), up = {};
      if (kGated) up = load_values(from + call.columns, own.count, call.aligned);
      add(gate, gate_bias);
      add(up, up_bias);
      with_function(call.function, [&](auto function) {
        MEGATRON_UNROLL
        for (int i = 0; i < Packet<T>::kSize; ++i) {
          const auto both = megatron::gated_gradient<decltype(function)>(gate.of[i], kGated ? up.of[i] : 1.0f,
                                                                         gradient.of[i]);
          gate.of[i] = both.gate;
          up.of[i] = both.up;
        }
      });
      store_values(to, gate, own.count, call.aligned);
      if (kGated) store_values(to + call.columns, up, own.count, call.aligned);
      add(gate_sums, gate);
      add(up_sums, up);
    }
    if (call.bias != nullptr) {
      store_part<T>(parts + part * width, gate_sums, call.columns);
      if (kGated) store_part<T>(parts + part * width + call.columns, up_sums, call.columns);
    }
  }
}

// Adds up the parts of 32 columns a block, in a fixed order.
template <typename B>
__global__ void __launch_bounds__(kWarp* kPartThreads)
    sum_parts(B* __restrict__ bias_gradient, const float* __restrict__ parts, int64_t part_count, int64_t width) {
  __shared__ float shared[kPartThreads][kWarp];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  for (int64_t part = threadIdx.y; part < part_count && column < width; part += kPartThreads) {
    sum += parts[part * width + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int thread = 1; thread < kPartThreads; ++thread) sum += shared[thread][threadIdx.x];
  bias_gradient[column] = from_float<B>(sum);
}

constexpr int64_t kMostBlockRows = 65535;  // CUDA's limit of a grid's second dimension

template <typename T>
dim3 grid_of(const Call& call, int64_t rows_per_block) {
  const int64_t block_rows = blocks_for(call.rows, rows_per_block);
  return dim3(static_cast<unsigned>(blocks_for(call.columns, kWarp * Packet<T>::kSize)),
              static_cast<unsigned>(block_rows < kMostBlockRows ? block_rows : kMostBlockRows));
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

extern "C" int megatron_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t columns,
                                           int function, int gated, int dtype, int bias_dtype, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned = is_aligned(y) && is_aligned(x) && columns % Packet<T>::kSize == 0;
    const Call call{rows, columns, static_cast<ActivationFunction>(function), bias, static_cast<DType>(bias_dtype),
                    aligned};
    const dim3 grid = grid_of<T>(call, kRowThreads * kRowsPerThread), block(kWarp, kRowThreads);
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
  const int64_t rows_each = bias != nullptr ? megatron::rows_per_bias_part(rows) : kRowThreads * kRowsPerThread;
  const int error = with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool aligned = is_aligned(dx) && is_aligned(dy) && is_aligned(x) && columns % Packet<T>::kSize == 0;
    const Call call{rows, columns, static_cast<ActivationFunction>(function), bias, static_cast<DType>(bias_dtype),
                    aligned};
    const dim3 grid = grid_of<T>(call, rows_each), block(kWarp, kRowThreads);
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
  return with_type(bias_dtype, [&](auto element) {
    using B = decltype(element);
    const int64_t width = gated ? 2 * columns : columns;
    MEGATRON_LAUNCH((sum_parts<B>), dim3(static_cast<unsigned>(blocks_for(width, kWarp))), dim3(kWarp, kPartThreads),
                    0, stream, static_cast<B*>(bias_gradient), bias_parts, blocks_for(rows, rows_each), width);
    return static_cast<int>(cudaGetLastError());
  });
}
