// Cross-entropy over a slice of the vocabulary on a GPU: a row is read once, in packets of 16 bytes, by a block, or by a
// warp if a block would have only a packet or two per thread and spend its time at barriers.
#include "cross_entropy/cross_entropy.h"

#include <cfloat>
#include <type_traits>

#include "base/device.h"

namespace {

constexpr int kThreads = 256;  // of a block
constexpr int64_t kPacketsOfWarp = 16;  // the most for each of its threads

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

// The index of a thread in its row, and of the row in its block.
template <int kRowThreads>
__device__ __forceinline__ unsigned own_thread() {
  return kRowThreads == kThreads ? threadIdx.x : threadIdx.x % kRowThreads;
}
template <int kRowThreads>
__device__ __forceinline__ unsigned own_row() {
  return kRowThreads == kThreads ? 0u : threadIdx.x / kRowThreads;
}

// A thread's share of a row: single entries up to the first 16-byte boundary, packets, and the remaining
// entries.
template <int kRowThreads, typename T>
__device__ __forceinline__ Running read_row(const T* row, int64_t valid, float cap) {
  constexpr int kSize = Packet<T>::kSize;
  const unsigned thread = own_thread<kRowThreads>();
  Running running;
  const int64_t head = elements_to_alignment(row, valid), packets = (valid - head) / kSize;
  for (int64_t i = thread; i < head; i += kRowThreads) add_one(running, row[i], cap);
  for (int64_t i = thread; i < packets; i += kRowThreads) {
    const Packet<T> packet = load_packet(row + head + i * kSize);
    float logits[kSize];
    MEGATRON_UNROLL
    for (int j = 0; j < kSize; ++j) logits[j] = megatron::capped(to_float(packet.values[j]), cap);
    running.add(logits);
  }
  for (int64_t i = head + packets * kSize + thread; i < valid; i += kRowThreads) add_one(running, row[i], cap);
  return running;
}

// The reduction over the threads of a row, on each of them.
template <int kRowThreads, typename Operation>
__device__ __forceinline__ float row_reduce(float value, float* parts, Operation operation, float neutral) {
  if constexpr (kRowThreads == kWarp) {
    return warp_reduce(value, operation);
  } else {
    return block_reduce(value, parts, operation, neutral);
  }
}

template <int kRowThreads, typename T>
__global__ void __launch_bounds__(kThreads)
    statistics_of_rows(float* __restrict__ result, const T* __restrict__ logits, const int64_t* __restrict__ labels,
                       int64_t rows, int64_t stride, int64_t valid, float cap) {
  constexpr int kRows = kThreads / kRowThreads;  // at a time
  __shared__ float parts[kThreads / kWarp];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + own_row<kRowThreads>();
  for (int64_t row = first; row < rows; row += static_cast<int64_t>(gridDim.x) * kRows) {
    const T* from = logits + row * stride;
    const Running own = read_row<kRowThreads>(from, valid, cap);
    const float largest = row_reduce<kRowThreads>(own.largest, parts, Max(), -FLT_MAX);
    const float total =
        row_reduce<kRowThreads>(own.total * megatron::exp_of(own.largest - largest), parts, Sum(), 0.0f);
    const float whole = row_reduce<kRowThreads>(own.whole, parts, Sum(), 0.0f);
    if (own_thread<kRowThreads>() == 0) {
      const int64_t label = labels[row];
      result[row] = largest;
      result[rows + row] = total;
      result[2 * rows + row] = label >= 0 && label < valid ? megatron::capped(to_float(from[label]), cap) : 0.0f;
      result[3 * rows + row] = whole;
    }
  }
}

// `to` may be `from`: each entry is read and written by one thread.
template <int kRowThreads, typename T>
__device__ __forceinline__ void write_row(T* to, const T* from, int64_t label, int64_t valid, int64_t columns,
                                          const megatron::RowTerms<float>& terms) {
  constexpr int kSize = Packet<T>::kSize;
  const unsigned thread = own_thread<kRowThreads>();
  const int64_t head = share_alignment(to, from) ? elements_to_alignment(from, valid) : valid;
  const int64_t packets = (valid - head) / kSize, tail = head + packets * kSize;
  for (int64_t i = thread; i < head; i += kRowThreads) {
    to[i] = from_float<T>(megatron::logit_gradient(to_float(from[i]), i == label, terms));
  }
  for (int64_t i = thread; i < packets; i += kRowThreads) {
    const int64_t first = head + i * kSize;
    Packet<T> packet = load_packet(from + first);
    MEGATRON_UNROLL
    for (int j = 0; j < kSize; ++j) {
      const float value = to_float(packet.values[j]);
      packet.values[j] = from_float<T>(megatron::logit_gradient(value, first + j == label, terms));
    }
    store_packet(to + first, packet);
  }
  for (int64_t i = tail + thread; i < valid; i += kRowThreads) {
    to[i] = from_float<T>(megatron::logit_gradient(to_float(from[i]), i == label, terms));
  }
  for (int64_t i = valid + thread; i < columns; i += kRowThreads) to[i] = from_float<T>(0.0f);
}

template <int kRowThreads, typename T>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(T* result, const T* logits, const int64_t* __restrict__ labels, megatron::LossTerms<float> terms,
                      int64_t rows, int64_t columns, int64_t result_stride, int64_t stride, int64_t valid) {
  constexpr int kRows = kThreads / kRowThreads;  // at a time
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + own_row<kRowThreads>();
  for (int64_t row = first; row < rows; row += static_cast<int64_t>(gridDim.x) * kRows) {
    write_row<kRowThreads>(result + row * result_stride, logits + row * stride, labels[row], valid, columns, terms.of_row(row));
  }
}

constexpr int kHeldThreads = 1024;  // of a block that holds a row in registers

// A packet of half precision as four pairs of values: single ones would take a register each.
template <typename T>
struct Pairs {
  unsigned of[4];

