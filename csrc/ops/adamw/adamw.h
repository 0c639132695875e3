// AdamW over lists of tensors: the arithmetic of an element, and the launcher.
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
#pragma once

#include "multi_tensor/multi_tensor.h"

namespace megatron {

struct AdamW {
  double learning_rate, beta1, beta2, epsilon, weight_decay;
};

// Values shared by all elements of a tensor in a step.
struct AdamWStep {
  float decay;             // factor of the weight
  float beta1, rest1;      // rest1 = 1 - beta1
  float beta2, rest2;
  float size;              // learning rate over the bias correction of the first moment
  float inverse_root;      // 1 / sqrt(bias correction of the second moment)
  float epsilon;
};

// `step` counts from 1. The betas' powers are taken in float64, as torch's fused AdamW does.
MEGATRON_HOST_DEVICE AdamWStep step_of(const AdamW& of, double step) {
  const double correction1 = 1.0 - pow(of.beta1, step), correction2 = 1.0 - pow(of.beta2, step);
  return {static_cast<float>(1.0 - of.learning_rate * of.weight_decay),
          static_cast<float>(of.beta1),
          static_cast<float>(1.0 - of.beta1),
          static_cast<float>(of.beta2),
          static_cast<float>(1.0 - of.beta2),
          static_cast<float>(of.learning_rate / correction1),
          static_cast<float>(1.0 / sqrt(correction2)),
          static_cast<float>(of.epsilon)};
}

// Updates a weight and its moments.
MEGATRON_HOST_DEVICE void update(float& weight, float& exp_avg, float& exp_avg_sq, float gradient,
                                 const AdamWStep& step) {
  exp_avg += (gradient - exp_avg) * step.rest1;
  exp_avg_sq = exp_avg_sq * step.beta2 + gradient * gradient * step.rest2;
  const float denominator = sqrtf(exp_avg_sq) * step.inverse_root + step.epsilon;
  weight = weight * step.decay - step.size * (exp_avg / denominator);
}

// Kinds of tensors in the table, in this order.
enum AdamWKind : int { kWeight, kGradient, kExpAvg, kExpAvgSq, kStep, kCopy, kAdamWKinds };

}  // namespace megatron

extern "C" {

// One step. Weights and moments are float32; gradients any type; copies, null addresses or of a 16-bit type, receive the
// new weights; `steps` are one float32 per tensor and counted up at the end. A gradient is multiplied by `factor`, and
// by `device_factor` unless that is null. `device_rate`, unless null, replaces the learning rate. If `skip` is not null
// and not 0, nothing changes at all. The three are one float32 each.
int megatron_adamw_step(const int64_t* table, int64_t tensors, int64_t chunks, double learning_rate, double beta1,
                        double beta2, double epsilon, double weight_decay, float factor, const float* device_factor,
                        const float* device_rate, const float* skip, void* stream);
}
