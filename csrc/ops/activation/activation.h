// Activation functions of x + bias and their gated forms: the arithmetic of an entry, and the launchers.
#pragma once

#include "base/column_sums.h"

namespace megatron {

// Codes of the functions, in the order of `FUNCTIONS` in `megatron/kernels/activations.py`.
enum ActivationFunction : int { kGelu, kGeluTanh, kRelu, kSquaredRelu, kSilu, kLinear };

// 1 / x for x >= 1; 0 from 2^126 on, where the GPU's fast reciprocal ends.
MEGATRON_HOST_DEVICE float reciprocal_of(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}
MEGATRON_HOST_DEVICE double reciprocal_of(double x) { return 1.0 / x; }

// Value and derivative of an activation at a point; the compiler removes the unused one.
template <typename Real>
struct Evaluated {
  Real value, derivative;
};

// The logistic function s(x), and 1 - s(x) without cancellation.
template <typename Real>
struct Logistic {
  Real value, rest;
};
template <typename Real>
MEGATRON_HOST_DEVICE Logistic<Real> logistic_of(Real x) {
  constexpr Real kFarthest = 87;  // beyond, the value is 0 or 1
  const Real inverse = exp_in_range(x < -kFarthest ? kFarthest : (x > kFarthest ? -kFarthest : -x));
  const Real value = x < -kFarthest ? Real(0) : reciprocal_of(1 + inverse);
  return {value, inverse < 1 ? inverse * value : 1 - value};
}

// The standard normal distribution function at x, and exp(-x^2 / 2). The lower tail keeps its relative precision, which
// 1 + erf loses: it is the exponential times a polynomial in 1 / (1 + 0.21 |x|), within 2e-8 of exact coefficients.
// Source: Abramowitz and Stegun, "Handbook of mathematical functions", 1964, 7.1.26 (the form; the coefficients are those
// of a minimax fit of the relative error up to |x| = 13.4).
struct NormalFloat {
  float distribution, exponential;
};
MEGATRON_HOST_DEVICE NormalFloat normal_of(float x) {
  constexpr float kFarthest = 13.19f;  // exp(-87): beyond, the distribution is 0 or 1
  const float size = fabsf(x) < kFarthest ? fabsf(x) : kFarthest;
  const float exponential = exp_in_range(-0.5f * size * size), y = reciprocal_of(1.0f + 0.2093036f * size);
  float p = -0.07397618889808655f;
  p = p * y + 0.2977505922317505f;
  p = p * y - 0.35671186447143555f;
  p = p * y + 0.3770085573196411f;
  p = p * y - 0.1113816350698471f;
  p = p * y + 0.13159559667110443f;
  p = p * y + 0.0672748014330864f;
  p = p * y + 0.08501977473497391f;
  p = p * y + 0.08342035859823227f;
  const float tail = size < kFarthest ? exponential * (p * y) : 0.0f;
  return {x < 0.0f ? tail : 1.0f - tail, exponential};
}
struct NormalDouble {
  double distribution, exponential;
};
MEGATRON_HOST_DEVICE NormalDouble normal_of(double x) {
  return {0.5 * erfc(x * -0.70710678118654752440), exp(-0.5 * x * x)};
}

// Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2 (this and the next).
struct Gelu {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    const auto normal = normal_of(x);
    const Real density = normal.exponential * Real(0.39894228040143267794);  // 1 / sqrt(2 pi)
    return {x * normal.distribution, normal.distribution + x * density};
  }
};

// 0.5 x (1 + tanh(z)) is x s(2 z), which does not cancel for negative x.
struct GeluTanh {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    constexpr Real kSlope = Real(1.59576912160573071176), kCubic = Real(0.044715);  // 2 sqrt(2 / pi)
    const Real square = x * x < Real(1e8) ? x * x : Real(1e8);                      // beyond, s is 0 or 1
    const Logistic<Real> s = logistic_of(kSlope * x * (1 + kCubic * square));
    const Real inner = kSlope * (1 + 3 * kCubic * square);
    return {x * s.value, s.value + x * inner * (s.value * s.rest)};
  }
};

struct Silu {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    const Logistic<Real> s = logistic_of(x);
    return {x * s.value, s.value + x * (s.value * s.rest)};
  }
};

// NaNs pass through.
struct Relu {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    return {x < 0 ? Real(0) : x, x <= 0 ? Real(0) : Real(1)};
  }
};

// Source: So et al., "Primer: searching for efficient transformers for language modeling", 2021, section 3.
struct SquaredRelu {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    const Real positive = x < 0 ? Real(0) : x;
    return {positive * positive, 2 * positive};
  }
};

struct Linear {
  template <typename Real>
  static MEGATRON_HOST_DEVICE Evaluated<Real> at(Real x) {
    return {x, Real(1)};
  }
};

// The gradients of a gated unit `function(gate) * up`, from the gradient of its result.
// Source: Shazeer, "GLU variants improve transformer", 2020, section 2 (the unit).
template <typename Real>
struct GatedGradient {
  Real gate, up;
};
template <typename Function, typename Real>
MEGATRON_HOST_DEVICE GatedGradient<Real> gated_gradient(Real gate, Real up, Real gradient) {
  const Evaluated<Real> active = Function::at(gate);
  return {gradient * up * active.derivative, gradient * active.value};
}

}  // namespace megatron

extern "C" {

// Shapes: y `[n, f]`; x `[n, f]`, or gated `[n, 2, f]` in the order gate, up; bias like a row of x, or null.
int megatron_activation_forward(void* y, const void* x, const void* bias, int64_t rows, int64_t columns, int function,
                                int gated, int dtype, int bias_dtype, void* stream);

// The gradients of x and, if there is a bias, of the bias. Shapes: dy `[n, f]`, dx like x; bias_parts, float32 `[parts,
// f or 2 f]` with one part for `rows_per_part` rows, is scratch; bias and bias_gradient may be null together.
int megatron_activation_backward(void* dx, void* bias_gradient, float* bias_parts, const void* dy, const void* x,
                                 const void* bias, int64_t rows, int64_t columns, int function, int gated, int dtype,
                                 int bias_dtype, void* stream);
}