  __device__ __forceinline__ float at(int i) const {
    const unsigned short bits = static_cast<unsigned short>(of[i / 2] >> (i % 2 * 16));
    T value;
    memcpy(&value, &bits, 2);
    return to_float(value);
  }
  // Values from `left` on become minus infinity.
  __device__ __forceinline__ void end_at(int left) {
    constexpr unsigned kInfinity = std::is_same_v<T, __half> ? 0xfc00u : 0xff80u;
    MEGATRON_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (left <= 2 * i + 1) of[i] = (left == 2 * i + 1 ? of[i] & 0xffffu : kInfinity) | kInfinity << 16;
    }
  }
};

// One block per row: in a loop over rows, loop invariants would occupy registers. Exponents are to base
// 2, as the GPU computes them, and log(2) is multiplied in at the end.
template <typename T, int kPackets>
__global__ void __launch_bounds__(kHeldThreads)
    losses_of_rows(float* __restrict__ losses, T* logits, const int64_t* __restrict__ labels,
                   const float* __restrict__ weights, int64_t rows, int64_t columns, int64_t stride, int64_t valid) {
  constexpr int kSize = Packet<T>::kSize;
  constexpr float kLog2E = 1.44269504088896340736f, kLog2 = 0.69314718055994530942f;
  __shared__ float parts[kHeldThreads / kWarp];
  const int64_t row = blockIdx.x;
  T* own = logits + row * stride;
  const int64_t label = labels[row];
  const int of_label = label < 0 || label >= valid ? -1 : static_cast<int>(label);
  const float target = threadIdx.x == 0 && of_label >= 0 ? to_float(own[of_label]) : 0.0f;
  Pairs<T> held[kPackets] = {};
  MEGATRON_UNROLL
  for (int k = 0; k < kPackets; ++k) {
    const int first = (threadIdx.x + k * kHeldThreads) * kSize;
    if (first >= valid) continue;
    const Packet<T> packet = load_packet(own + first);
    memcpy(held[k].of, &packet, 16);
  }
  float largest = -INFINITY;
  MEGATRON_UNROLL
  for (int k = 0; k < kPackets; ++k) {
    held[k].end_at(static_cast<int>(valid) - static_cast<int>(threadIdx.x + k * kHeldThreads) * kSize);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) largest = fmaxf(largest, held[k].at(i));
  }
  const float shift = block_reduce(largest, parts, Max(), -INFINITY) * kLog2E;
  float total = 0.0f;
  MEGATRON_UNROLL
  for (int k = 0; k < kPackets; ++k) {
    keep_packed(held[k].of);
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) total += fast_exp2(fmaf(held[k].at(i), kLog2E, -shift));
  }
  const float normalizer = log2f(block_reduce(total, parts, Sum(), 0.0f)) + shift, weight = weights[row];
  if (threadIdx.x == 0) {
    losses[row] = normalizer * kLog2 - target;
    losses[rows + row] = normalizer * kLog2;
  }
  MEGATRON_UNROLL
  for (int k = 0; k < kPackets; ++k) {
    const int first = (threadIdx.x + k * kHeldThreads) * kSize;
    if (first >= columns) continue;
    keep_packed(held[k].of);
    float gradient[kSize];
    Packet<T> packet;
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) {
      gradient[i] = fast_exp2(fmaf(held[k].at(i), kLog2E, -normalizer)) * weight;
    }
    if (of_label >= first && of_label < first + kSize) {
      MEGATRON_UNROLL
      for (int i = 0; i < kSize; ++i) gradient[i] -= first + i == of_label ? weight : 0.0f;
    }
    MEGATRON_UNROLL
    for (int i = 0; i < kSize; ++i) packet.values[i] = from_float<T>(gradient[i]);
    store_packet(own + first, packet);
  }
}

