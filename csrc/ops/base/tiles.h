// Elementwise kernels over rows of columns: tiles of 32 packets by 8 rows; only `.cu` files include it.
//
// A thread meets the same columns in all its rows. So it loads or computes once what belongs to columns (a bias, hashes),
// and adds up sums over rows (the gradient of a bias) in registers.
#pragma once

#include "base/column_sums.h"
#include "base/device.h"

namespace {

constexpr int kTileRows = 8;
constexpr int kTileThreads = kWarp * kTileRows;
constexpr int kPartThreads = 16;

template <typename T>
struct Values {
  static constexpr int kSize = Packet<T>::kSize;
  float of[kSize];
};

// The elements of a packet; those beyond `count` are 0. `aligned`: full packets begin at 16-byte boundaries.
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

template <typename T>
__device__ __forceinline__ void add(Values<T>& to, const Values<T>& values) {
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) to.of[i] += values.of[i];
}

// A vector with an entry for each column, of a dtype of its own; it may be missing.
struct ColumnVector {
  const void* entries;
  DType dtype;
};

// `count` entries from `first` on, 0 if the vector is missing. The dtype is asked for here, since a thread comes here
// once, and kernels need not be compiled for each pair of dtypes.
template <typename T>
__device__ __forceinline__ Values<T> load_columns(const ColumnVector& vector, int64_t first, int count) {
  Values<T> values = {};
  if (vector.entries == nullptr) return values;
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) {
    if (i >= count) continue;
    switch (vector.dtype) {
      case DType::kFloat16: values.of[i] = to_float(static_cast<const __half*>(vector.entries)[first + i]); break;
      case DType::kBFloat16:
        values.of[i] = to_float(static_cast<const __nv_bfloat16*>(vector.entries)[first + i]);
        break;
      default: values.of[i] = static_cast<const float*>(vector.entries)[first + i];
    }
  }
  return values;
}

// The columns of this thread.
template <typename T>
struct OwnColumns {
  int64_t first;
  int count;  // 0 beyond the last column

  __device__ __forceinline__ explicit OwnColumns(int64_t columns) {
    first = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * Packet<T>::kSize;
    const int64_t left = columns - first;
    count = left < 0 ? 0 : static_cast<int>(left < Packet<T>::kSize ? left : Packet<T>::kSize);
  }
};

// Writes the sums of a block's columns over its threads' rows, in the order of the threads.
template <typename T>
__device__ __forceinline__ void store_part(float* part, const Values<T>& sums, int64_t columns) {
  constexpr int kColumns = kWarp * Packet<T>::kSize;
  __shared__ float shared[kTileRows][kColumns];
  __syncthreads();  // a block may come here more than once
  for (int i = 0; i < Packet<T>::kSize; ++i) shared[threadIdx.y][threadIdx.x * Packet<T>::kSize + i] = sums.of[i];
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  for (int column = threadIdx.y * kWarp + threadIdx.x; column < kColumns; column += kTileThreads) {
    float sum = 0.0f;
    for (int row = 0; row < kTileRows; ++row) sum += shared[row][column];
    if (first + column < columns) part[first + column] = sum;
  }
}

// Adds up the parts of 32 columns a block, in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kWarp* kPartThreads)
    sum_parts(T* __restrict__ sums, const float* __restrict__ parts, int64_t count, int64_t columns) {
  __shared__ float shared[kPartThreads][kWarp];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  for (int64_t part = threadIdx.y; part < count && column < columns; part += kPartThreads) {
    sum += parts[part * columns + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int thread = 1; thread < kPartThreads; ++thread) sum += shared[thread][threadIdx.x];
  sums[column] = from_float<T>(sum);
}

inline int launch_sum_parts(void* sums, int dtype, const float* parts, int64_t count, int64_t columns, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    MEGATRON_LAUNCH((sum_parts<T>), dim3(static_cast<unsigned>(blocks_for(columns, kWarp))),
                    dim3(kWarp, kPartThreads), 0, stream, static_cast<T*>(sums), parts, count, columns);
    return static_cast<int>(cudaGetLastError());
  });
}

constexpr int64_t kMostTilesDown = 65535;  // CUDA's limit of a grid's second dimension; kernels stride beyond it

template <typename T>
dim3 tile_grid(int64_t rows, int64_t rows_per_block, int64_t columns) {
  const int64_t down = blocks_for(rows, rows_per_block);
  return dim3(static_cast<unsigned>(blocks_for(columns, kWarp * Packet<T>::kSize)),
              static_cast<unsigned>(down < kMostTilesDown ? down : kMostTilesDown));
}

inline dim3 tile_block() { return dim3(kWarp, kTileRows); }

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace
