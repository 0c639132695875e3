// CUDA's 16-bit floating-point types and their conversions, rounded to nearest even as the hardware does.
#pragma once

#include <cstdint>

#include "simt_vectors.h"

namespace simt {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern keeps its size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace simt

struct __nv_bfloat16 {
  uint16_t bits;
};

struct __half {
  uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 value) {
  return simt::bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}

static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = simt::bits_as<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float __half2float(__half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 31u;
  const uint32_t fraction = value.bits & 1023u;
  if (exponent == 31) return simt::bits_as<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return simt::bits_as<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

static inline __half __float2half_rn(float value) {
  const uint32_t bits = simt::bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    const uint32_t shifted = simt::bits_as<uint32_t>(simt::bits_as<float>(magnitude) + 0.5f);
    return {static_cast<uint16_t>(sign | (shifted - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

static inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
static inline __half __float2half(float value) { return __float2half_rn(value); }
static inline uint16_t __half_as_ushort(__half value) { return value.bits; }
static inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
static inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }

SIMT_VECTOR_2(__half2, __half, 4)
SIMT_VECTOR_2(__nv_bfloat162, __nv_bfloat16, 4)

static inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static inline __half2 __float22half2_rn(float2 pair) { return __floats2half2_rn(pair.x, pair.y); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return __floats2bfloat162_rn(pair.x, pair.y); }
