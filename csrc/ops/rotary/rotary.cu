// Rotary positions on a GPU: a thread takes two runs of channels, the two sides of its pairs, in one access each.
#include "rotary/rotary.h"

#include "base/tiles.h"

namespace {

using megatron::Pair;
using megatron::RotaryPart;
using megatron::RotarySizes;
using megatron::RotaryTable;

constexpr int kThreads = 256;

struct Rotation {
  RotaryPart parts[megatron::kMostRotaryParts];
  int part_count;
  RotaryTable table;
  RotarySizes sizes;
  bool interleaved;
  float direction;
};

// kSize adjacent elements: a single one, or whole packets at 16-byte boundaries.
template <int kSize, typename T>
__device__ __forceinline__ void load_floats(const T* from, float* to) {
  if constexpr (kSize == 1) {
    *to = to_float(*from);
  } else {
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; i += Packet<T>::kSize) {
      const Packet<T> packet = load_packet(from + i);
      MEGATRON_UNROLL
      for (int j = 0; j < Packet<T>::kSize; ++j) to[i + j] = to_float(packet.values[j]);
    }
  }
}

template <int kSize, typename T>
__device__ __forceinline__ void store_floats(T* to, const float* from) {
  if constexpr (kSize == 1) {
    *to = from_float<T>(*from);
  } else {
    Packet<T> packet;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) packet.values[i] = from_float<T>(from[i]);
    store_packet(to, packet);
  }
}

// Rotates the kSize pairs from `pair` on of one head.
template <int kSize, bool kInterleaved, typename T, typename C>
__device__ __forceinline__ void rotate(T* to, const T* from, const C* cosines, const C* sines, int64_t pair,
                                       const Rotation& task) {
  const int64_t first = kInterleaved ? 2 * pair : pair;
  const int64_t second = kInterleaved ? first + kSize : pair + task.sizes.pairs;
  float channels[2 * kSize], cosine[kSize], sine[kSize];
  load_floats<kSize>(from + first, channels);
  load_floats<kSize>(from + second, channels + kSize);
  load_floats<kSize>(cosines + pair, cosine);
  load_floats<kSize>(sines + pair, sine);
  MEGATRON_UNROLL
  for (int i = 0; i < kSize; ++i) {
    float& one = channels[kInterleaved ? 2 * i : i];
    float& other = channels[kInterleaved ? 2 * i + 1 : i + kSize];
    const Pair<float> result = megatron::rotated_pair(one, other, cosine[i], sine[i] * task.direction);
    one = result.first;
    other = result.second;
  }
  store_floats<kSize>(to + first, channels);
  store_floats<kSize>(to + second, channels + kSize);
}

// Copies two runs of channels from `first` on.
template <int kSize, typename T>
__device__ __forceinline__ void copy(T* to, const T* from, int64_t first, int64_t channels) {
  float values[kSize];
  load_floats<kSize>(from + first, values);
  store_floats<kSize>(to + first, values);
  if (first + kSize >= channels) return;
  load_floats<kSize>(from + first + kSize, values);
  store_floats<kSize>(to + first + kSize, values);
}

template <typename T, typename C, int kSize>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const Rotation task, int64_t work_per_token, int64_t all) {
  const int64_t per_head = (task.sizes.channels + 2 * kSize - 1) / (2 * kSize);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += step) {
    const int64_t token_index = i / work_per_token;
    const int64_t sample = token_index / task.sizes.tokens, token = token_index - sample * task.sizes.tokens;
    const int64_t within = i - token_index * work_per_token;
    int64_t head_index = within / per_head;
    const int64_t chunk = within - head_index * per_head;
    int own = 0;
    while (head_index >= task.parts[own].heads) head_index -= task.parts[own++].heads;
    const RotaryPart& part = task.parts[own];
    const int64_t group = head_index / part.heads_per_group, head = head_index - group * part.heads_per_group;
    const T* from = static_cast<const T*>(part.from) + offset_of(part.from_strides, sample, token, group, head);
    T* to = static_cast<T*>(part.to) + offset_of(part.to_strides, sample, token, group, head);
    const int64_t pair = chunk * kSize;
    if (part.is_rotated && pair < task.sizes.pairs) {
      const int64_t offset = sample * task.table.sample_stride + token * task.table.token_stride;
      const C* cosines = static_cast<const C*>(task.table.cosines) + offset;
      const C* sines = static_cast<const C*>(task.table.sines) + offset;
      if (task.interleaved) {
        rotate<kSize, true>(to, from, cosines, sines, pair, task);
      } else {
        rotate<kSize, false>(to, from, cosines, sines, pair, task);
      }
    } else {
      copy<kSize>(to, from, 2 * pair, task.sizes.channels);
    }
  }
}

bool are_multiples(const megatron::HeadStrides& strides, int64_t size) {
  return strides.sample % size == 0 && strides.token % size == 0 && strides.group % size == 0 &&
         strides.head % size == 0;
}

