// Lookup of rows of a vocabulary shard on a GPU, and its deterministic gradient. The gradient sums sorted positions chunk
// by chunk; sums that cross chunks go to partial sums, which a second launch combines in order. The division of
// columns among threads does not affect the sums.
#include "embedding/embedding.h"

#include "base/device.h"

namespace {

using megatron::kChunkPositions;

constexpr int kThreads = 128;
constexpr unsigned kMostRowsOfBlocks = 65535;  // of a grid's second dimension

template <typename T>
__global__ void __launch_bounds__(kThreads)
    look_up(T* __restrict__ rows, const T* __restrict__ weight, const int64_t* __restrict__ ids, int64_t count,
            int64_t shard_rows, int64_t columns, int64_t first_row) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = ids[i] - first_row;
    const bool is_own = row >= 0 && row < shard_rows;
    T* to = rows + i * columns;
    const T* from = weight + (is_own ? row : 0) * columns;
    const bool has_packets = share_alignment(to, from);
    const int64_t head = has_packets ? elements_to_alignment(to, columns) : columns;
    const int64_t packets = (columns - head) / Packet<T>::kSize, tail = head + packets * Packet<T>::kSize;
    for (int64_t column = threadIdx.x; column < head; column += kThreads) {
      to[column] = is_own ? from[column] : from_float<T>(0.0f);
    }
    for (int64_t packet = threadIdx.x; packet < packets; packet += kThreads) {
      const int64_t column = head + packet * Packet<T>::kSize;
      Packet<T> values;
      if (is_own) {
        values = load_packet(from + column);
      } else {
        MEGATRON_UNROLL
        for (int k = 0; k < Packet<T>::kSize; ++k) values.values[k] = from_float<T>(0.0f);
      }
      store_packet(to + column, values);
    }
    for (int64_t column = tail + threadIdx.x; column < columns; column += kThreads) {
      to[column] = is_own ? from[column] : from_float<T>(0.0f);
    }
  }
}

// Arguments of both passes over the gradient.
struct Sorted {
  const int64_t *ids, *positions;
  int64_t count;

  __device__ __forceinline__ int64_t chunk_end(int64_t chunk) const {
    const int64_t end = (chunk + 1) * kChunkPositions;
    return end < count ? end : count;
  }
  // True if adjacent positions belong to one run of equal ids.
  __device__ __forceinline__ bool joins(int64_t before) const {
    return before >= 0 && before + 1 < count && ids[before] == ids[before + 1];
  }
};

// The sums of a thread's columns: a packet of 16 bytes if all rows begin at 16-byte boundaries, otherwise one column.
template <typename T, int kColumns>
struct Columns {
  float of[kColumns];

  __device__ __forceinline__ void clear() {
    MEGATRON_UNROLL
    for (int k = 0; k < kColumns; ++k) of[k] = 0.0f;
  }
  __device__ __forceinline__ void add(const T* from) {
    if constexpr (kColumns == 1) {
      of[0] += to_float(*from);
    } else {
      const Packet<T> packet = load_packet(from);
      MEGATRON_UNROLL
      for (int k = 0; k < kColumns; ++k) of[k] += to_float(packet.values[k]);
    }
  }
  __device__ __forceinline__ void add_sums(const float* from) {
    if constexpr (kColumns == 1) {
      of[0] += *from;
    } else {
      MEGATRON_UNROLL
      for (int begin = 0; begin < kColumns; begin += Packet<float>::kSize) {
        const Packet<float> packet = load_packet(from + begin);
        MEGATRON_UNROLL
        for (int k = 0; k < Packet<float>::kSize; ++k) of[begin + k] += packet.values[k];
      }
    }
  }
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kColumns == 1) {
      *to = from_float<T>(of[0]);
    } else {
      Packet<T> packet;
      MEGATRON_UNROLL
      for (int k = 0; k < kColumns; ++k) packet.values[k] = from_float<T>(of[k]);
      store_packet(to, packet);
    }
  }
  __device__ __forceinline__ void store_sums(float* to) const {
    if constexpr (kColumns == 1) {
      *to = of[0];
    } else {
      MEGATRON_UNROLL
      for (int begin = 0; begin < kColumns; begin += Packet<float>::kSize) {
        Packet<float> packet;
        MEGATRON_UNROLL
        for (int k = 0; k < Packet<float>::kSize; ++k) packet.values[k] = of[begin + k];
        store_packet(to + begin, packet);
      }
    }
  }
};

