// Layer norm and RMS norm on a GPU.
//
// A row is held in registers by a warp, or by the warps of a block of up to 512 threads. If all rows begin at 16-byte
// boundaries, a thread has packets of 16 bytes; otherwise its elements are interleaved with the other threads', so that a
// warp's accesses are contiguous. Longer rows are streamed: read again for each of their sums.
#include "norm/norm.h"

#include "base/device.h"

namespace {

using megatron::GradientMeans;

constexpr int kMostThreads = 512;  // of a block
constexpr int kMostWarps = kMostThreads / kWarp;
constexpr int kGradientThreads = 256;  // of a block whose threads sum gradients of a packet's columns in registers

// Threads of a block: x indexes those of a row, y the concurrent rows.
struct Layout {
  dim3 block;
  int packets;  // per thread; 0 if rows are streamed
  bool packed;  // true if a packet's elements are contiguous
};

struct Pair {
  float first, second;
};

// Shared memory of the reductions. Consecutive sums use different halves, so that one barrier each suffices.
struct Meeting {
  Pair* parts;  // [2, kMostWarps], shared
  int turn;
};

// The sums of two values over the threads of each row, on all of them. All threads of the block take part.
__device__ __forceinline__ Pair row_sums(Pair value, Meeting& meeting) {
  value = {warp_reduce(value.first, Sum()), warp_reduce(value.second, Sum())};
  if (blockDim.x == kWarp) return value;
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  Pair* parts = meeting.parts + meeting.turn * kMostWarps + threadIdx.y * warps;
  meeting.turn = 1 - meeting.turn;
  if (lane == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  const Pair part = lane < warps ? parts[lane] : Pair{0.0f, 0.0f};
  return {warp_reduce(part.first, Sum()), warp_reduce(part.second, Sum())};
}

// The values of a packet of T, from `from` on; in float32 they fill one or two packets.
template <typename T, typename U>
__device__ __forceinline__ void load_values(float* values, const U* from) {
  MEGATRON_UNROLL
  for (int begin = 0; begin < Packet<T>::kSize; begin += Packet<U>::kSize) {
    const Packet<U> packet = load_packet(from + begin);
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<U>::kSize; ++i) values[begin + i] = to_float(packet.values[i]);
  }
}

// A vector over the columns, whose elements are T or float32.
template <typename T>
struct Vector {
  const void* data;
  bool is_wide;

  __device__ __forceinline__ float at(int64_t j) const {
    return is_wide ? static_cast<const float*>(data)[j] : to_float(static_cast<const T*>(data)[j]);
  }
  __device__ __forceinline__ void load(float* values, int64_t j) const {
    if (is_wide) {
      load_values<T>(values, static_cast<const float*>(data) + j);
    } else {
      load_values<T>(values, static_cast<const T*>(data) + j);
    }
  }
};

template <typename T>
__device__ __forceinline__ void store_values(T* to, const float* values) {
  Packet<T> packet;
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) packet.values[i] = from_float<T>(values[i]);
  store_packet(to, packet);
}

// The elements of a row that a thread has: `k` counts its packets, whose elements are `kStride` columns apart. `columns` is
// 0 for threads without a row, which only take part in barriers.
template <typename T, bool kPacked>
struct Own {
  static constexpr int kSize = Packet<T>::kSize, kStride = kPacked ? 1 : kWarp;

  int columns;

  // The first column of a packet: a warp has kWarp contiguous packets.
  __device__ __forceinline__ int first(int k) const {
    const int thread = threadIdx.x + k * blockDim.x, lane = threadIdx.x % kWarp;
    return kPacked ? thread * kSize : (thread - lane) * kSize + lane;
  }
  // The number of columns from the first of a packet to the end of the row; 0 or less beyond it.
  __device__ __forceinline__ int left(int k) const { return columns - first(k); }
  __device__ __forceinline__ bool has(int k) const { return left(k) > 0; }
  // True if the row has an element of a packet. A contiguous packet never crosses the end of the row.
  __device__ __forceinline__ static bool is_in(int left, int i) { return left > (kPacked ? 0 : i * kStride); }

