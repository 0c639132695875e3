// Initial values of weights: hashes of (name, row, column), transformed to random numbers of a distribution. Every operation
// is rounded correctly by IEEE 754, so CPU, GPU and `megatron/kernels/initial_values.py` are bitwise equal.
#pragma once

#include "base/hash.h"

namespace megatron {

enum Distribution : int { kNormal = 0, kTruncatedNormal = 1, kUniform = 2 };

constexpr int kMostDimensions = 8;

// The position of a rank's shard in the global tensor. Rows combine all dimensions but the last.
struct ShardPlace {
  int dimensions;
  int64_t shape[kMostDimensions];  // of the global tensor
  int64_t start[kMostDimensions];  // the shard's first index
  int64_t box[kMostDimensions];    // the shard's shape
};

// Pairs of columns share 64 random bits; a shard may begin or end within a pair.
MEGATRON_HOST_DEVICE int64_t first_pair_of(const ShardPlace& of) { return of.start[of.dimensions - 1] / 2; }
MEGATRON_HOST_DEVICE int64_t pairs_of(const ShardPlace& of) {
  const int last = of.dimensions - 1;
  return (of.start[last] + of.box[last] + 1) / 2 - of.start[last] / 2;
}

// The global row of a local one.
MEGATRON_HOST_DEVICE uint64_t global_row(const ShardPlace& of, int64_t local) {
  uint64_t number = 0, stride = 1;
  for (int d = of.dimensions - 2; d >= 0; --d) {
    const int64_t next = d > 0 ? local / of.box[d] : 0;
    number += static_cast<uint64_t>(local - next * of.box[d] + of.start[d]) * stride;
    stride *= static_cast<uint64_t>(of.shape[d]);
    local = next;
  }
  return number;
}

MEGATRON_HOST_DEVICE uint64_t row_hash(uint64_t row, uint64_t base) { return mix_64((row * kGolden) ^ base); }
MEGATRON_HOST_DEVICE uint64_t pair_hash(uint64_t row, int64_t pair) {
  return mix_64(row + static_cast<uint64_t>(pair) * kGolden);
}

#if defined(__CUDA_ARCH__)
// Never contracted to a fused multiply-add, whatever the flags.
MEGATRON_HOST_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }
MEGATRON_HOST_DEVICE double sum(double a, double b) { return __dadd_rn(a, b); }
MEGATRON_HOST_DEVICE double quotient(double a, double b) { return __ddiv_rn(a, b); }
MEGATRON_HOST_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
MEGATRON_HOST_DEVICE float exact_root(float a) { return __fsqrt_rn(a); }
#else
// The build turns contraction off (-ffp-contract=off).
MEGATRON_HOST_DEVICE double product(double a, double b) { return a * b; }
MEGATRON_HOST_DEVICE double sum(double a, double b) { return a + b; }
MEGATRON_HOST_DEVICE double quotient(double a, double b) { return a / b; }
MEGATRON_HOST_DEVICE float product(float a, float b) { return a * b; }
MEGATRON_HOST_DEVICE float exact_root(float a) { return sqrtf(a); }
#endif

// A polynomial by Horner's rule; constant coefficient first.
template <int kCount>
MEGATRON_HOST_DEVICE double polynomial(double x, const double (&coefficients)[kCount]) {
  double result = product(x, coefficients[kCount - 1]);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = kCount - 2; i > 0; --i) result = product(sum(result, coefficients[i]), x);
  return sum(result, coefficients[0]);
}

// Two neighbouring columns.
struct ValuePair {
  float even, odd;
};

// sqrt(-2 ln u) of u = (word + 0.5) / 2^31, which lies strictly between 0 and 1. u is split into 2^k m with m about
// between sqrt(1/2) and sqrt(2), by the exponent of its float32; ln m = 2 artanh((m - 1) / (m + 1)).
MEGATRON_HOST_DEVICE float normal_radius(uint32_t word) {
  constexpr double kArtanh[] = {-3.9999999972416056, -1.3333363199169113, -0.7994957957184923, -0.5985158172226942};
  constexpr double kLogarithm = -1.6525916589735634e-07;  // -2 ln 2 / 2^23
  constexpr double kAll = 42.97512519471661;                // 62 ln 2
  const double scaled = sum(static_cast<double>(static_cast<int32_t>(word & 0x7fffffffu)), 0.5);
  const int32_t bits = bit_cast<int32_t>(static_cast<float>(scaled));
  const int32_t exponent = (bits - 0x3f3504f3) & -(1 << 23);  // k, in the exponent bits of a float32
  const double m = product(scaled, static_cast<double>(bit_cast<float>(0x3f800000 - exponent)));
  const double s = quotient(sum(m, -1.0), sum(m, 1.0));
  const double of_m = product(polynomial(product(s, s), kArtanh), s);
  const double of_exponent = sum(product(static_cast<double>(exponent), kLogarithm), kAll);
  return exact_root(static_cast<float>(sum(of_m, of_exponent)));
}

