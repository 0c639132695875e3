// The gradient of the activations.
#include "base/autograd.h"

#include <tuple>

namespace megatron::activation {
namespace {

using at::Tensor;

using Activation = Tensor(const Tensor&, const OptionalTensor&, int64_t, bool);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, bool);

struct ActivationFunction : torch::autograd::Function<ActivationFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const OptionalTensor& bias, int64_t function,
                        bool gated) {
    static const auto activation = operation<Activation>("megatron::activation");
    context->save_for_backward({x, or_undefined(bias)});
    context->saved_data["function"] = function;
    context->saved_data["gated"] = gated;
    return call_below(activation, x, bias, function, gated);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto backward = operation<Backward>("megatron::activation_backward");
    check_first_derivative("activations", "activation");
    const variable_list saved = context->get_saved_variables();
    const auto [of_x, of_bias] =
        backward.call(gradients[0], saved[0], or_nothing(saved[1]), context->saved_data["function"].toInt(),
                      context->saved_data["gated"].toBool());
    return {of_x, saved[1].defined() ? of_bias : Tensor(), Tensor(), Tensor()};
  }
};

Tensor activation(const Tensor& x, const OptionalTensor& bias, int64_t function, bool gated) {
  static const auto below = operation<Activation>("megatron::activation");
  if (!needs_gradient(x, bias)) return call_below(below, x, bias, function, gated);
  return ActivationFunction::apply(x, bias, function, gated);
}

}  // namespace
}  // namespace megatron::activation

TORCH_LIBRARY_IMPL(megatron, Autograd, library) { library.impl("activation", &megatron::activation::activation); }
