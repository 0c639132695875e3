// Norms, scaling and a finite check of lists of tensors on a GPU: a block per chunk of a tensor.
#include "multi_tensor/multi_tensor.h"

#include "multi_tensor/chunks.h"

namespace {

constexpr int kWarps = kChunkThreads / kWarp;

// The sum over a block, on its first thread; the order of the additions is fixed.
__device__ __forceinline__ double block_sum(double value, double* parts) {
  MEGATRON_UNROLL
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = 0.0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kWarps; ++warp) value += parts[warp];
  }
  return value;
}

// Products in float32; sums of four in float32, those in float64.
template <typename T>
__device__ __forceinline__ double squares_of(const T* from, int64_t count) {
  double total = 0.0;
  const int64_t quads = is_aligned_for_quads(from) ? count / 4 : 0;
  for (int64_t i = threadIdx.x; i < quads; i += kChunkThreads) {
    const Quad quad = load_quad(from + 4 * i);
    total += (quad.values[0] * quad.values[0] + quad.values[1] * quad.values[1]) +
             (quad.values[2] * quad.values[2] + quad.values[3] * quad.values[3]);
  }
  for (int64_t i = 4 * quads + threadIdx.x; i < count; i += kChunkThreads) {
    const float value = to_float(from[i]);
    total += value * value;
  }
  return total;
}

__global__ void __launch_bounds__(kChunkThreads) sum_squares(double* __restrict__ partial_sums, TensorTable table) {
  __shared__ double parts[kWarps];
  const Chunk chunk = chunk_of(table, blockIdx.x);
  const int64_t address = table.address(0, chunk.tensor);
  double total = 0.0;
  with_element(table.dtype(0, chunk.tensor), [&](auto element) {
    total = squares_of(pointer_to<decltype(element)>(address, chunk.first), chunk.count);
  });
  total = block_sum(total, parts);
  if (threadIdx.x == 0) partial_sums[blockIdx.x] = total;
}

// Block 0 computes the norm of all tensors, every other block that of one.
__global__ void __launch_bounds__(kChunkThreads)
    finish_norms(float* __restrict__ norm, float* __restrict__ norms, const double* __restrict__ partial_sums,
                 TensorTable table) {
  __shared__ double parts[kWarps];
  const int64_t tensor = static_cast<int64_t>(blockIdx.x) - 1;
  const int64_t first = table.first_chunk(tensor < 0 ? 0 : tensor);
  const int64_t last = table.first_chunk(tensor < 0 ? table.tensors : tensor + 1);
  double total = 0.0;
  for (int64_t i = first + threadIdx.x; i < last; i += kChunkThreads) total += partial_sums[i];
  total = block_sum(total, parts);
  if (threadIdx.x == 0) *(tensor < 0 ? norm : norms + tensor) = static_cast<float>(sqrt(total));
}

template <typename D, typename S>
__device__ __forceinline__ void scale_chunk(D* to, const S* from, int64_t count, float factor) {
  const int64_t quads = is_aligned_for_quads(to) && is_aligned_for_quads(from) ? count / 4 : 0;
  for (int64_t i = threadIdx.x; i < quads; i += kChunkThreads) {
    Quad quad = load_quad(from + 4 * i);
    MEGATRON_UNROLL
    for (int k = 0; k < 4; ++k) quad.values[k] *= factor;
    store_quad(to + 4 * i, quad);
  }
  for (int64_t i = 4 * quads + threadIdx.x; i < count; i += kChunkThreads) {
    to[i] = from_float<D>(to_float(from[i]) * factor);
  }
}

__global__ void __launch_bounds__(kChunkThreads)
    scale(TensorTable table, float factor, const float* __restrict__ device_factor) {
  const Chunk chunk = chunk_of(table, blockIdx.x);
  if (device_factor != nullptr) factor *= *device_factor;
  const int64_t to = table.address(0, chunk.tensor), from = table.address(1, chunk.tensor);
  with_element(table.dtype(0, chunk.tensor), [&](auto destination) {
    with_element(table.dtype(1, chunk.tensor), [&](auto source) {
      scale_chunk(pointer_to<decltype(destination)>(to, chunk.first),
                  pointer_to<decltype(source)>(from, chunk.first), chunk.count, factor);
      });
  });
}

template <typename T>
__device__ __forceinline__ bool is_chunk_finite(const T* from, int64_t count) {
  bool all = true;
  const int64_t quads = is_aligned_for_quads(from) ? count / 4 : 0;
  for (int64_t i = threadIdx.x; i < quads; i += kChunkThreads) {
    const Quad quad = load_quad(from + 4 * i);
    MEGATRON_UNROLL
    for (int k = 0; k < 4; ++k) all = all && megatron::is_finite(quad.values[k]);
  }
  for (int64_t i = 4 * quads + threadIdx.x; i < count; i += kChunkThreads) {
    all = all && megatron::is_finite(to_float(from[i]));
  }
  return all;
}

__global__ void __launch_bounds__(kChunkThreads) check_finite(float* flag, TensorTable table) {
  const Chunk chunk = chunk_of(table, blockIdx.x);
  const int64_t address = table.address(0, chunk.tensor);
  bool all = true;
  with_element(table.dtype(0, chunk.tensor), [&](auto element) {
    all = is_chunk_finite(pointer_to<decltype(element)>(address, chunk.first), chunk.count);
  });
  // The bits of 1.0f; the order of floats above 0 is that of their bits.
  if (!all) atomicMax(reinterpret_cast<int*>(flag), 0x3f800000);
}

}  // namespace

extern "C" int megatron_multi_tensor_norm(float* norm, float* norms, double* partial_sums, const int64_t* table,
                                          int64_t tensors, int64_t chunks, void* stream) {
  const TensorTable entries{table, tensors, 1};
  if (chunks > 0) {
    MEGATRON_LAUNCH(sum_squares, static_cast<unsigned>(chunks), kChunkThreads, 0, stream, partial_sums, entries);
  }
  const unsigned blocks = norms == nullptr ? 1u : static_cast<unsigned>(tensors + 1);
  MEGATRON_LAUNCH(finish_norms, blocks, kChunkThreads, 0, stream, norm, norms, partial_sums, entries);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int megatron_multi_tensor_scale(const int64_t* table, int64_t tensors, int64_t chunks, float factor,
                                           const float* device_factor, void* stream) {
  const TensorTable entries{table, tensors, 2};
  MEGATRON_LAUNCH(scale, static_cast<unsigned>(chunks), kChunkThreads, 0, stream, entries, factor, device_factor);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int megatron_multi_tensor_not_finite(float* flag, const int64_t* table, int64_t tensors, int64_t chunks,
                                                void* stream) {
  const TensorTable entries{table, tensors, 1};
  MEGATRON_LAUNCH(check_finite, static_cast<unsigned>(chunks), kChunkThreads, 0, stream, flag, entries);
  return static_cast<int>(cudaGetLastError());
}
