// AdamW over lists of tensors on a GPU: a block per chunk of a tensor, one pass over all memory.
#include "adamw/adamw.h"

#include "multi_tensor/chunks.h"

namespace {

using megatron::AdamWStep;

constexpr int kThreads = 256;  // fewer than of other kernels, since each holds more

// The chunk's part of each tensor.
template <typename G>
struct Parts {
  float *weight, *exp_avg, *exp_avg_sq;
  const G* gradient;
};

template <typename G, typename Copy>
__device__ __forceinline__ void update_chunk(const Parts<G>& parts, int64_t count, float factor, const AdamWStep& step,
                                             bool has_quads, Copy copy) {
  const int64_t quads = has_quads ? count / 4 : 0;
  for (int64_t i = threadIdx.x; i < quads; i += kThreads) {
    const int64_t at = 4 * i;
    Quad weight = load_quad(parts.weight + at), first = load_quad(parts.exp_avg + at);
    Quad second = load_quad(parts.exp_avg_sq + at);
    const Quad gradient = load_quad(parts.gradient + at);
    MEGATRON_UNROLL
    for (int k = 0; k < 4; ++k) {
      megatron::update(weight.values[k], first.values[k], second.values[k], gradient.values[k] * factor, step);
    }
    store_quad(parts.weight + at, weight);
    store_quad(parts.exp_avg + at, first);
    store_quad(parts.exp_avg_sq + at, second);
    MEGATRON_UNROLL
    for (int k = 0; k < 4; ++k) copy(at + k, weight.values[k]);
  }
  for (int64_t i = 4 * quads + threadIdx.x; i < count; i += kThreads) {
    float weight = parts.weight[i], first = parts.exp_avg[i], second = parts.exp_avg_sq[i];
    megatron::update(weight, first, second, to_float(parts.gradient[i]) * factor, step);
    parts.weight[i] = weight;
    parts.exp_avg[i] = first;
    parts.exp_avg_sq[i] = second;
    copy(i, weight);
  }
}

template <typename G>
__device__ __forceinline__ void update_chunk(const TensorTable& table, const Chunk& chunk, float factor,
                                             const AdamWStep& step) {
  using namespace megatron;
  const auto floats = [&](int kind) { return pointer_to<float>(table.address(kind, chunk.tensor), chunk.first); };
  const Parts<G> parts{floats(kWeight), floats(kExpAvg), floats(kExpAvgSq),
                       pointer_to<const G>(table.address(kGradient, chunk.tensor), chunk.first)};
  const bool has_quads = is_aligned_for_quads(parts.weight) && is_aligned_for_quads(parts.exp_avg) &&
                         is_aligned_for_quads(parts.exp_avg_sq) && is_aligned_for_quads(parts.gradient);
  const int64_t copies = table.address(kCopy, chunk.tensor);
  if (copies == 0) {
    update_chunk(parts, chunk.count, factor, step, has_quads, [](int64_t, float) {});
    return;
  }
  with_element(table.dtype(kCopy, chunk.tensor), [&](auto element) {
    using T = decltype(element);
    T* to = pointer_to<T>(copies, chunk.first);
    update_chunk(parts, chunk.count, factor, step, has_quads,
                 [to](int64_t at, float weight) { to[at] = from_float<T>(weight); });
  });
}

__global__ void __launch_bounds__(kThreads)
    update_tensors(TensorTable table, megatron::AdamW optimizer, float factor,
                   const float* __restrict__ device_factor, const float* __restrict__ device_rate,
                   const float* __restrict__ skip) {
  __shared__ AdamWStep step;
  if (skip != nullptr && *skip != 0.0f) return;  // uniform over all threads
  const Chunk chunk = chunk_of(table, blockIdx.x);
  if (threadIdx.x == 0) {
    if (device_rate != nullptr) optimizer.learning_rate = *device_rate;
    step = megatron::step_of(optimizer, *pointer_to<const float>(table.address(megatron::kStep, chunk.tensor), 0) + 1.0);
  }
  __syncthreads();
  if (device_factor != nullptr) factor *= *device_factor;
  with_element(table.dtype(megatron::kGradient, chunk.tensor), [&](auto element) {
    update_chunk<decltype(element)>(table, chunk, factor, step);
  });
}

// A separate launch, since the blocks of the other one read the steps.
__global__ void __launch_bounds__(kThreads)
    count_steps(TensorTable table, const float* __restrict__ skip) {
  if (skip != nullptr && *skip != 0.0f) return;
  const int64_t tensor = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (tensor < table.tensors) *pointer_to<float>(table.address(megatron::kStep, tensor), 0) += 1.0f;
}

}  // namespace

extern "C" int megatron_adamw_step(const int64_t* table, int64_t tensors, int64_t chunks, double learning_rate,
                                   double beta1, double beta2, double epsilon, double weight_decay, float factor,
                                   const float* device_factor, const float* device_rate, const float* skip,
                                   void* stream) {
  const TensorTable entries{table, tensors, megatron::kAdamWKinds};
  const megatron::AdamW optimizer{learning_rate, beta1, beta2, epsilon, weight_decay};
  if (chunks > 0) {
    MEGATRON_LAUNCH(update_tensors, static_cast<unsigned>(chunks), kThreads, 0, stream, entries, optimizer,
                    factor, device_factor, device_rate, skip);
  }
  MEGATRON_LAUNCH(count_steps, static_cast<unsigned>(blocks_for(tensors, kThreads)), kThreads, 0, stream,
                  entries, skip);
  return static_cast<int>(cudaGetLastError());
}
