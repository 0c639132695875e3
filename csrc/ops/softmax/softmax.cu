// Scaled softmax with dropout on a GPU. A row's scores stay in registers from the only read to the only write, unless there
// are more than kRegisterKeys: then they are read again for each pass, from the L2 cache while rows fit into it.
#include "softmax/softmax.h"

#include "base/device.h"

namespace {

using megatron::BroadcastStrides;
using megatron::ScoreSizes;

constexpr int kItems = 16;  // scores that a thread holds
constexpr int kMostThreads = 512;  // of a block that holds a row; with more, registers would not suffice
constexpr int kLongThreads = 1024;
constexpr int64_t kRegisterKeys = kItems * kMostThreads;
constexpr int kRowsPerBlock = 4;  // of rows that one warp holds

template <typename T>
struct Forward {
  T* result;
  T* probabilities;  // null without dropout
  const T* scores;
  const uint8_t* mask;
  BroadcastStrides mask_strides;
  const void* bias;
  BroadcastStrides bias_strides;
  bool bias_is_float;
  const int64_t* rows;
  const uint32_t* columns;
  ScoreSizes sizes;
  float scale, dropout_scale;
  int32_t threshold;
  bool causal;
};

template <typename T>
struct Backward {
  T* score_gradient;
  const T* gradient;
  const T* probabilities;
  const int64_t* rows;  // null without dropout
  const uint32_t* columns;
  ScoreSizes sizes;
  float scale, dropout_scale;
  int32_t threshold;
  bool causal;
};

// kSize adjacent elements in one access, or in several of 16 bytes.
template <int kSize, typename T>
struct __align__(kSize * sizeof(T) < 16 ? kSize * sizeof(T) : 16) Run {
  T values[kSize];
};

template <int kSize, typename T>
__device__ __forceinline__ Run<kSize, T> load_run(const T* from) {
  constexpr int kBytes = kSize * sizeof(T);
  Run<kSize, T> run;
  if constexpr (kSize == 1) {
    run.values[0] = *from;
  } else if constexpr (kBytes == 4) {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(from);
    memcpy(&run, &bits, 4);
  } else if constexpr (kBytes == 8) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    memcpy(&run, &bits, 8);
  } else {
    constexpr int kPacket = Packet<T>::kSize;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; i += kPacket) {
      const Packet<T> packet = load_packet(from + i);
      memcpy(&run.values[i], &packet, 16);
    }
  }
  return run;
}

template <int kSize, typename T>
__device__ __forceinline__ void store_run(T* to, const Run<kSize, T>& run) {
  if constexpr (kSize == 1) {
    *to = run.values[0];
  } else {
    Packet<T> packet;
    memcpy(&packet, &run, 16);
    store_packet(to, packet);
  }
}

// The reduction over the threads of a row: a warp, or a block of which `parts` is shared.
template <typename Operation>
__device__ __forceinline__ float row_reduce(float value, float* parts, Operation operation, float neutral) {
  if (blockDim.x == kWarp) return warp_reduce(value, operation);
  return block_reduce(value, parts, operation, neutral);
}

// The dropout factors, 0 or the scale, of the columns from `first` on.
template <int kSize, typename Task>
__device__ __forceinline__ void dropout_factors(float* factors, const Task& task, uint32_t row_hash, int64_t first) {
  MEGATRON_UNROLL
  for (int i = 0; i < kSize; i += 2) {
    const uint32_t bits = megatron::pair_bits(row_hash, task.columns[(first + i) / 2]);
    if constexpr (kSize == 1) {
      factors[0] = megatron::is_kept((first & 1) ? bits >> 16 : bits, task.threshold) ? task.dropout_scale : 0.0f;
    } else {
      factors[i] = megatron::is_kept(bits, task.threshold) ? task.dropout_scale : 0.0f;
      factors[i + 1] = megatron::is_kept(bits >> 16, task.threshold) ? task.dropout_scale : 0.0f;
    }
  }
}

// One row of a forward pass, for its threads.
template <typename T, int kSize>
struct ForwardRow {
  const T* scores;
  T* result;
  T* probabilities;
  const uint8_t* mask;
  const T* bias;
  const float* float_bias;
  int64_t visible;
  uint32_t hash;

  __device__ __forceinline__ ForwardRow(const Forward<T>& task, int64_t row) {
    const megatron::RowPlace place = megatron::place_of(row, task.sizes);
    const int64_t bias_offset = megatron::offset_of(place, task.bias_strides);
    scores = task.scores + row * task.sizes.keys;
    result = task.result + row * task.sizes.keys;
    probabilities = task.probabilities == nullptr ? nullptr : task.probabilities + row * task.sizes.keys;
    mask = task.mask == nullptr ? nullptr : task.mask + megatron::offset_of(place, task.mask_strides);
    const bool has_bias = task.bias != nullptr;
    bias = has_bias && !task.bias_is_float ? static_cast<const T*>(task.bias) + bias_offset : nullptr;
    float_bias = has_bias && task.bias_is_float ? static_cast<const float*>(task.bias) + bias_offset : nullptr;
    visible = megatron::visible_keys(place.query, task.sizes, task.causal);
    hash = task.rows == nullptr ? 0 : static_cast<uint32_t>(task.rows[row]);
  }

