// Norms and sums of lists of tensors on a GPU: a block per chunk of a tensor.
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

// Products and sums of four in float32, their totals in float64.
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

template <typename T>
__device__ __forceinline__ void add_chunk(float* to, const T* from, int64_t count) {
  const int64_t quads = is_aligned_for_quads(to) && is_aligned_for_quads(from) ? count / 4 : 0;
  for (int64_t i = threadIdx.x; i < quads; i += kChunkThreads) {
    Quad total = load_quad(to + 4 * i);
    const Quad addend = load_quad(from + 4 * i);
    MEGATRON_UNROLL
    for (int k = 0; k < 4; ++k) total.values[k] += addend.values[k];
    store_quad(to + 4 * i, total);
  }
  for (int64_t i = 4 * quads + threadIdx.x; i < count; i += kChunkThreads) to[i] += to_float(from[i]);
}

__global__ void __launch_bounds__(kChunkThreads) add(TensorTable table) {
  const Chunk chunk = chunk_of(table, blockIdx.x);
  float* to = pointer_to<float>(table.address(0, chunk.tensor), chunk.first);
  const int64_t from = table.address(1, chunk.tensor);
  with_element(table.dtype(1, chunk.tensor), [&](auto element) {
    add_chunk(to, pointer_to<decltype(element)>(from, chunk.first), chunk.count);
  });
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

extern "C" int megatron_multi_tensor_add(const int64_t* table, int64_t tensors, int64_t chunks, void* stream) {
  const TensorTable entries{table, tensors, 2};
  MEGATRON_LAUNCH(add, static_cast<unsigned>(chunks), kChunkThreads, 0, stream, entries);
  return static_cast<int>(cudaGetLastError());
}