// A run of equal ids within the chunk is written at once; one that began in an earlier chunk goes to the chunk's first
// partial sum, one that continues in a later chunk to the second.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads)
    sum_chunks(T* __restrict__ result, const T* __restrict__ gradient, Sorted sorted, float* __restrict__ partial_sums,
               int64_t shard_rows, int64_t columns, int64_t first_row) {
  const int64_t chunk = blockIdx.x, begin = chunk * kChunkPositions, end = sorted.chunk_end(chunk);
  for (int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kColumns; column < columns;
       column += static_cast<int64_t>(gridDim.y) * kThreads * kColumns) {
    bool is_continued = sorted.joins(begin - 1);
    Columns<T, kColumns> sum;
    sum.clear();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = sorted.ids[i] - first_row;
      const bool is_own = row >= 0 && row < shard_rows;
      if (is_own) sum.add(gradient + sorted.positions[i] * columns + column);
      const bool goes_on = sorted.joins(i);
      if (goes_on && i + 1 < end) continue;
      if (is_own && is_continued) {
        sum.store_sums(partial_sums + 2 * chunk * columns + column);
      } else if (is_own && goes_on) {
        sum.store_sums(partial_sums + (2 * chunk + 1) * columns + column);
      } else if (is_own) {
        sum.store(result + row * columns + column);
      }
      sum.clear();
      is_continued = false;
    }
  }
}

// One block per chunk, for the run that continues from it into later chunks.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads)
    join_chunks(T* __restrict__ result, Sorted sorted, const float* __restrict__ partial_sums, int64_t shard_rows,
                int64_t columns, int64_t first_row) {
  const int64_t chunk = blockIdx.x, begin = chunk * kChunkPositions, last = sorted.chunk_end(chunk) - 1;
  const int64_t id = sorted.ids[last], row = id - first_row;
  const bool began_earlier = sorted.ids[begin] == id && sorted.joins(begin - 1);
  if (!sorted.joins(last) || began_earlier || row < 0 || row >= shard_rows) return;
  for (int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kColumns; column < columns;
       column += static_cast<int64_t>(gridDim.y) * kThreads * kColumns) {
    Columns<T, kColumns> sum;
    sum.clear();
    sum.add_sums(partial_sums + (2 * chunk + 1) * columns + column);
    for (int64_t next = chunk + 1; next * kChunkPositions < sorted.count; ++next) {
      if (sorted.ids[next * kChunkPositions] != id) break;
      sum.add_sums(partial_sums + 2 * next * columns + column);
    }
    sum.store(result + row * columns + column);
  }
}

template <typename T, int kColumns>
int launch_backward(T* result, const T* gradient, const Sorted& sorted, float* partial_sums, int64_t shard_rows,
                    int64_t columns, int64_t first_row, void* stream) {
  const int64_t tiles = blocks_for(columns, static_cast<int64_t>(kThreads) * kColumns);
  const dim3 grid(static_cast<unsigned>(blocks_for(sorted.count, kChunkPositions)),
                  tiles < kMostRowsOfBlocks ? static_cast<unsigned>(tiles) : kMostRowsOfBlocks);
  MEGATRON_LAUNCH((sum_chunks<T, kColumns>), grid, kThreads, 0, stream, result, gradient, sorted, partial_sums,
                  shard_rows, columns, first_row);
  MEGATRON_LAUNCH((join_chunks<T, kColumns>), grid, kThreads, 0, stream, result, sorted, partial_sums, shard_rows,
                  columns, first_row);
  return static_cast<int>(cudaGetLastError());
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

extern "C" int megatron_embedding_forward(void* rows, const void* weight, const int64_t* ids, int64_t count,
                                          int64_t shard_rows, int64_t columns, int64_t first_row, int dtype,
                                          void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    MEGATRON_LAUNCH(look_up<T>, grid_size(count, 1), kThreads, 0, stream, static_cast<T*>(rows),
                    static_cast<const T*>(weight), ids, count, shard_rows, columns, first_row);
    return static_cast<int>(cudaGetLastError());
  });
}

extern "C" int megatron_embedding_backward(void* result, const void* gradient, const int64_t* sorted_ids,
                                           const int64_t* positions, float* partial_sums, int64_t count,
                                           int64_t shard_rows, int64_t columns, int64_t first_row, int dtype,
                                           void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kSize = Packet<T>::kSize;
    const bool takes_packets = columns % kSize == 0 && is_aligned(result) && is_aligned(gradient) &&
                               is_aligned(partial_sums);
    const auto launch = takes_packets ? launch_backward<T, kSize> : launch_backward<T, 1>;
    return launch(static_cast<T*>(result), static_cast<const T*>(gradient), Sorted{sorted_ids, positions, count},
                  partial_sums, shard_rows, columns, first_row, stream);
  });
}