  // The scaled, biased scores from column `first` on; -inf if hidden. The products are rounded separately: fused with
  // the subtraction of the rounded maximum, they would differ from it by more than 1 from 1e8 on.
  __device__ __forceinline__ void load(const Forward<T>& task, int64_t first, float* values) const {
    if (first >= visible) {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) values[i] = -INFINITY;
      return;
    }
    const Run<kSize, T> run = load_run<kSize>(scores + first);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) values[i] = __fmul_rn(to_float(run.values[i]), task.scale);
    if (bias != nullptr) add(load_run<kSize>(bias + first), values);
    if (float_bias != nullptr) add(load_run<kSize>(float_bias + first), values);
    if (mask != nullptr) {
      const Run<kSize, uint8_t> hidden = load_run<kSize>(mask + first);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) values[i] = hidden.values[i] ? -INFINITY : values[i];
    }
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) values[i] = first + i < visible ? values[i] : -INFINITY;
  }

  template <typename B>
  static __device__ __forceinline__ void add(const Run<kSize, B>& run, float* values) {
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) values[i] = __fadd_rn(values[i], to_float(run.values[i]));
  }

  // Writes probabilities from column `first` on, before and after dropout.
  __device__ __forceinline__ void write(const Forward<T>& task, int64_t first, const float* values) const {
    Run<kSize, T> run;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) run.values[i] = from_float<T>(values[i]);
    if (probabilities == nullptr) {
      store_run<kSize>(result + first, run);
      return;
    }
    store_run<kSize>(probabilities + first, run);
    float factors[kSize];
    dropout_factors<kSize>(factors, task, hash, first);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) run.values[i] = from_float<T>(values[i] * factors[i]);
    store_run<kSize>(result + first, run);
  }
};

template <typename T, int kSize>
__global__ void __launch_bounds__(kMostThreads) forward_kernel(const Forward<T> task, int64_t row_count) {
  __shared__ float parts[kWarp];
  const int64_t keys = task.sizes.keys;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < row_count;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const ForwardRow<T, kSize> own(task, row);
    float values[kItems], largest = -INFINITY, sum = 0.0f;
    MEGATRON_UNROLL
    for (int i = 0; i < kItems; i += kSize) {
      own.load(task, (i / kSize * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kSize, values + i);
    }
    MEGATRON_UNROLL
    for (int i = 0; i < kItems; ++i) largest = fmaxf(largest, values[i]);
    const float shift = megatron::exponent_shift(row_reduce(largest, parts, Max(), -INFINITY));
    MEGATRON_UNROLL
    for (int i = 0; i < kItems; ++i) {
      values[i] = megatron::exp_of(values[i] - shift);
      sum += values[i];
    }
    const megatron::Divisor<float> divisor = megatron::divisor_of(row_reduce(sum, parts, Sum(), 0.0f));
    MEGATRON_UNROLL
    for (int i = 0; i < kItems; ++i) values[i] = megatron::quotient(values[i], divisor);
    MEGATRON_UNROLL
    for (int i = 0; i < kItems; i += kSize) {
      const int64_t first = (i / kSize * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kSize;
      if (first < keys) own.write(task, first, values + i);
    }
  }
}

// One block per row of any length.
template <typename T, int kSize>
__global__ void __launch_bounds__(kLongThreads) long_forward_kernel(const Forward<T> task, int64_t row_count) {
  __shared__ float parts[kWarp];
  const int64_t keys = task.sizes.keys, start = static_cast<int64_t>(threadIdx.x) * kSize;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kSize;
  for (int64_t row = blockIdx.x; row < row_count; row += gridDim.x) {
    const ForwardRow<T, kSize> own(task, row);
    float values[kSize], largest = -INFINITY, sum = 0.0f;
    for (int64_t first = start; first < own.visible; first += step) {
      own.load(task, first, values);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) largest = fmaxf(largest, values[i]);
    }
    const float shift = megatron::exponent_shift(block_reduce(largest, parts, Max(), -INFINITY));
    for (int64_t first = start; first < own.visible; first += step) {
      own.load(task, first, values);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) sum += megatron::exp_of(values[i] - shift);
    }
    const megatron::Divisor<float> divisor = megatron::divisor_of(block_reduce(sum, parts, Sum(), 0.0f));
    for (int64_t first = start; first < keys; first += step) {
      own.load(task, first, values);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        values[i] = megatron::quotient(megatron::exp_of(values[i] - shift), divisor);
      }
      own.write(task, first, values);
    }
  }
}