  // Elements beyond the row are 0.
  __device__ __forceinline__ Packet<T> packet(const T* row, int k) const {
    const T* from = row + first(k);
    if (kPacked) return load_packet(from);
    Packet<T> packet;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) packet.values[i] = is_in(left(k), i) ? from[i * kStride] : from_float<T>(0.0f);
    return packet;
  }
  __device__ __forceinline__ void load(float* values, const T* row, int k) const {
    const Packet<T> own = packet(row, k);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) values[i] = to_float(own.values[i]);
  }
  __device__ __forceinline__ void load(float* values, const Vector<T>& vector, int k) const {
    if (kPacked) return vector.load(values, first(k));
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) values[i] = is_in(left(k), i) ? vector.at(first(k) + i * kStride) : 0.0f;
  }
  template <typename U>
  __device__ __forceinline__ void store(U* row, const float* values, int k) const {
    U* to = row + first(k);
    if (kPacked) {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; i += Packet<U>::kSize) store_values(to + i, values + i);
      return;
    }
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      if (is_in(left(k), i)) to[i * kStride] = from_float<U>(values[i]);
    }
  }
};

// A thread's columns of a vector, the same in all of its rows: kept in the stored type if that is T and
// registers suffice.
template <typename T, int kPackets, bool kPacked>
struct OwnVector {
  static constexpr bool kHeld = kPacked && kPackets < 4;

  const Vector<T>& vector;
  bool is_held;
  Packet<T> held[kPackets];

  __device__ __forceinline__ OwnVector(const Vector<T>& of, int64_t columns)
      : vector(of), is_held(kHeld && of.data != nullptr && (!of.is_wide || sizeof(T) == sizeof(float))) {
    const Own<T, kPacked> own{static_cast<int>(columns)};
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      if (is_held && own.has(k)) held[k] = own.packet(static_cast<const T*>(vector.data), k);
    }
  }
  __device__ __forceinline__ void load(float* values, const Own<T, kPacked>& own, int k) {
    if (!is_held) return own.load(values, vector, k);
    keep_packed(held[k]);
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) values[i] = to_float(held[k].values[i]);
  }
};

template <typename T>
struct Forward {
  T *y, *total;
  float *mean, *inverse;
  const T *x, *residual;
  Vector<T> weight, bias, branch_bias;  // null without one
  int64_t rows, columns;
  float eps, weight_offset;  // 1 for a zero-centred weight
};

// An element of y from the normalized one. RMS norm whose weight is not zero-centred rounds first, as in Llama.
template <typename T>
__device__ __forceinline__ float scaled(const Forward<T>& of, float normal, float weight, float bias) {
  if (of.mean == nullptr && of.weight_offset == 0.0f) normal = to_float(from_float<T>(normal));
  return normal * (weight + of.weight_offset) + bias;
}

template <typename T>
__device__ __forceinline__ void write_statistics(const Forward<T>& of, int64_t row, int64_t columns, float mean,
                                                 float inverse) {
  if (threadIdx.x != 0 || columns == 0) return;
  of.inverse[row] = inverse;
  if (of.mean != nullptr) of.mean[row] = mean;
}

template <typename T, int kPackets, bool kPacked>
__global__ void __launch_bounds__(kMostThreads) forward_held(const Forward<T> of) {
  constexpr int kSize = Packet<T>::kSize;
  __shared__ Pair parts[2 * kMostWarps];
  Meeting meeting{parts, 0};
  OwnVector<T, kPackets, kPacked> own_weight(of.weight, of.columns), own_bias(of.bias, of.columns),
      own_branch_bias(of.branch_bias, of.columns);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < of.rows; first += step) {
    const int64_t row = first + threadIdx.y, begin = row * of.columns;
    const Own<T, kPacked> own{row < of.rows ? static_cast<int>(of.columns) : 0};
    float x[kPackets][kSize];
    float sum = 0.0f;
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      if (!own.has(k)) continue;
      own.load(x[k], of.x + begin, k);
      if (of.residual != nullptr) {
        float residual[kSize], branch_bias[kSize] = {};
        own.load(residual, of.residual + begin, k);
        if (of.branch_bias.data != nullptr) own_branch_bias.load(branch_bias, own, k);
        MEGATRON_UNROLL
        for (int i = 0; i < kSize; ++i) x[k][i] = to_float(from_float<T>(x[k][i] + branch_bias[i] + residual[i]));
        own.store(of.total + begin, x[k], k);
      }
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) sum += x[k][i];
    }
    float mean = 0.0f;
    if (of.mean != nullptr) mean = row_sums({sum, 0.0f}, meeting).first / static_cast<float>(of.columns);
    float squares = 0.0f;
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        if (own.is_in(own.left(k), i)) squares += (x[k][i] - mean) * (x[k][i] - mean);
      }
    }
    const float inverse =
        megatron::inverse_deviation(row_sums({squares, 0.0f}, meeting).first, of.columns, of.eps);
    write_statistics(of, row, own.columns, mean, inverse);
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      if (!own.has(k)) continue;
      float weight[kSize], bias[kSize] = {};
      own_weight.load(weight, own, k);
      if (of.bias.data != nullptr) own_bias.load(bias, own, k);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        x[k][i] = scaled(of, megatron::normalized(x[k][i], mean, inverse), weight[i], bias[i]);
      }
      own.store(of.y + begin, x[k], k);
    }
  }
}

