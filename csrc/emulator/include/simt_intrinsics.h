// Barriers, warp operations, atomics and arithmetic under the names that CUDA gives them.
//
// A warp operation without a mask, `__activemask` and `__threadfence` are missing on purpose: sources name their masks,
// and what one block writes is read by another only in the next launch.
#pragma once

#include <math.h>

#include <type_traits>

#include "simt_floats.h"

// The line of the call, by which the runtime knows whether threads wait at the same place.
#define SIMT_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(SIMT_CALLER) { simt_barrier(0, file, line); }
static inline int __syncthreads_count(int predicate, SIMT_CALLER) {
  return simt_barrier(predicate != 0, file, line);
}
static inline int __syncthreads_or(int predicate, SIMT_CALLER) {
  return simt_barrier(predicate != 0, file, line) != 0;
}
static inline int __syncthreads_and(int predicate, SIMT_CALLER) {
  return simt_barrier(predicate == 0, file, line) == 0;
}

static inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_CALLER) {
  simt_warp_operation(simt::kSynchronize, mask, 0, 0, file, line);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return static_cast<unsigned>(simt_warp_operation(simt::kBallot, mask, predicate != 0, 0, file, line));
}
static inline int __any_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt_warp_operation(simt::kBallot, mask, predicate != 0, 0, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt_warp_operation(simt::kBallot, mask, predicate == 0, 0, file, line) == 0;
}

namespace simt {

template <class Value>
inline Value shuffle(unsigned mask, Value value, int source, const char* file, int line) {
  static_assert(sizeof(Value) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t sent = 0;
  __builtin_memcpy(&sent, &value, sizeof value);
  const uint64_t received = simt_warp_operation(kShuffle, mask, sent, source, file, line);
  Value result;
  __builtin_memcpy(static_cast<void*>(&result), &received, sizeof result);
  return result;
}

inline int lane() {
  const uint3 thread = simt_thread_index(), block = simt_block_dimensions();
  return static_cast<int>((thread.x + block.x * (thread.y + block.y * thread.z)) & 31u);
}

}  // namespace simt

// Lanes are grouped by `width`, a power of two; a source outside the group is the lane itself.
template <class Value>
inline Value __shfl_sync(unsigned mask, Value value, int source, int width = 32, SIMT_CALLER) {
  return simt::shuffle(mask, value, (simt::lane() & ~(width - 1)) | (source & (width - 1)), file, line);
}
template <class Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = 32, SIMT_CALLER) {
  const int lane = simt::lane(), source = lane ^ lane_mask;
  return simt::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
template <class Value>
inline Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32, SIMT_CALLER) {
  const int lane = simt::lane(), source = lane + static_cast<int>(delta);
  return simt::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
template <class Value>
inline Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32, SIMT_CALLER) {
  const int lane = simt::lane(), source = lane - static_cast<int>(delta);
  return simt::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, file, line);
}

// The read and the write of an atomic are one access, which the runtime hears of here and not from the compiler.
#define SIMT_ATOMIC(name, result)                                                                             \
  template <class Value>                                                                                      \
  __attribute__((noinline, no_sanitize("thread"))) Value name(Value* address,                                 \
                                                              typename std::common_type<Value>::type value) { \
    simt_atomic_access(address, sizeof(Value), __builtin_return_address(0));                                  \
    const Value before = *address;                                                                            \
    *address = (result);                                                                                      \
    return before;                                                                                            \
  }
SIMT_ATOMIC(atomicAdd, before + value)
SIMT_ATOMIC(atomicMax, before > value ? before : value)
SIMT_ATOMIC(atomicMin, before < value ? before : value)
SIMT_ATOMIC(atomicExch, value)
SIMT_ATOMIC(atomicOr, before | value)
SIMT_ATOMIC(atomicAnd, before& value)

template <class Value>
inline Value __ldg(const Value* address) {
  return *address;
}
template <class Value>
inline Value __ldcs(const Value* address) {
  return *address;
}
template <class Value>
inline void __stcs(Value* address, Value value) {
  *address = value;
}
template <class Value>
inline void __stwb(Value* address, Value value) {
  *address = value;
}

static inline void __pipeline_memcpy_async(void* destination, const void* source, size_t bytes) {
  simt_copy_asynchronously(destination, source, static_cast<unsigned>(bytes));
}
static inline void __pipeline_commit() { simt_commit_copies(); }
static inline void __pipeline_wait_prior(int groups_left) { simt_wait_for_copies(groups_left); }

// Fast approximations of the hardware are exact here. glibc has functions of these names, hence macros.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// Only the build `fused` contracts products and sums to fused multiply-adds; there these go by way of memory.
static inline float simt_rounded(float x) {
#if defined(MEGATRON_SIMT_FUSED)
  asm volatile("" : "+m"(x));
#endif
  return x;
}
static inline float __fmul_rn(float x, float y) { return simt_rounded(x * y); }
static inline float __fadd_rn(float x, float y) { return simt_rounded(x + y); }
static inline float __fsub_rn(float x, float y) { return simt_rounded(x - y); }

static inline unsigned __float_as_uint(float x) { return simt::bits_as<unsigned>(x); }
static inline int __float_as_int(float x) { return simt::bits_as<int>(x); }
static inline float __uint_as_float(unsigned x) { return simt::bits_as<float>(x); }
static inline float __int_as_float(int x) { return simt::bits_as<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x != 0 ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x != 0 ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<uint64_t>(x) * y) >> 32);
}

#define SIMT_EXTREMES(type)                                          \
  static inline type min(type x, type y) { return x < y ? x : y; }   \
  static inline type max(type x, type y) { return x > y ? x : y; }
SIMT_EXTREMES(int)
SIMT_EXTREMES(unsigned)
SIMT_EXTREMES(long)
SIMT_EXTREMES(unsigned long)
SIMT_EXTREMES(long long)
SIMT_EXTREMES(unsigned long long)
SIMT_EXTREMES(float)
SIMT_EXTREMES(double)