template <typename T>
int launch_losses(float* losses, void* logits, const int64_t* labels, const float* weights, int64_t rows,
                  int64_t columns, int64_t stride, int64_t valid, void* stream) {
  T* own = static_cast<T*>(logits);
  if (columns <= 4 * kHeldThreads * Packet<T>::kSize) {
    MEGATRON_LAUNCH((losses_of_rows<T, 4>), static_cast<unsigned>(rows), kHeldThreads, 0, stream, losses, own, labels, weights,
                    rows, columns, stride, valid);
  } else {
    MEGATRON_LAUNCH((losses_of_rows<T, 7>), static_cast<unsigned>(rows), kHeldThreads, 0, stream, losses, own, labels, weights,
                    rows, columns, stride, valid);
  }
  return static_cast<int>(cudaGetLastError());
}

// Calls `body` with the number of threads that share a row, as a constant.
template <typename T, typename Body>
int with_row_threads(int64_t columns, Body body) {
  const bool is_short = columns <= kPacketsOfWarp * kWarp * Packet<T>::kSize;
  return is_short ? body(std::integral_constant<int, kWarp>()) : body(std::integral_constant<int, kThreads>());
}

}  // namespace

extern "C" int megatron_logit_statistics(float* result, const void* logits, const int64_t* labels, int64_t rows,
                                         int64_t stride, int64_t valid, int dtype, float softcap, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_row_threads<T>(valid, [&](auto row_threads) {
      constexpr int kRowThreads = decltype(row_threads)::value;
      MEGATRON_LAUNCH((statistics_of_rows<kRowThreads, T>), grid_size(rows, kThreads / kRowThreads), kThreads, 0,
                      stream, result, static_cast<const T*>(logits), labels, rows, stride, valid, softcap);
      return static_cast<int>(cudaGetLastError());
    });
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
    return with_row_threads<T>(columns, [&](auto row_threads) {
      constexpr int kRowThreads = decltype(row_threads)::value;
      MEGATRON_LAUNCH((gradients_of_rows<kRowThreads, T>), grid_size(rows, kThreads / kRowThreads), kThreads, 0, stream,
                      static_cast<T*>(result), static_cast<const T*>(logits), labels, terms, rows, columns,
                      result_stride, stride, valid);
      return static_cast<int>(cudaGetLastError());
    });
  });
}

extern "C" int megatron_logit_losses(float* losses, void* logits, const int64_t* labels, const float* weights,
                                     int64_t rows, int64_t columns, int64_t stride, int64_t valid, int dtype,
                                     void* stream) {
  const auto launch = dtype == DType::kFloat16 ? &launch_losses<__half> : &launch_losses<__nv_bfloat16>;
  return launch(losses, logits, labels, weights, rows, columns, stride, valid, stream);
}
