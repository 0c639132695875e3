// The gradient of the scaled softmax.
#include "base/autograd.h"

#include <ATen/ops/mul.h>

#include <tuple>

namespace megatron::softmax {
namespace {

using at::Tensor;

using Softmax = std::tuple<Tensor, Tensor>(const Tensor&, double, bool, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, int64_t, int64_t);
using Backward = Tensor(const Tensor&, const Tensor&, double, bool, const OptionalTensor&, int64_t, int64_t);

struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& scores, double scale, bool causal,
                               const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& rows,
                               int64_t threshold, int64_t column_base) {
    static const auto softmax = operation<Softmax>("megatron::softmax");
    const auto [result, probabilities] =
        call_below(softmax, scores, scale, causal, mask, bias, rows, threshold, column_base);
    context->save_for_backward({rows.has_value() ? probabilities : result, or_undefined(rows)});
    context->mark_non_differentiable({probabilities});
    context->set_materialize_grads(false);
    auto& settings = context->saved_data;
    settings["scale"] = scale;
    settings["causal"] = causal;
    settings["threshold"] = threshold;
    settings["column_base"] = column_base;
    if (requires_grad(bias)) {
      settings["bias_shape"] = bias->sizes();
      settings["bias_dtype"] = bias->scalar_type();
    }
    return {result, probabilities};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto backward = operation<Backward>("megatron::softmax_backward");
    check_first_derivative("softmaxes", "softmax");
    variable_list results(8);
    if (!gradients[0].defined()) return results;
    const variable_list saved = context->get_saved_variables();
    auto& settings = context->saved_data;
    const double scale = settings["scale"].toDouble();
    const bool needs_bias = settings.find("bias_shape") != settings.end();
    const Tensor of_scores = backward.call(gradients[0], saved[0], needs_bias ? 1.0 : scale,
                                           settings["causal"].toBool(), or_nothing(saved[1]),
                                           settings["threshold"].toInt(), settings["column_base"].toInt());
    results[0] = needs_bias ? at::mul(of_scores, scale) : of_scores;
    if (needs_bias) {
      results[4] = of_scores.sum_to_size(settings["bias_shape"].toIntVector())
                       .to(settings["bias_dtype"].toScalarType());
    }
    return results;
  }
};

std::tuple<Tensor, Tensor> softmax(const Tensor& scores, double scale, bool causal, const OptionalTensor& mask,
                                   const OptionalTensor& bias, const OptionalTensor& rows, int64_t threshold,
                                   int64_t column_base) {
  static const auto below = operation<Softmax>("megatron::softmax");
  if (!needs_gradient(scores, bias)) {
    return call_below(below, scores, scale, causal, mask, bias, rows, threshold, column_base);
  }
  const variable_list results =
      SoftmaxFunction::apply(scores, scale, causal, mask, bias, rows, threshold, column_base);
  return {results[0], results[1]};
}

}  // namespace
}  // namespace megatron::softmax

TORCH_LIBRARY_IMPL(megatron, Autograd, library) { library.impl("softmax", &megatron::softmax::softmax); }
