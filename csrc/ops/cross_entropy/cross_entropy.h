// Cross-entropy over a slice of the vocabulary: the statistics of a row of logits for its losses, and the gradient.
#pragma once

#include "base/portable.h"

namespace megatron {

// A logit after soft-capping; a cap of 0 stands for none. Source: Gemma Team, "Gemma 2", 2024, section 2.
template <typename W>
MEGATRON_HOST_DEVICE W capped(W logit, W cap) {
  return cap > 0 ? cap * tanh_of(logit / cap) : logit;
}

// Coefficients of a row's gradients: the derivative of the objective by logit j, before soft-capping, is
// exp(logit_j - normalizer) * weight - uniform, less `of_label` at the label.
template <typename W>
struct RowTerms {
  W normalizer;  // logarithm of the softmax denominator over the whole vocabulary
  W of_label;    // derivative by the cross-entropy
  W uniform;     // derivative by the cross-entropy with the uniform distribution, divided by the size of the vocabulary
  W weight;      // sum of the derivatives by the losses that contain the normalizer
  W cap;
};

// The derivatives by the losses of every row, each `[n]` or null for zeros.
template <typename W>
struct LossTerms {
  const W *normalizer, *of_label, *of_normalizer, *of_uniform;
  W vocab_size, cap;

  MEGATRON_HOST_DEVICE RowTerms<W> of_row(int64_t row) const {
    const W label = of_label != nullptr ? of_label[row] : 0;
    const W uniform = of_uniform != nullptr ? of_uniform[row] : 0;
    const W weight = label + (of_normalizer != nullptr ? of_normalizer[row] : 0) + uniform;
    return {normalizer[row], label, uniform / vocab_size, weight, cap};
  }
};

template <typename W>
MEGATRON_HOST_DEVICE W logit_gradient(W value, bool is_label, const RowTerms<W>& of) {
  const W logit = capped(value, of.cap);
  const W gradient = exp_of(logit - of.normalizer) * of.weight - (is_label ? of.of_label + of.uniform : of.uniform);
  if (!(of.cap > 0)) return gradient;
  const W part = logit / of.cap;
  return gradient * (1 - part * part);
}

}  // namespace megatron

extern "C" {

// Four rows of results: the largest logit, the sum of exp(logit - largest), the logit of the label (0 if it is none of
// the valid columns) and the sum of the logits. Shapes: result `[4, n]` float32, logits `[n, stride]`, labels `[n]`.
int megatron_logit_statistics(float* result, const void* logits, const int64_t* labels, int64_t rows, int64_t stride,
                              int64_t valid, int dtype, float softcap, void* stream);

// The gradient of every logit, 0 from column `valid` on. Shapes: result `[n, result_stride]`, which may be the logits;
// logits `[n, stride]`; labels, normalizer, of_label, of_normalizer and of_uniform `[n]`, the last three may be null.
int megatron_logit_gradient(void* result, const void* logits, const int64_t* labels, const float* normalizer,
                            const float* of_label, const float* of_normalizer, const float* of_uniform, int64_t rows,
                            int64_t columns, int64_t result_stride, int64_t stride, int64_t valid, int64_t vocab_size,
                            int dtype, float softcap, void* stream);

// Most columns of `megatron_logit_losses`, whose blocks keep a row in registers.
constexpr int64_t kMostHeldColumns = 57344;

// Cross-entropy and log normalizer of every row, and over the logits the gradient of the sum of weight * cross-entropy: one
// read and one write. In half precision; the rows begin at 16-byte boundaries, and so does what follows each.
// Shapes: losses `[2, n]`; logits `[n, stride]`, of which the first `columns` are written and the first `valid` count, at
// least one; labels and weights `[n]`.
int megatron_logit_losses(float* losses, void* logits, const int64_t* labels, const float* weights, int64_t rows,
                          int64_t columns, int64_t stride, int64_t valid, int dtype, void* stream);
}
