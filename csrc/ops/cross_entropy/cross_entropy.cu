// Cross-entropy over a slice of the vocabulary on a GPU: a block per row, which is read once, in packets of 16 bytes.
#include "cross_entropy/cross_entropy.h"

#include <cfloat>

#include "base/device.h"

namespace {

constexpr int kThreads = 256;

// Maximum, sum of exp(logit - maximum) and sum of the logits seen so far.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
struct Running {
  float largest = -FLT_MAX, total = 0.0f, whole = 0.0f;

  template <int kCount>
  __device__ __forceinline__ void add(const float (&logits)[kCount]) {
    float highest = largest;
    MEGATRON_UNROLL
    for (int i = 0; i < kCount; ++i) highest = fmaxf(highest, logits[i]);
    total *= megatron::exp_of(largest - highest);
    MEGATRON_UNROLL
    for (int i = 0; i < kCount; ++i) {
      total += megatron::exp_of(logits[i] - highest);
      whole += logits[i];
    }
    largest = highest;
  }
};

template <typename T>
__device__ __forceinline__ void add_one(Running& running, T value, float cap) {
  const float logit[1] = {megatron::capped(to_float(value), cap)};
  running.add(logit);
}

// What a thread sees of a row: single entries up to the first 16-byte boundary, packets, and the entries left.
template <typename T>
__device__ __forceinline__ Running read_row(const T* row, int64_t valid, float cap) {
  constexpr int kSize = Packet<T>::kSize;
  Running running;
  const int64_t head = elements_to_alignment(row, valid), packets = (valid - head) / kSize;
  for (int64_t i = threadIdx.x; i < head; i += kThreads) add_one(running, row[i], cap);
  for (int64_t i = threadIdx.x; i < packets; i += kThreads) {
    const Packet<T> packet = load_packet(row + head + i * kSize);
    float logits[kSize];
    MEGATRON_UNROLL
    for (int j = 0; j < kSize; ++j) logits[j] = megatron::capped(to_float(packet.values[j]), cap);
    running.add(logits);
  }
  for (int64_t i = head + packets * kSize + threadIdx.x; i < valid; i += kThreads) add_one(running, row[i], cap);
  return running;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    statistics_of_rows(float* __restrict__ result, const T* __restrict__ logits, const int64_t* __restrict__ labels,
                       int64_t rows, int64_t stride, int64_t valid, float cap) {
  __shared__ float parts[kThreads / kWarp];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = logits + row * stride;
    const Running own = read_row(from, valid, cap);
    const float largest = block_reduce(own.largest, parts, Max(), -FLT_MAX);
    const float total = block_reduce(own.total * megatron::exp_of(own.largest - largest), parts, Sum(), 0.0f);
    const float whole = block_reduce(own.whole, parts, Sum(), 0.0f);
    if (threadIdx.x == 0) {
      const int64_t label = labels[row];
      result[row] = largest;
      result[rows + row] = total;
      result[2 * rows + row] = label >= 0 && label < valid ? megatron::capped(to_float(from[label]), cap) : 0.0f;
      result[3 * rows + row] = whole;
    }
  }
}

// `to` may be `from`: each entry is read and written by one thread.
template <typename T>
__device__ __forceinline__ void write_row(T* to, const T* from, int64_t label, int64_t valid, int64_t columns,
                                          const megatron::RowTerms<float>& terms) {
  constexpr int kSize = Packet<T>::kSize;
  const int64_t head = share_alignment(to, from) ? elements_to_alignment(from, valid) : valid;
  const int64_t packets = (valid - head) / kSize, tail = head + packets * kSize;
  for (int64_t i = threadIdx.x; i < head; i += kThreads) {
    to[i] = from_float<T>(megatron::logit_gradient(to_float(from[i]), i == label, terms));
  }
  for (int64_t i = threadIdx.x; i < packets; i += kThreads) {
    const int64_t first = head + i * kSize;
    Packet<T> packet = load_packet(from + first);
    MEGATRON_UNROLL
    for (int j = 0; j < kSize; ++j) {
      const float value = to_float(packet.values[j]);
      packet.values[j] = from_float<T>(megatron::logit_gradient(value, first + j == label, terms));
    }
    store_packet(to + first, packet);
  }
  for (int64_t i = tail + threadIdx.x; i < valid; i += kThreads) {
    to[i] = from_float<T>(megatron::logit_gradient(to_float(from[i]), i == label, terms));
  }
  for (int64_t i = valid + threadIdx.x; i < columns; i += kThreads) to[i] = from_float<T>(0.0f);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(T* result, const T* logits, const int64_t* __restrict__ labels, megatron::LossTerms<float> terms,
                      int64_t rows, int64_t columns, int64_t result_stride, int64_t stride, int64_t valid) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    write_row(result + row * result_stride, logits + row * stride, labels[row], valid, columns, terms.of_row(row));
  }
}

}  // namespace

extern "C" int megatron_logit_statistics(float* result, const void* logits, const int64_t* labels, int64_t rows,
                                         int64_t stride, int64_t valid, int dtype, float softcap, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    MEGATRON_LAUNCH(statistics_of_rows<T>, grid_size(rows, 1), kThreads, 0, stream, result,
                    static_cast<const T*>(logits), labels, rows, stride, valid, softcap);
    return static_cast<int>(cudaGetLastError());
  });
}

extern "C" int megatron_logit_gradient(void* result, const void* logits, const int64_t* labels,
                                       const float* normalizer, const float* of_label, const float* of_normalizer,
                                       const float* of_uniform, int64_t rows, int64_t columns, int64_t result_stride,
                                       int64_t stride, int64_t valid, int64_t vocab_size, int dtype, float softcap,
                                       void* stream) {
  const megatron::LossTerms<float> terms{normalizer, of_label, of_normalizer, of_uniform,
                                         static_cast<float>(vocab_size), softcap};
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    MEGATRON_LAUNCH(gradients_of_rows<T>, grid_size(rows, 1), kThreads, 0, stream, static_cast<T*>(result),
                    static_cast<const T*>(logits), labels, terms, rows, columns, result_stride, stride, valid);
    return static_cast<int>(cudaGetLastError());
  });
}
