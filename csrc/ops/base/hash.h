// The bits of the stateless hidden and attention dropout: a hash of an entry's coordinates, equal on every device and in
// `megatron/kernels/hashing.py`.
#pragma once

#include "base/portable.h"

namespace megatron {

// The finalizer of splitmix64: each bit of the argument affects all bits of the result.
// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
MEGATRON_HOST_DEVICE uint64_t mix_64(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  return state ^ (state >> 31);
}

// The same for 32 bits. Source: Appleby, MurmurHash3, `fmix32`.
MEGATRON_HOST_DEVICE uint32_t mix_32(uint32_t state) {
  state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
  state = (state ^ (state >> 13)) * 0xC2B2AE35u;
  return state ^ (state >> 16);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;  // 2^64 divided by the golden ratio: splitmix64's increment
constexpr int32_t kDropoutSteps = 65536;             // probabilities are multiples of 1 / 65536

// The part of the hash that belongs to a pair of adjacent columns.
MEGATRON_HOST_DEVICE uint32_t column_hash(int64_t pair, uint64_t column_base) {
  return static_cast<uint32_t>(mix_64((static_cast<uint64_t>(pair) * kGolden) ^ column_base));
}

// 16 random bits for each of two adjacent columns, the even one in the low half.
MEGATRON_HOST_DEVICE uint32_t pair_bits(uint32_t row, uint32_t column) { return mix_32(row ^ column); }

// True if an entry is kept, given its 16 bits as a signed number.
MEGATRON_HOST_DEVICE bool is_kept(uint32_t bits_16, int32_t threshold) {
  const int32_t number = static_cast<int32_t>(static_cast<int16_t>(static_cast<uint16_t>(bits_16)));
  return threshold < kDropoutSteps && number >= threshold - 32768;
}

// The factor of kept entries; divided in float64, as in Python.
MEGATRON_HOST_DEVICE float dropout_scale(int32_t threshold) {
  return threshold < kDropoutSteps ? static_cast<float>(65536.0 / (kDropoutSteps - threshold)) : 0.0f;
}

}  // namespace megatron
