// CUDA's vector types. Copying one checks the alignment that a vector load or store of a GPU demands.
#pragma once

#include "simt_interface.h"

namespace simt {

// The address goes through a register, so that the compiler cannot conclude from the type that it is aligned.
template <unsigned bytes>
inline void check_alignment(const void* address) {
  uintptr_t hidden = reinterpret_cast<uintptr_t>(address);
  asm("" : "+r"(hidden));
  if (__builtin_expect(hidden % bytes != 0, 0)) simt_misaligned(address, bytes);
}

}  // namespace simt

#define SIMT_VECTOR_2(name, element, bytes)                                                   \
  struct alignas(bytes) name {                                                                \
    element x, y;                                                                             \
    constexpr name() : x(), y() {}                                                            \
    constexpr name(element x, element y) : x(x), y(y) {}                                      \
    name(const name& other) {                                                                 \
      simt::check_alignment<bytes>(&other);                                                   \
      x = other.x;                                                                            \
      y = other.y;                                                                            \
    }                                                                                         \
    name& operator=(const name& other) {                                                      \
      simt::check_alignment<bytes>(&other);                                                   \
      simt::check_alignment<bytes>(this);                                                     \
      x = other.x;                                                                            \
      y = other.y;                                                                            \
      return *this;                                                                           \
    }                                                                                         \
  };                                                                                          \
  [[maybe_unused]] static inline name make_##name(element x, element y) { return name(x, y); }

#define SIMT_VECTOR_4(name, element, bytes)                                                   \
  struct alignas(bytes) name {                                                                \
    element x, y, z, w;                                                                       \
    constexpr name() : x(), y(), z(), w() {}                                                  \
    constexpr name(element x, element y, element z, element w) : x(x), y(y), z(z), w(w) {}    \
    name(const name& other) {                                                                 \
      simt::check_alignment<bytes>(&other);                                                   \
      x = other.x;                                                                            \
      y = other.y;                                                                            \
      z = other.z;                                                                            \
      w = other.w;                                                                            \
    }                                                                                         \
    name& operator=(const name& other) {                                                      \
      simt::check_alignment<bytes>(&other);                                                   \
      simt::check_alignment<bytes>(this);                                                     \
      x = other.x;                                                                            \
      y = other.y;                                                                            \
      z = other.z;                                                                            \
      w = other.w;                                                                            \
      return *this;                                                                           \
    }                                                                                         \
  };                                                                                          \
  [[maybe_unused]] static inline name make_##name(element x, element y, element z, element w) { \
    return name(x, y, z, w);                                                                  \
  }

SIMT_VECTOR_2(float2, float, 8)
SIMT_VECTOR_2(int2, int, 8)
SIMT_VECTOR_2(uint2, unsigned, 8)
SIMT_VECTOR_2(double2, double, 16)
SIMT_VECTOR_2(longlong2, long long, 16)
SIMT_VECTOR_2(ulonglong2, unsigned long long, 16)
SIMT_VECTOR_2(ushort2, unsigned short, 4)
SIMT_VECTOR_4(float4, float, 16)
SIMT_VECTOR_4(int4, int, 16)
SIMT_VECTOR_4(uint4, unsigned, 16)
SIMT_VECTOR_4(ushort4, unsigned short, 8)