// Box-Muller: an angle of w pi / 2^31 from a signed word w. Angles beyond a quarter turn are turned by a half, which
// changes both signs; sine and cosine are polynomials of the rest, x quarter turns / 2^30.
MEGATRON_HOST_DEVICE ValuePair normal_pair(uint32_t low, uint32_t high) {
  constexpr double kUnit = 1.0 / (1 << 30), kSquare = kUnit * kUnit;
  constexpr double kSine[] = {
      1.570796318447937 * kUnit, -0.6459637106020997 * kUnit * kSquare, 0.07968967895307584 * kUnit * kSquare * kSquare,
      -0.004673766615967761 * kUnit * kSquare * kSquare * kSquare,
      0.00015148513087447275 * kUnit * kSquare * kSquare * kSquare * kSquare};
  constexpr double kCosine[] = {
      0.9999999990182386 * kSquare, -0.2337005029853599 * kSquare * kSquare,
      0.019968590074769286 * kSquare * kSquare * kSquare, -0.0008935099166937137 * kSquare * kSquare * kSquare * kSquare,
      2.3587977457569213e-05 * kSquare * kSquare * kSquare * kSquare * kSquare};
  const uint32_t sign = (high + (1u << 30)) & (1u << 31);
  const double radius = bit_cast<float>(bit_cast<uint32_t>(normal_radius(low)) ^ sign);
  const double x = static_cast<int32_t>(high - sign), square = product(x, x);
  const double sine = product(product(polynomial(square, kSine), x), radius);
  const double quarter = product(sum(1.0 / kUnit, -x), sum(x, 1.0 / kUnit));  // zero where the cosine is
  const double cosine = product(product(polynomial(square, kCosine), radius), quarter);
  return {static_cast<float>(cosine), static_cast<float>(sine)};
}

// sqrt(2) erfinv(x) for x = word 2^-31 times the share of values within 3 standard deviations: x times a rational
// function of sqrt(1 - x^2), all of whose coefficients are positive.
MEGATRON_HOST_DEVICE float truncated_normal_value(uint32_t word) {
  constexpr double kNumerator[] = {0.0022582020610570908, 0.17814379930496216, 2.2050416469573975,
                                   5.966310977935791,     2.7055394649505615,  0.03350241109728813};
  constexpr double kDenominator[] = {0.0004790059756487608, 0.049394283443689346, 0.8056975603103638,
                                     3.2911462783813477,    3.702458143234253,    1.0};
  constexpr double kShare = 4.6440409679745314e-10;  // erf(3 / sqrt(2)) / 2^31
  const double x = product(static_cast<double>(static_cast<int32_t>(word)), kShare);
  const double rest = exact_root(static_cast<float>(product(sum(1.0, -x), sum(x, 1.0))));
  const double ratio = quotient(polynomial(rest, kNumerator), polynomial(rest, kDenominator));
  const float value = static_cast<float>(product(ratio, x));
  return value < -3.0f ? -3.0f : (value > 3.0f ? 3.0f : value);
}

// Uniform with standard deviation 1.
MEGATRON_HOST_DEVICE float uniform_value(uint32_t word) {
  constexpr float kScale = static_cast<float>(1.7320508075688772 / 2147483648.0);  // sqrt(3) / 2^31
  return product(static_cast<float>(static_cast<int32_t>(word)), kScale);
}

// Standard values of two neighbouring columns from their random bits.
template <int kDistribution>
MEGATRON_HOST_DEVICE ValuePair values_of(uint64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
  if constexpr (kDistribution == kNormal) {
    return normal_pair(low, high);
  } else if constexpr (kDistribution == kTruncatedNormal) {
    return {truncated_normal_value(low), truncated_normal_value(high)};
  } else {
    return {uniform_value(low), uniform_value(high)};
  }
}

}  // namespace megatron

extern "C" {

// Fills `count` elements of a shard in row-major order from element `first` on. `shape`, `start` and `box`, with one entry
// per dimension, are in host memory; `base` is the start value of the rows' hashes.
int megatron_initial_values_fill(void* target, int64_t first, int64_t count, int dtype, const int64_t* shape,
                                 const int64_t* start, const int64_t* box, int dimensions, int distribution,
                                 uint64_t base, float deviation, void* stream);
}