template <typename T>
struct Backward {
  T* dx;
  float* partials;  // [1 to 3, row blocks, h]: of weight, bias and branch_bias
  const T *dy, *total_gradient, *x;
  Vector<T> weight;
  const float *mean, *inverse;
  int64_t rows, columns, rows_per_block;
  float weight_offset;
  bool has_bias;         // true if the gradient of the bias is requested
  bool has_branch_bias;  // and that of the branch's bias
};

template <typename T>
__device__ __forceinline__ GradientMeans<float> gradient_means(const Backward<T>& of, Pair sums) {
  const float size = static_cast<float>(of.columns);
  return {of.mean != nullptr ? sums.first / size : 0.0f, sums.second / size};
}

// Writes the sums of a thread block over its rows to the partial sums; concurrent rows are added in order.
// `sums` are those of a thread's columns; `shared` holds a row for each row at work.
template <typename T, int kPackets, bool kPacked>
__device__ __forceinline__ void write_partials(float* to, const float (*sums)[Packet<T>::kSize], float* shared,
                                               int64_t columns) {
  constexpr int kSize = Packet<T>::kSize;
  const Own<T, kPacked> own{static_cast<int>(columns)};
  if (blockDim.y > 1) {
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      float* row = shared + threadIdx.y * columns + own.first(k);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        if (own.is_in(own.left(k), i)) row[i * own.kStride] = sums[k][i];
      }
    }
    __syncthreads();
    const int threads = blockDim.x * blockDim.y;
    for (int64_t j = threadIdx.y * blockDim.x + threadIdx.x; j < columns; j += threads) {
      float sum = shared[j];
      for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * columns + j];
      to[j] = sum;
    }
    __syncthreads();
    return;
  }
  MEGATRON_UNROLL
  for (int k = 0; k < kPackets; ++k) {
    if (own.has(k)) own.store(to, sums[k], k);
  }
}

// The gradient of x for one block of rows, and that block's sums for weight and biases, in registers until the end.
// kSumsX: whether the gradient of x is summed, which is that of the branch's bias.
template <typename T, int kPackets, bool kPacked, bool kSumsX>
__global__ void __launch_bounds__(kPackets == 1 ? kGradientThreads : kMostThreads, kPackets == 1 && kPacked ? 3 : 1)
    backward_held(const Backward<T> of) {
  constexpr int kSize = Packet<T>::kSize;
  constexpr bool kEarly = kPackets == 1;  // loads the gradient to add before waiting for the row's sums
  __shared__ Pair parts[2 * kMostWarps];
  MEGATRON_DYNAMIC_SHARED(float, shared);
  Meeting meeting{parts, 0};
  OwnVector<T, kPackets, kPacked> own_weight(of.weight, of.columns);
  float of_weight[kPackets][kSize] = {}, of_bias[kPackets][kSize] = {};
  float of_branch_bias[kSumsX ? kPackets : 1][kSize] = {};
  const int64_t start = static_cast<int64_t>(blockIdx.x) * of.rows_per_block;
  const int64_t end = start + of.rows_per_block < of.rows ? start + of.rows_per_block : of.rows;
  for (int64_t first = start; first < end; first += blockDim.y) {
    const int64_t row = first + threadIdx.y, begin = row * of.columns;
    const Own<T, kPacked> own{row < end ? static_cast<int>(of.columns) : 0};
    const float mean = own.columns > 0 && of.mean != nullptr ? of.mean[row] : 0.0f;
    const float inverse = own.columns > 0 ? of.inverse[row] : 0.0f;
    Packet<T> x[kPackets], dy[kPackets], direct[kPackets];  // packed: the sums of vectors need the registers
    Pair sums{0.0f, 0.0f};
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      if (!own.has(k)) continue;
      x[k] = own.packet(of.x + begin, k);
      dy[k] = own.packet(of.dy + begin, k);
      if (kEarly && of.total_gradient != nullptr) direct[k] = own.packet(of.total_gradient + begin, k);
      float weight[kSize];
      own_weight.load(weight, own, k);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const float normal = megatron::normalized(to_float(x[k].values[i]), mean, inverse);
        const float gradient = to_float(dy[k].values[i]), scaled_gradient = gradient * (weight[i] + of.weight_offset);
        of_weight[k][i] += gradient * normal;
        of_bias[k][i] += gradient;
        sums.first += scaled_gradient;
        sums.second += scaled_gradient * normal;
      }
    }
    const GradientMeans<float> means = gradient_means(of, row_sums(sums, meeting));
    MEGATRON_UNROLL
    for (int k = 0; k < kPackets; ++k) {
      if (!own.has(k)) continue;
      keep_packed(x[k]);
      keep_packed(dy[k]);
      float weight[kSize], dx[kSize] = {};
      own_weight.load(weight, own, k);
      if (of.total_gradient != nullptr) {
        if (!kEarly) direct[k] = own.packet(of.total_gradient + begin, k);
        MEGATRON_UNROLL
        for (int i = 0; i < kSize; ++i) dx[i] = to_float(direct[k].values[i]);
      }
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const float normal = megatron::normalized(to_float(x[k].values[i]), mean, inverse);
        const float scaled_gradient = to_float(dy[k].values[i]) * (weight[i] + of.weight_offset);
        dx[i] += megatron::input_gradient(scaled_gradient, normal, inverse, means);
        if constexpr (kSumsX) of_branch_bias[k][i] += dx[i];
      }
      own.store(of.dx + begin, dx, k);
    }
  }
  float* to = of.partials + static_cast<int64_t>(blockIdx.x) * of.columns;
  write_partials<T, kPackets, kPacked>(to, of_weight, shared, of.columns);
  const int64_t row_blocks = gridDim.x;
  if (of.has_bias) write_partials<T, kPackets, kPacked>(to + row_blocks * of.columns, of_bias, shared, of.columns);
  if constexpr (kSumsX) {
    to += (of.has_bias ? 2 : 1) * row_blocks * of.columns;
    write_partials<T, kPackets, kPacked>(to, of_branch_bias, shared, of.columns);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads) forward_streamed(const Forward<T> of) {
  __shared__ Pair parts[2 * kMostWarps];
  Meeting meeting{parts, 0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < of.rows; first += step) {
    const int64_t row = first + threadIdx.y, begin = row * of.columns;
    const int64_t columns = row < of.rows ? of.columns : 0;  // threads without a row only keep the barriers company
    if (of.residual != nullptr) {
      for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
        const float branch_bias = of.branch_bias.data != nullptr ? of.branch_bias.at(j) : 0.0f;
        of.total[begin + j] = from_float<T>(to_float(of.x[begin + j]) + branch_bias + to_float(of.residual[begin + j]));
      }
    }
    const T* x = of.residual != nullptr ? of.total : of.x;  // each thread reads what it wrote itself
    float mean = 0.0f;
    if (of.mean != nullptr) {
      float sum = 0.0f;
      for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) sum += to_float(x[begin + j]);
      mean = row_sums({sum, 0.0f}, meeting).first / static_cast<float>(of.columns);
    }
    float squares = 0.0f;
    for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
      const float centred = to_float(x[begin + j]) - mean;
      squares += centred * centred;
    }
    const float inverse =
        megatron::inverse_deviation(row_sums({squares, 0.0f}, meeting).first, of.columns, of.eps);
    write_statistics(of, row, columns, mean, inverse);
    for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
      const float bias = of.bias.data != nullptr ? of.bias.at(j) : 0.0f;
      const float normal = megatron::normalized(to_float(x[begin + j]), mean, inverse);
      of.y[begin + j] = from_float<T>(scaled(of, normal, of.weight.at(j), bias));
    }
  }
}

