// Initial values of weights on a GPU: a thread per pair of columns, which share 64 random bits.
#include "initial_values/initial_values.h"

#include "base/device.h"

namespace {

constexpr int kThreads = 256;

template <typename T, int kDistribution>
__global__ void __launch_bounds__(kThreads)
    fill_shard(T* __restrict__ target, int64_t first, int64_t last, megatron::ShardPlace place, int64_t first_row,
               int64_t pair_count, uint64_t base, float deviation) {
  const int64_t width = place.box[place.dimensions - 1], begin = place.start[place.dimensions - 1];
  const int64_t pairs = megatron::pairs_of(place), first_pair = megatron::first_pair_of(place);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < pair_count; i += step) {
    const int64_t row = first_row + i / pairs, pair = first_pair + i % pairs;
    const uint64_t row_bits = megatron::row_hash(megatron::global_row(place, row), base);
    const megatron::ValuePair drawn = megatron::values_of<kDistribution>(megatron::pair_hash(row_bits, pair));
    MEGATRON_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int64_t column = 2 * pair + part - begin, at = row * width + column;
      if (column < 0 || column >= width || at < first || at >= last) continue;
      target[at - first] = from_float<T>(megatron::product(part == 0 ? drawn.even : drawn.odd, deviation));
    }
  }
}

template <typename T, int kDistribution>
int launch(void* target, int64_t first, int64_t count, const megatron::ShardPlace& place, uint64_t base,
           float deviation, void* stream) {
  const int64_t width = place.box[place.dimensions - 1], first_row = first / width;
  const int64_t rows = (first + count + width - 1) / width - first_row;
  const int64_t pair_count = rows * megatron::pairs_of(place);
  MEGATRON_LAUNCH((fill_shard<T, kDistribution>), grid_size(pair_count, kThreads), kThreads, 0, stream,
                  static_cast<T*>(target), first, first + count, place, first_row, pair_count, base, deviation);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

extern "C" int megatron_initial_values_fill(void* target, int64_t first, int64_t count, int dtype,
                                            const int64_t* shape, const int64_t* start, const int64_t* box,
                                            int dimensions, int distribution, uint64_t base, float deviation,
                                            void* stream) {
  megatron::ShardPlace place{dimensions, {}, {}, {}};
  for (int d = 0; d < dimensions; ++d) {
    place.shape[d] = shape[d];
    place.start[d] = start[d];
    place.box[d] = box[d];
  }
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    switch (distribution) {
      case megatron::kNormal:
        return launch<T, megatron::kNormal>(target, first, count, place, base, deviation, stream);
      case megatron::kTruncatedNormal:
        return launch<T, megatron::kTruncatedNormal>(target, first, count, place, base, deviation, stream);
      default: return launch<T, megatron::kUniform>(target, first, count, place, base, deviation, stream);
    }
  });
}
