// Scaled softmax over keys, plain, causal, masked or biased, with the stateless dropout of attention: common code of CPU
// loops and CUDA kernels, and the launchers.
#pragma once

#include "base/hash.h"

namespace megatron {

// Scores are `[b, a, q, k]`, contiguous; a row is one query of one head of one sample.
struct ScoreSizes {
  int64_t batch, heads, queries, keys;
};

// Strides in elements of a mask or bias `[b or 1, 1 or a, q or 1, k]`, 0 where it is broadcast; keys are contiguous.
struct BroadcastStrides {
  int64_t sample, head, query;
};

struct RowPlace {
  int64_t sample, head, query;
};

MEGATRON_HOST_DEVICE RowPlace place_of(int64_t row, const ScoreSizes& sizes) {
  const int64_t head = row / sizes.queries, sample = head / sizes.heads;
  return {sample, head - sample * sizes.heads, row - head * sizes.queries};
}

MEGATRON_HOST_DEVICE int64_t offset_of(const RowPlace& place, const BroadcastStrides& strides) {
  return place.sample * strides.sample + place.head * strides.head + place.query * strides.query;
}

// The number of leading keys visible to a query. The queries are at the last of the keys' positions.
MEGATRON_HOST_DEVICE int64_t visible_keys(int64_t query, const ScoreSizes& sizes, bool causal) {
  const int64_t seen = query + sizes.keys - sizes.queries + 1;
  return !causal || seen > sizes.keys ? sizes.keys : (seen > 0 ? seen : 0);
}

// The reference of exponents: the row's maximum, but 0 if every key is hidden (-inf), so that each exponential
// is then 0 rather than NaN. A NaN among the scores still reaches the sum.
template <typename W>
MEGATRON_HOST_DEVICE W exponent_shift(W largest) {
  return largest == -static_cast<W>(INFINITY) ? W(0) : largest;
}

// Divides a row's exponentials by their sum without a division each; all quotients are 0 for a query without
// visible keys, whose sum is 0.
template <typename W>
struct Divisor {
  W sum, inverse;
};

template <typename W>
MEGATRON_HOST_DEVICE Divisor<W> divisor_of(W sum) {
  return {sum, sum == W(0) ? W(0) : W(1) / sum};
}

// Correcting the quotient by its remainder makes it as exact as a division, given fused multiply-add.
template <typename W>
MEGATRON_HOST_DEVICE W quotient(W exponential, const Divisor<W>& divisor) {
  const W estimate = exponential * divisor.inverse;
  return estimate + (exponential - estimate * divisor.sum) * divisor.inverse;
}

// An entry's share of the gradient of the scaled scores, from the gradient of its probability (after undoing dropout) and
// their product summed over the row.
template <typename W>
MEGATRON_HOST_DEVICE W score_gradient(W probability, W gradient, W dot, W scale) {
  return scale * probability * (gradient - dot);
}

}  // namespace megatron

extern "C" {

// Sizes are b, a, q and k; strides those of BroadcastStrides, of a mask (bytes, nonzero hides) and of a bias, either of which
// may be null. With dropout (threshold above 0), rows `[b, a, q]` are the hashed coordinates of rows, `probabilities` gets
// the values for backward, and `columns` is scratch for (k + 1) / 2 hashes; without it all three are null.
int megatron_softmax_forward(void* result, void* probabilities, const void* scores, const uint8_t* mask,
                             const int64_t* mask_strides, const void* bias, const int64_t* bias_strides,
                             const int64_t* rows, uint32_t* columns, const int64_t* sizes, float scale, int causal,
                             int dtype, int bias_dtype, int32_t threshold, uint64_t column_base, void* stream);

// The gradient of the scores from that of the result, `gradient`, and the probabilities before dropout.
int megatron_softmax_backward(void* score_gradient, const void* gradient, const void* probabilities,
                              const int64_t* rows, uint32_t* columns, const int64_t* sizes, float scale, int causal,
                              int dtype, int32_t threshold, uint64_t column_base, void* stream);
}