// One row of a backward pass.
template <typename T, int kSize>
struct BackwardRow {
  int64_t offset, visible;
  uint32_t hash;

  __device__ __forceinline__ BackwardRow(const Backward<T>& task, int64_t row) {
    offset = row * task.sizes.keys;
    visible = megatron::visible_keys(row % task.sizes.queries, task.sizes, task.causal);
    hash = task.rows == nullptr ? 0 : static_cast<uint32_t>(task.rows[row]);
  }

  // The gradients of the probabilities from column `first` on, and the probabilities; both 0 beyond what is visible.
  __device__ __forceinline__ void load(const Backward<T>& task, int64_t first, float* gradients,
                                       Run<kSize, T>& probabilities) const {
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      gradients[i] = 0.0f;
      probabilities.values[i] = from_float<T>(0.0f);
    }
    if (first >= visible) return;
    probabilities = load_run<kSize>(task.probabilities + offset + first);
    const Run<kSize, T> run = load_run<kSize>(task.gradient + offset + first);
    float factors[kSize];
    if (task.rows != nullptr) dropout_factors<kSize>(factors, task, hash, first);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      const float gradient = to_float(run.values[i]) * (task.rows == nullptr ? 1.0f : factors[i]);
      const bool is_visible = first + i < visible;
      gradients[i] = is_visible ? gradient : 0.0f;
      probabilities.values[i] = is_visible ? probabilities.values[i] : from_float<T>(0.0f);
    }
  }

  __device__ __forceinline__ void write(const Backward<T>& task, int64_t first, const float* gradients,
                                        const Run<kSize, T>& probabilities, float dot) const {
    Run<kSize, T> run;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      run.values[i] = from_float<T>(
          megatron::score_gradient(to_float(probabilities.values[i]), gradients[i], dot, task.scale));
    }
    store_run<kSize>(task.score_gradient + offset + first, run);
  }
};

template <typename T, int kSize>
__global__ void __launch_bounds__(kMostThreads) backward_kernel(const Backward<T> task, int64_t row_count) {
  __shared__ float parts[kWarp];
  constexpr int kRuns = kItems / kSize;
  const int64_t keys = task.sizes.keys;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < row_count;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const BackwardRow<T, kSize> own(task, row);
    float gradients[kItems], dot = 0.0f;
    Run<kSize, T> probabilities[kRuns];
    MEGATRON_UNROLL
    for (int i = 0; i < kRuns; ++i) {
      own.load(task, (i * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kSize, gradients + i * kSize,
               probabilities[i]);
      MEGATRON_UNROLL
      for (int j = 0; j < kSize; ++j) dot += gradients[i * kSize + j] * to_float(probabilities[i].values[j]);
    }
    dot = row_reduce(dot, parts, Sum(), 0.0f);
    MEGATRON_UNROLL
    for (int i = 0; i < kRuns; ++i) {
      const int64_t first = (i * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kSize;
      if (first < keys) own.write(task, first, gradients + i * kSize, probabilities[i], dot);
    }
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kLongThreads) long_backward_kernel(const Backward<T> task, int64_t row_count) {
  __shared__ float parts[kWarp];
  const int64_t keys = task.sizes.keys, start = static_cast<int64_t>(threadIdx.x) * kSize;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kSize;
  for (int64_t row = blockIdx.x; row < row_count; row += gridDim.x) {
    const BackwardRow<T, kSize> own(task, row);
    float gradients[kSize], dot = 0.0f;
    Run<kSize, T> probabilities;
    for (int64_t first = start; first < own.visible; first += step) {
      own.load(task, first, gradients, probabilities);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) dot += gradients[i] * to_float(probabilities.values[i]);
    }
    dot = block_reduce(dot, parts, Sum(), 0.0f);
    for (int64_t first = start; first < keys; first += step) {
      own.load(task, first, gradients, probabilities);
      own.write(task, first, gradients, probabilities, dot);
    }
  }
}

__global__ void columns_kernel(uint32_t* columns, int64_t pairs, uint64_t column_base) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; pair < pairs; pair += step) {
    columns[pair] = megatron::column_hash(pair, column_base);
  }
}

void hash_columns(uint32_t* columns, int64_t keys, uint64_t column_base, void* stream) {
  constexpr int kThreads = 256;
  const int64_t pairs = (keys + 1) / 2;
  MEGATRON_LAUNCH(columns_kernel, dim3(grid_size(pairs, kThreads)), dim3(kThreads), 0, stream, columns, pairs,
                  column_base);
}

