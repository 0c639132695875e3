// Arithmetic for all three targets: CPU loops, CUDA kernels, and CUDA kernels that the
// tests run on a CPU (MEGATRON_SIMT). Element and row functions are written once, against this header.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MEGATRON_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEGATRON_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace megatron {

// Element types by the codes that cross C interfaces. float64 exists on the CPU only, for checking gradients.
enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

// Arithmetic is in float32, and in float64 for float64 elements.
template <typename T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <typename T>
using Wide = typename WideOf<T>::type;

template <typename To, typename From>
MEGATRON_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

#if defined(__CUDA_ARCH__)

MEGATRON_HOST_DEVICE float exp_of(float x) { return expf(x); }
MEGATRON_HOST_DEVICE float exp_in_range(float x) { return expf(x); }
MEGATRON_HOST_DEVICE float tanh_of(float x) { return tanhf(x); }
MEGATRON_HOST_DEVICE float erf_of(float x) { return erff(x); }

#else

// exp(x) as fraction * 2^power, without branches, so that loops vectorize.
// Source: Cody and Waite, "Software manual for the elementary functions", 1980, chapter 6 (the reduction); the
// coefficients are those of a minimax fit on [-ln 2 / 2, ln 2 / 2].
struct ReducedExponential {
  float fraction;
  int32_t power;
};
MEGATRON_HOST_DEVICE ReducedExponential reduced_exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer
  const float whole = shifted - 12582912.0f;
  const float r = (x - whole * 0.693145751953125f) - whole * 1.428606765330187e-6f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {(p * r) * r + r + 1.0f, bit_cast<int32_t>(shifted) - 0x4B400000};
}

// exp(x) within 1 ulp.
MEGATRON_HOST_DEVICE float exp_of(float x) {
  constexpr float kLowest = -103.972084f, kHighest = 88.7228394f;  // where results round to 0 and overflow
  const ReducedExponential e = reduced_exponential(x < kLowest ? kLowest : (x > kHighest ? kHighest : x));
  const int32_t half = e.power >> 1;  // in two steps, since 2^power itself may be subnormal
  float p = e.fraction * bit_cast<float>((half + 127) << 23) * bit_cast<float>((e.power - half + 127) << 23);
  p = x < kLowest ? 0.0f : p;
  return x > kHighest ? INFINITY : p;
}

// exp(x) within 1 ulp for -87 <= x <= 88, in 60% of the time.
MEGATRON_HOST_DEVICE float exp_in_range(float x) {
  const ReducedExponential e = reduced_exponential(x);
  return e.fraction * bit_cast<float>((e.power + 127) << 23);
}

// tanh(x) within 2 ulp: an odd polynomial near 0, otherwise by exp.
MEGATRON_HOST_DEVICE float tanh_of(float x) {
  const float size = fabsf(x), square = x * x;
  float p = -0.005672422703355551f;
  p = p * square + 0.020603148266673088f;
  p = p * square - 0.0537252314388752f;
  p = p * square + 0.13331185281276703f;
  p = p * square - 0.3333326280117035f;
  const float near = size * square * p + size;
  const float far = 1.0f - 2.0f / (exp_of(2.0f * (size < 20.0f ? size : 20.0f)) + 1.0f);
  const float result = size < 0.625f ? near : (size == size ? far : size);
  return copysignf(result, x);
}

// erf(x) within 2 ulp: an odd polynomial up to 1, elsewhere 1 minus the exponential of a polynomial.
MEGATRON_HOST_DEVICE float erf_of(float x) {
  const float size = fabsf(x), square = x * x, far_size = size < 4.0f ? size : 4.0f;
  float p = 7.85385855124332e-05f;
  p = p * square - 0.0008010192541405559f;
  p = p * square + 0.005188327748328447f;
  p = p * square - 0.026853810995817184f;
  p = p * square + 0.1128358542919159f;
  p = p * square - 0.3761262595653534f;
  p = p * square + 1.1283791065216064f;
  float q = -2.169764047721401e-05f;
  q = q * far_size + 0.0004414729482959956f;
  q = q * far_size - 0.0042052860371768475f;
  q = q * far_size + 0.025210343301296234f;
  q = q * far_size - 0.10842210799455643f;
  q = q * far_size - 0.633216381072998f;
  q = q * far_size - 1.1295802593231201f;
  q = q * far_size + 0.00018846834427677095f;
  const float far = 1.0f - exp_of(q);
  const float result = size < 1.0f ? size * p : (size == size ? far : size);
  return copysignf(result, x);
}

#endif

MEGATRON_HOST_DEVICE double exp_of(double x) { return exp(x); }
MEGATRON_HOST_DEVICE double exp_in_range(double x) { return exp(x); }
MEGATRON_HOST_DEVICE double tanh_of(double x) { return tanh(x); }
MEGATRON_HOST_DEVICE double erf_of(double x) { return erf(x); }

MEGATRON_HOST_DEVICE float sqrt_of(float x) { return sqrtf(x); }
MEGATRON_HOST_DEVICE double sqrt_of(double x) { return sqrt(x); }

}  // namespace megatron
