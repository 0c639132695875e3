// Initial values of weights: CPU loops, and the operation as torch sees it.
#include "initial_values/initial_values.h"

#include "base/host.h"

namespace megatron::initial_values {
namespace {

constexpr int64_t kBlockPairs = 256;  // pairs of columns drawn at once

// A part of one row: `count` values of the columns from the shard's `column` on, a block at a time.
template <typename T, int kDistribution>
MEGATRON_CLONES void fill_row(T* to, uint64_t row, int64_t column, int64_t count, float deviation) {
  float values[2 * kBlockPairs];
  for (int64_t done = 0; done < count;) {
    const int64_t pair = (column + done) / 2, skipped = column + done - 2 * pair;
    const int64_t taken = std::min(2 * kBlockPairs - skipped, count - done), pairs = (skipped + taken + 1) / 2;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const ValuePair drawn = values_of<kDistribution>(pair_hash(row, pair + i));
      values[2 * i] = drawn.even;
      values[2 * i + 1] = drawn.odd;
    }
#pragma omp simd
    for (int64_t i = 0; i < taken; ++i) store(to + done + i, product(values[skipped + i], deviation));
    done += taken;
  }
}

template <typename T, int kDistribution>
void run(const at::Tensor& target, const ShardPlace& place, int64_t first, uint64_t base, float deviation) {
  const int64_t width = place.box[place.dimensions - 1], begin = place.start[place.dimensions - 1];
  const int64_t last = first + target.numel();
  T* to = mutable_data_of<T>(target);
  at::parallel_for(first / width, (last + width - 1) / width, rows_per_task(width), [&](int64_t top, int64_t bottom) {
    for (int64_t row = top; row < bottom; ++row) {
      const int64_t low = std::max(first, row * width), high = std::min(last, (row + 1) * width);
      fill_row<T, kDistribution>(to + (low - first), row_hash(global_row(place, row), base), begin + low - row * width,
                                 high - low, deviation);
    }
  });
}

template <typename T>
void run(const at::Tensor& target, const ShardPlace& place, int64_t first, int64_t distribution, uint64_t base,
         float deviation) {
  switch (distribution) {
    case kNormal: return run<T, kNormal>(target, place, first, base, deviation);
    case kTruncatedNormal: return run<T, kTruncatedNormal>(target, place, first, base, deviation);
    default: return run<T, kUniform>(target, place, first, base, deviation);
  }
}

ShardPlace place_of(at::IntArrayRef shape, at::IntArrayRef start, at::IntArrayRef box) {
  const size_t dimensions = shape.size();
  TORCH_CHECK(dimensions >= 1 && dimensions <= kMostDimensions && start.size() == dimensions && box.size() == dimensions,
              "initial_values: shape ", shape, ", start ", start, " and box ", box,
              " must have one entry for each of 1 to 8 dimensions");
  ShardPlace place{static_cast<int>(dimensions), {}, {}, {}};
  for (size_t d = 0; d < dimensions; ++d) {
    TORCH_CHECK(start[d] >= 0 && box[d] >= 0 && start[d] + box[d] <= shape[d], "initial_values: a box ", box, " from ",
                start, " on does not lie within the shape ", shape);
    place.shape[d] = shape[d];
    place.start[d] = start[d];
    place.box[d] = box[d];
  }
  return place;
}

void fill(const at::Tensor& target, int64_t first, at::IntArrayRef shape, at::IntArrayRef start, at::IntArrayRef box,
          int64_t distribution, int64_t base, double deviation) {
  const ShardPlace place = place_of(shape, start, box);
  int64_t elements = 1;
  for (const int64_t size : box) elements *= size;
  TORCH_CHECK(target.is_contiguous(), "initial_values: the target must be contiguous");
  TORCH_CHECK(first >= 0 && first + target.numel() <= elements, "initial_values: elements ", first, " to ",
              first + target.numel(), " do not lie within the ", elements, " of the box ", box);
  TORCH_CHECK(distribution >= kNormal && distribution <= kUniform, "initial_values: distribution is ", distribution,
              "; it must be 0 (normal), 1 (truncated normal) or 2 (uniform)");
  const c10::OptionalDeviceGuard guard(target.device());
  if (target.numel() == 0) return;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(target)) {
    check_launch(megatron_initial_values_fill(target.mutable_data_ptr(), first, target.numel(),
                                              dtype_code(target.scalar_type()), shape.data(), start.data(), box.data(),
                                              place.dimensions, static_cast<int>(distribution),
                                              static_cast<uint64_t>(base), static_cast<float>(deviation),
                                              stream_of(target)),
                 "initial_values");
    return;
  }
#endif
  TORCH_CHECK(target.scalar_type() != at::kDouble, "initial_values: the target is float64; values are float32");
  MEGATRON_ELEMENTS(target.scalar_type(), T, [&] {
    run<T>(target, place, first, distribution, static_cast<uint64_t>(base), static_cast<float>(deviation));
  });
}

}  // namespace
}  // namespace megatron::initial_values

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "initial_values_(Tensor(a!) target, int first, int[] shape, int[] start, int[] box, int distribution, int base, "
      "float deviation) -> ()");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) { library.impl("initial_values_", &megatron::initial_values::fill); }

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) { library.impl("initial_values_", &megatron::initial_values::fill); }
#endif