// The gradient of x only.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) backward_streamed(const Backward<T> of) {
  __shared__ Pair parts[2 * kMostWarps];
  Meeting meeting{parts, 0};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < of.rows; first += step) {
    const int64_t row = first + threadIdx.y, begin = row * of.columns;
    const int64_t columns = row < of.rows ? of.columns : 0;  // threads without a row only keep the barriers company
    const float mean = columns > 0 && of.mean != nullptr ? of.mean[row] : 0.0f;
    const float inverse = columns > 0 ? of.inverse[row] : 0.0f;
    Pair sums{0.0f, 0.0f};
    for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
      const float gradient = to_float(of.dy[begin + j]) * (of.weight.at(j) + of.weight_offset);
      sums.first += gradient;
      sums.second += gradient * megatron::normalized(to_float(of.x[begin + j]), mean, inverse);
    }
    const GradientMeans<float> means = gradient_means(of, row_sums(sums, meeting));
    for (int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
      const float gradient = to_float(of.dy[begin + j]) * (of.weight.at(j) + of.weight_offset);
      const float normal = megatron::normalized(to_float(of.x[begin + j]), mean, inverse);
      const float direct = of.total_gradient != nullptr ? to_float(of.total_gradient[begin + j]) : 0.0f;
      of.dx[begin + j] = from_float<T>(direct + megatron::input_gradient(gradient, normal, inverse, means));
    }
  }
}

constexpr int kColumnRows = 8;  // rows of threads of the blocks below, which are a warp of columns wide

// The sum of a column over the rows of threads, on the first of them.
__device__ __forceinline__ float column_sum(float value, float (*shared)[kWarp]) {
  shared[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int y = 0; y < kColumnRows && threadIdx.y == 0; ++y) sum += shared[y][threadIdx.x];
  __syncthreads();
  return sum;
}

// The sums of weight and bias over one block of rows, for the streamed gradient: a thread per column and row of threads.
template <typename T>
__global__ void __launch_bounds__(kWarp* kColumnRows) sum_columns(const Backward<T> of) {
  __shared__ float shared[kColumnRows][kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.y) * of.rows_per_block;
  const int64_t end = start + of.rows_per_block < of.rows ? start + of.rows_per_block : of.rows;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float of_weight = 0.0f, of_bias = 0.0f;
  for (int64_t row = start + threadIdx.y; row < end && j < of.columns; row += kColumnRows) {
    const float gradient = to_float(of.dy[row * of.columns + j]);
    const float mean = of.mean != nullptr ? of.mean[row] : 0.0f;
    of_weight += gradient * megatron::normalized(to_float(of.x[row * of.columns + j]), mean, of.inverse[row]);
    of_bias += gradient;
  }
  of_weight = column_sum(of_weight, shared);
  of_bias = column_sum(of_bias, shared);
  if (threadIdx.y != 0 || j >= of.columns) return;
  const int64_t to = static_cast<int64_t>(blockIdx.y) * of.columns + j;
  of.partials[to] = of_weight;
  if (of.has_bias) of.partials[gridDim.y * of.columns + to] = of_bias;
}

// The sum of the branch's bias from the written gradient of x, for threads without registers for it.
template <typename T>
__global__ void __launch_bounds__(kWarp* kColumnRows) sum_written(const Backward<T> of) {
  __shared__ float shared[kColumnRows][kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.y) * of.rows_per_block;
  const int64_t end = start + of.rows_per_block < of.rows ? start + of.rows_per_block : of.rows;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  for (int64_t row = start + threadIdx.y; row < end && j < of.columns; row += kColumnRows) {
    sum += to_float(of.dx[row * of.columns + j]);
  }
  sum = column_sum(sum, shared);
  if (threadIdx.y != 0 || j >= of.columns) return;
  of.partials[((of.has_bias ? 2 : 1) * static_cast<int64_t>(gridDim.y) + blockIdx.y) * of.columns + j] = sum;
}

// The outputs of the vectors' gradients, in the order of their partial sums.
struct Sums {
  void* to[3];
  bool is_wide[3];
};

// The sums over the row blocks, for the vector blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(kWarp* kColumnRows)
    sum_partials(const Sums sums, const float* partials, int64_t row_blocks, int64_t columns) {
  __shared__ float shared[kColumnRows][kWarp];
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const float* from = partials + static_cast<int64_t>(blockIdx.y) * row_blocks * columns;
  float sum = 0.0f;
  for (int64_t block = threadIdx.y; block < row_blocks && j < columns; block += kColumnRows) {
    sum += from[block * columns + j];
  }
  sum = column_sum(sum, shared);
  if (threadIdx.y != 0 || j >= columns) return;
  if (sums.is_wide[blockIdx.y]) {
    static_cast<float*>(sums.to[blockIdx.y])[j] = sum;
  } else {
    static_cast<T*>(sums.to[blockIdx.y])[j] = from_float<T>(sum);
  }
}

unsigned threads_for(int64_t count) {
  const int64_t threads = blocks_for(count, kWarp) * kWarp;
  return static_cast<unsigned>(threads < kMostThreads ? threads : kMostThreads);
}

// The layout for rows of so many columns, in blocks of about `threads` threads; threads of a longer row than `most` packets
// have two or four.
Layout layout_for(int64_t columns, int64_t packet_size, bool is_aligned, unsigned threads, int64_t most) {
  const int64_t packets = blocks_for(columns, packet_size);
  Layout layout;
  layout.packed = is_aligned && columns % packet_size == 0;
  const bool is_held = packets <= (layout.packed ? 4 : 2) * kMostThreads;  // with more, registers do not suffice
  layout.packets = !is_held ? 0 : packets <= most ? 1 : packets <= 2 * kMostThreads ? 2 : 4;
  // A streamed row has about four columns to a thread.
  const unsigned of_row = threads_for(is_held ? blocks_for(packets, layout.packets) : blocks_for(columns, 4));
  layout.block = dim3(of_row, of_row < threads ? threads / of_row : 1);
  return layout;
}

// Blocks for so many rows: at most 16 for each multiprocessor, which is more than run at once; they stride over the rows.
unsigned row_grid(int64_t rows, const dim3& block) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t blocks = blocks_for(rows, block.y), most = 16 * static_cast<int64_t>(processors);
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

bool is_aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

template <typename T>
int forward(const Forward<T>& of, void* stream) {
  const bool aligned = is_aligned(of.y) && is_aligned(of.total) && is_aligned(of.x) && is_aligned(of.residual) &&
                       is_aligned(of.weight.data) && is_aligned(of.bias.data) && is_aligned(of.branch_bias.data);
  const Layout layout = layout_for(of.columns, Packet<T>::kSize, aligned, 256, kMostThreads);
  const unsigned grid = row_grid(of.rows, layout.block);
  switch (layout.packets * (layout.packed ? 1 : -1)) {
    case 1: MEGATRON_LAUNCH((forward_held<T, 1, true>), grid, layout.block, 0, stream, of); break;
    case 2: MEGATRON_LAUNCH((forward_held<T, 2, true>), grid, layout.block, 0, stream, of); break;
    case 4: MEGATRON_LAUNCH((forward_held<T, 4, true>), grid, layout.block, 0, stream, of); break;
    case -1: MEGATRON_LAUNCH((forward_held<T, 1, false>), grid, layout.block, 0, stream, of); break;
    case -2: MEGATRON_LAUNCH((forward_held<T, 2, false>), grid, layout.block, 0, stream, of); break;
    default: MEGATRON_LAUNCH((forward_streamed<T>), grid, layout.block, 0, stream, of);
  }
  return static_cast<int>(cudaGetLastError());
}

// True if threads that hold rows sum the gradient of x: not with 32 values each, which would not fit their registers.
template <typename T>
constexpr bool sums_held(int packets) {
  return packets * Packet<T>::kSize < 32;
}

