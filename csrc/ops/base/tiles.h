// Elementwise kernels over rows of columns: tiles of 32 packets by 8 rows; only `.cu` files include it.
//
// A thread has the same columns in all its rows. So it loads or computes values of columns (a bias, hashes) once,
// and keeps sums over rows (the gradient of a bias) in registers. If rows begin at 16-byte boundaries, its columns are
// a packet; otherwise they are pairs, interleaved with those of the other threads of the warp, so that the accesses of
// a warp are contiguous.
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

template <typename T>
__device__ __forceinline__ void add(Values<T>& to, const Values<T>& values) {
  MEGATRON_UNROLL
  for (int i = 0; i < Packet<T>::kSize; ++i) to.of[i] += values.of[i];
}

// An optional vector with an entry for each column, in its own dtype.
struct ColumnVector {
  const void* entries;
  DType dtype;
};

// The columns of this thread: as many as a packet has.
template <typename T>
struct OwnColumns {
  static constexpr int kSize = Packet<T>::kSize, kWidth = kWarp * kSize;  // of the tile

  int64_t tile;  // the tile's first column
  int first;     // of this thread, in the tile
  int left;      // columns of the tile; 0 or less beyond the last
  bool aligned;  // all rows of all tensors begin at 16-byte boundaries

  __device__ __forceinline__ OwnColumns(int64_t columns, bool are_aligned) : aligned(are_aligned) {
    tile = static_cast<int64_t>(blockIdx.x) * kWidth;
    first = threadIdx.x * (aligned ? kSize : 2);
    left = static_cast<int>(columns - tile < kWidth ? columns - tile : kWidth);
  }

  // True if it has none.
  __device__ __forceinline__ bool is_empty() const { return first >= left; }

  // Column `i` in the tile. Pairs lie together, and the first of a pair is even.
  __device__ __forceinline__ int in_tile(int i) const { return first + (aligned ? i : i / 2 * 2 * kWarp + i % 2); }

  // The elements of a row; 0 beyond the last column.
  __device__ __forceinline__ Values<T> load(const T* row) const {
    Values<T> values;
    const T* from = row + tile;
    if (aligned) {
      const Packet<T> packet = load_packet(from + first);
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) values.of[i] = to_float(packet.values[i]);
    } else {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const int column = first + i / 2 * 2 * kWarp + i % 2;
        values.of[i] = column < left ? to_float(from[column]) : 0.0f;
      }
    }
    return values;
  }

  __device__ __forceinline__ void store(T* row, const Values<T>& values) const {
    T* to = row + tile;
    if (aligned) {
      Packet<T> packet;
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) packet.values[i] = from_float<T>(values.of[i]);
      store_packet(to + first, packet);
    } else {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) {
        const int column = first + i / 2 * 2 * kWarp + i % 2;
        if (column < left) to[column] = from_float<T>(values.of[i]);
      }
    }
  }

  // The entries of a vector that begins with column 0 at `start`; 0 if it is missing. The dtype is a runtime argument: a
  // thread calls this once, and kernels need not be compiled for each pair of dtypes.
  __device__ __forceinline__ Values<T> load_vector(const ColumnVector& vector, int64_t start = 0) const {
    Values<T> values = {};
    if (vector.entries == nullptr) return values;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      if (in_tile(i) >= left) continue;
      const int64_t at = start + tile + in_tile(i);
      switch (vector.dtype) {
        case DType::kFloat16: values.of[i] = to_float(static_cast<const __half*>(vector.entries)[at]); break;
        case DType::kBFloat16:
          values.of[i] = to_float(static_cast<const __nv_bfloat16*>(vector.entries)[at]);
          break;
        default: values.of[i] = static_cast<const float*>(vector.entries)[at];
      }
    }
    return values;
  }

  // Writes the sums of the tile's columns over its rows of threads, in their order.
  __device__ __forceinline__ void store_part(float* part, const Values<T>& sums) const {
    __shared__ float shared[kTileRows][kWidth];
    __syncthreads();  // a block may call this more than once
    for (int i = 0; i < kSize; ++i) shared[threadIdx.y][in_tile(i)] = sums.of[i];
    __syncthreads();
    for (int column = threadIdx.y * kWarp + threadIdx.x; column < left; column += kTileThreads) {
      float sum = 0.0f;
      for (int row = 0; row < kTileRows; ++row) sum += shared[row][column];
      part[tile + column] = sum;
    }
  }
};

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