// True if rows at `data`, `stride` elements apart, all start at a multiple of `size` elements.
bool starts_at_multiples(const void* data, const BroadcastStrides& strides, int64_t element_bytes, int64_t size) {
  const int64_t bytes = size * element_bytes < 16 ? size * element_bytes : 16;
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && strides.sample % size == 0 && strides.head % size == 0 &&
         strides.query % size == 0;
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <typename T>
bool takes_packets(const Forward<T>& task) {
  constexpr int kSize = Packet<T>::kSize;
  return task.sizes.keys % kSize == 0 && is_aligned(task.scores) && is_aligned(task.result) &&
         is_aligned(task.probabilities) && starts_at_multiples(task.mask, task.mask_strides, 1, kSize) &&
         starts_at_multiples(task.bias, task.bias_strides, task.bias_is_float ? 4 : sizeof(T), kSize);
}

template <typename T>
bool takes_packets(const Backward<T>& task) {
  return task.sizes.keys % Packet<T>::kSize == 0 && is_aligned(task.gradient) && is_aligned(task.probabilities) &&
         is_aligned(task.score_gradient);
}

// Launches the kernel for rows in registers or the one for long rows.
template <typename Task>
void launch(void (*kernel)(Task, int64_t), void (*long_kernel)(Task, int64_t), const Task& task, void* stream) {
  const ScoreSizes& sizes = task.sizes;
  const int64_t rows = sizes.batch * sizes.heads * sizes.queries;
  if (sizes.keys > kRegisterKeys) {
    MEGATRON_LAUNCH(long_kernel, dim3(grid_size(rows, 1)), dim3(kLongThreads), 0, stream, task, rows);
    return;
  }
  const unsigned warps = static_cast<unsigned>(blocks_for(sizes.keys, kItems * kWarp));
  const unsigned rows_per_block = warps == 1 ? kRowsPerBlock : 1;
  MEGATRON_LAUNCH(kernel, dim3(grid_size(rows, rows_per_block)), dim3(warps * kWarp, rows_per_block), 0, stream, task,
                  rows);
}

template <typename T>
int run(const Forward<T>& task, void* stream) {
  if (takes_packets(task)) {
    launch(forward_kernel<T, Packet<T>::kSize>, long_forward_kernel<T, Packet<T>::kSize>, task, stream);
  } else {
    launch(forward_kernel<T, 1>, long_forward_kernel<T, 1>, task, stream);
  }
  return static_cast<int>(cudaGetLastError());
}

template <typename T>
int run(const Backward<T>& task, void* stream) {
  if (takes_packets(task)) {
    launch(backward_kernel<T, Packet<T>::kSize>, long_backward_kernel<T, Packet<T>::kSize>, task, stream);
  } else {
    launch(backward_kernel<T, 1>, long_backward_kernel<T, 1>, task, stream);
  }
  return static_cast<int>(cudaGetLastError());
}

BroadcastStrides strides_from(const int64_t* strides) {
  return strides == nullptr ? BroadcastStrides{0, 0, 0} : BroadcastStrides{strides[0], strides[1], strides[2]};
}

}  // namespace

extern "C" int megatron_softmax_forward(void* result, void* probabilities, const void* scores, const uint8_t* mask,
                                        const int64_t* mask_strides, const void* bias, const int64_t* bias_strides,
                                        const int64_t* rows, uint32_t* columns, const int64_t* sizes, float scale,
                                        int causal, int dtype, int bias_dtype, int32_t threshold, uint64_t column_base,
                                        void* stream) {
  if (rows != nullptr) hash_columns(columns, sizes[3], column_base, stream);
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const Forward<T> task{static_cast<T*>(result),
                          static_cast<T*>(probabilities),
                          static_cast<const T*>(scores),
                          mask,
                          strides_from(mask_strides),
                          bias,
                          strides_from(bias_strides),
                          bias_dtype == megatron::kFloat32,
                          rows,
                          columns,
                          {sizes[0], sizes[1], sizes[2], sizes[3]},
                          scale,
                          megatron::dropout_scale(threshold),
                          threshold,
                          causal != 0};
    return run(task, stream);
  });
}

extern "C" int megatron_softmax_backward(void* score_gradient, const void* gradient, const void* probabilities,
                                         const int64_t* rows, uint32_t* columns, const int64_t* sizes, float scale,
                                         int causal, int dtype, int32_t threshold, uint64_t column_base, void* stream) {
  if (rows != nullptr) hash_columns(columns, sizes[3], column_base, stream);
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const Backward<T> task{static_cast<T*>(score_gradient),
                           static_cast<const T*>(gradient),
                           static_cast<const T*>(probabilities),
                           rows,
                           columns,
                           {sizes[0], sizes[1], sizes[2], sizes[3]},
                           scale,
                           megatron::dropout_scale(threshold),
                           threshold,
                           causal != 0};
    return run(task, stream);
  });
}
