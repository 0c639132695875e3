// Rotary positions: heads of queries, keys and values taken from any strides to any strides in one pass, the first channels of
// queries and keys rotated. Common code of CPU loops and CUDA kernel, and the launcher.
#pragma once

#include "base/portable.h"

namespace megatron {

// Strides in elements of `[b, s, groups, heads of a group, d]`; channels are contiguous.
struct HeadStrides {
  int64_t sample, token, group, head;
};

// Heads that are read from one tensor and written to another.
struct RotaryPart {
  const void* from;
  void* to;
  HeadStrides from_strides, to_strides;
  int64_t heads, heads_per_group;
  int64_t is_rotated;  // otherwise copied
};

// Cosines and sines are `[b or 1, s, pairs]`; strides in elements, 0 for one table for all samples.
struct RotaryTable {
  const void* cosines;
  const void* sines;
  int64_t sample_stride, token_stride;
};

struct RotarySizes {
  int64_t batch, tokens, channels, pairs;
};

constexpr int kMostRotaryParts = 3;

MEGATRON_HOST_DEVICE int64_t offset_of(const HeadStrides& strides, int64_t sample, int64_t token, int64_t group,
                                       int64_t head) {
  return sample * strides.sample + token * strides.token + group * strides.group + head * strides.head;
}

// Heads of queries, keys and values that are joined into rows `[groups, queries of a group + 2, d]`, one a token.
struct JoinedHeads {
  const void* from[kMostRotaryParts];
  HeadStrides strides[kMostRotaryParts];
  int64_t batch, tokens, groups, queries, channels;  // `queries` of a group
};

// A pair of channels as a complex number, times cosine + i sine. Source: Su et al., "RoFormer", 2021, equation 34.
template <typename W>
struct Pair {
  W first, second;
};

template <typename W>
MEGATRON_HOST_DEVICE Pair<W> rotated_pair(W first, W second, W cosine, W sine) {
  return {first * cosine - second * sine, second * cosine + first * sine};
}

}  // namespace megatron

extern "C" {

// Rotates by the angles times `direction`, 1 or -1. If `interleaved`, a pair is two adjacent channels, otherwise
// channels i and i + pairs. At most 3 parts.
int megatron_rotary(const megatron::RotaryPart* parts, int part_count, const megatron::RotaryTable* table,
                    const megatron::RotarySizes* sizes, int interleaved, float direction, int dtype, int table_dtype,
                    void* stream);

// Joins the heads and, unless `sums` is null, sums each column over all tokens; `parts` is scratch for
// `[part_count(batch * tokens), columns]`. Runs of 16 bytes of each head begin at 16-byte boundaries, and so do `to`'s.
int megatron_join_heads(void* to, void* sums, float* parts, const megatron::JoinedHeads* heads, int dtype,
                        int sums_dtype, void* stream);
}