// True if every run of kSize channels, and of as many cosines, starts at a 16-byte boundary.
bool takes_packets(const Rotation& task, int64_t size) {
  bool takes = task.sizes.channels % (2 * size) == 0 && task.sizes.pairs % size == 0 &&
               is_aligned(task.table.cosines) && is_aligned(task.table.sines) &&
               task.table.sample_stride % size == 0 && task.table.token_stride % size == 0;
  for (int i = 0; i < task.part_count; ++i) {
    const RotaryPart& part = task.parts[i];
    takes = takes && is_aligned(part.from) && is_aligned(part.to) && are_multiples(part.from_strides, size) &&
            are_multiples(part.to_strides, size);
  }
  return takes;
}

template <typename T, typename C, int kSize>
int launch(const Rotation& task, void* stream) {
  int64_t heads = 0;
  for (int i = 0; i < task.part_count; ++i) heads += task.parts[i].heads;
  const int64_t work_per_token = heads * blocks_for(task.sizes.channels, 2 * kSize);
  const int64_t all = task.sizes.batch * task.sizes.tokens * work_per_token;
  MEGATRON_LAUNCH((rotary_kernel<T, C, kSize>), dim3(grid_size(all, kThreads)), dim3(kThreads), 0, stream, task,
                  work_per_token, all);
  return static_cast<int>(cudaGetLastError());
}

template <typename T, typename C>
int run(const Rotation& task, void* stream) {
  constexpr int kSize = Packet<T>::kSize;
  return takes_packets(task, kSize) ? launch<T, C, kSize>(task, stream) : launch<T, C, 1>(task, stream);
}

// A thread has the same channels of one head in all its tokens. Block row `y` takes `rows_each` tokens,
// striding over the grid; if there are `parts`, each of these groups of tokens has a row of them.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    join_heads(T* __restrict__ to, float* __restrict__ parts, const megatron::JoinedHeads heads, int64_t rows_each) {
  const int64_t members = heads.queries + 2, columns = heads.groups * members * heads.channels;
  const int64_t rows = heads.batch * heads.tokens;
  const OwnColumns<T> own(columns, true);
  const int64_t first = own.tile + own.first;
  const int64_t head = first / heads.channels, group = head / members, member = head - group * members;
  const int part_of = member < heads.queries ? 0 : static_cast<int>(1 + member - heads.queries);
  const megatron::HeadStrides& strides = heads.strides[part_of];
  const T* from = static_cast<const T*>(heads.from[part_of]) + group * strides.group +
                  (part_of == 0 ? member * strides.head : 0) + first - head * heads.channels;
  for (int64_t part = blockIdx.y; part * rows_each < rows; part += gridDim.y) {
    const int64_t end = (part + 1) * rows_each < rows ? (part + 1) * rows_each : rows;
    int64_t row = part * rows_each + threadIdx.y, sample = row / heads.tokens, token = row - sample * heads.tokens;
    Values<T> sums = {};
    for (; row < end && !own.is_empty(); row += kTileRows) {
      const Packet<T> packet = load_packet(from + sample * strides.sample + token * strides.token);
      store_packet(to + row * columns + first, packet);
      MEGATRON_UNROLL
      for (int i = 0; i < Packet<T>::kSize; ++i) sums.of[i] += to_float(packet.values[i]);
      for (token += kTileRows; token >= heads.tokens; token -= heads.tokens) ++sample;
    }
    if (parts != nullptr) own.store_part(parts + part * columns, sums);
  }
}

}  // namespace

extern "C" int megatron_rotary(const megatron::RotaryPart* parts, int part_count, const megatron::RotaryTable* table,
                               const megatron::RotarySizes* sizes, int interleaved, float direction, int dtype,
                               int table_dtype, void* stream) {
  Rotation task{{}, part_count, *table, *sizes, interleaved != 0, direction};
  for (int i = 0; i < part_count; ++i) task.parts[i] = parts[i];
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return table_dtype == megatron::kFloat32 ? run<T, float>(task, stream) : run<T, T>(task, stream);
  });
}

extern "C" int megatron_join_heads(void* to, void* sums, float* parts, const megatron::JoinedHeads* heads, int dtype,
                                   int sums_dtype, void* stream) {
  constexpr int kRowsPerThread = 8;  // without sums
  const int64_t rows = heads->batch * heads->tokens, columns = heads->groups * (heads->queries + 2) * heads->channels;
  const int64_t rows_each = sums != nullptr ? megatron::rows_per_part(rows) : kTileRows * kRowsPerThread;
  const int error = with_type(dtype, [&](auto element) {
    using T = decltype(element);
    MEGATRON_LAUNCH((join_heads<T>), tile_grid<T>(rows, rows_each, columns), tile_block(), 0, stream,
                    static_cast<T*>(to), sums != nullptr ? parts : nullptr, *heads, rows_each);
    return static_cast<int>(cudaGetLastError());
  });
  if (sums == nullptr || error != 0) return error;
  return launch_sum_parts(sums, sums_dtype, parts, blocks_for(rows, rows_each), columns, stream);
}