template <typename T, bool kSumsX>
void launch_backward(const Backward<T>& of, const Layout& layout, unsigned row_blocks, void* stream) {
  constexpr bool kSumsFour = kSumsX && sums_held<T>(4);
  const size_t shared = layout.block.y > 1 ? layout.block.y * of.columns * sizeof(float) : 0;
  switch (layout.packets * (layout.packed ? 1 : -1)) {
    case 1: MEGATRON_LAUNCH((backward_held<T, 1, true, kSumsX>), row_blocks, layout.block, shared, stream, of); break;
    case 2: MEGATRON_LAUNCH((backward_held<T, 2, true, kSumsX>), row_blocks, layout.block, 0, stream, of); break;
    case 4: MEGATRON_LAUNCH((backward_held<T, 4, true, kSumsFour>), row_blocks, layout.block, 0, stream, of); break;
    case -1: MEGATRON_LAUNCH((backward_held<T, 1, false, kSumsX>), row_blocks, layout.block, shared, stream, of); break;
    case -2: MEGATRON_LAUNCH((backward_held<T, 2, false, kSumsX>), row_blocks, layout.block, 0, stream, of); break;
    default: MEGATRON_LAUNCH((backward_streamed<T>), row_grid(of.rows, layout.block), layout.block, 0, stream, of);
  }
}

template <typename T>
int backward(const Backward<T>& of, const Sums& sums, void* stream) {
  const bool aligned = is_aligned(of.dx) && is_aligned(of.dy) && is_aligned(of.total_gradient) && is_aligned(of.x) &&
                       is_aligned(of.weight.data) && is_aligned(of.partials);
  const Layout layout = layout_for(of.columns, Packet<T>::kSize, aligned, kGradientThreads, kGradientThreads);
  const unsigned row_blocks = static_cast<unsigned>(blocks_for(of.rows, of.rows_per_block));
  const unsigned column_blocks = static_cast<unsigned>(blocks_for(of.columns, kWarp));
  const dim3 column_block(kWarp, kColumnRows);
  if (of.has_branch_bias) {
    launch_backward<T, true>(of, layout, row_blocks, stream);
  } else {
    launch_backward<T, false>(of, layout, row_blocks, stream);
  }
  if (layout.packets == 0) {
    MEGATRON_LAUNCH((sum_columns<T>), dim3(column_blocks, row_blocks), column_block, 0, stream, of);
  }
  if (of.has_branch_bias && (layout.packets == 0 || !sums_held<T>(layout.packets))) {
    MEGATRON_LAUNCH((sum_written<T>), dim3(column_blocks, row_blocks), column_block, 0, stream, of);
  }
  MEGATRON_LAUNCH((sum_partials<T>), dim3(column_blocks, 1 + of.has_bias + of.has_branch_bias), column_block, 0, stream,
                  sums, of.partials, static_cast<int64_t>(row_blocks), of.columns);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

extern "C" int megatron_norm_forward(void* y, void* total, float* mean, float* inverse, const void* x,
                                     const void* residual, const void* weight, const void* bias,
                                     const void* branch_bias, int64_t rows, int64_t columns, float eps,
                                     int zero_centered, int dtype, int weight_dtype, int branch_bias_dtype,
                                     void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const bool is_wide = weight_dtype == DType::kFloat32;
    return forward(Forward<T>{static_cast<T*>(y), static_cast<T*>(total), mean, inverse, static_cast<const T*>(x),
                              static_cast<const T*>(residual), {weight, is_wide}, {bias, is_wide},
                              {branch_bias, branch_bias_dtype == DType::kFloat32}, rows, columns, eps,
                              zero_centered ? 1.0f : 0.0f},
                   stream);
  });
}

extern "C" int megatron_norm_backward(void* dx, void* dweight, void* dbias, void* dbranch_bias, float* partials,
                                      const void* dy, const void* total_gradient, const void* x, const void* weight,
                                      const float* mean, const float* inverse, int64_t rows, int64_t columns,
                                      int zero_centered, int dtype, int weight_dtype, int branch_bias_dtype,
                                      void* stream) {
  const bool is_wide = weight_dtype == DType::kFloat32, is_branch_wide = branch_bias_dtype == DType::kFloat32;
  Sums sums{{dweight, dbias, dbranch_bias}, {is_wide, is_wide, is_branch_wide}};
  if (dbias == nullptr) sums = {{dweight, dbranch_bias, nullptr}, {is_wide, is_branch_wide, false}};
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return backward(Backward<T>{static_cast<T*>(dx), partials, static_cast<const T*>(dy),
                                static_cast<const T*>(total_gradient), static_cast<const T*>(x),
                                {weight, is_wide}, mean, inverse, rows, columns,
                                megatron::device_rows_per_block(rows), zero_centered ? 1.0f : 0.0f, dbias != nullptr,
                                dbranch_bias != nullptr},
                    sums, stream);
  });
}
