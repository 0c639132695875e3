// The gradient of a matrix product: one function of autograd's, where torch's product of more than two dimensions is four.
#include "base/autograd.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

namespace megatron::linear {
namespace {

using at::Tensor;

using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&);

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    static const auto linear = operation<Linear>("megatron::linear");
    // Kept is what a gradient is asked for needs: of a frozen weight's product nothing of the size of x.
    context->save_for_backward({requires_grad(weight) ? x : Tensor(), requires_grad(x) ? weight : Tensor()});
    if (requires_grad(bias)) context->saved_data["bias_dtype"] = bias->scalar_type();
    return call_below(linear, x, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_first_derivative("products", "linear");
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &gradient = gradients[0];
    const Tensor rows = gradient.reshape({-1, gradient.size(-1)});
    Tensor of_x, of_weight, of_bias;
    if (weight.defined()) {
      std::vector<int64_t> shape = gradient.sizes().vec();
      shape.back() = weight.size(1);
      of_x = at::mm(rows, weight).view(shape);
    }
    if (x.defined()) of_weight = at::mm(rows.t(), x.reshape({-1, x.size(-1)}));
    const auto bias_dtype = context->saved_data.find("bias_dtype");
    if (bias_dtype != context->saved_data.end()) {
      of_bias = at::sum(rows, 0, false, bias_dtype->second.toScalarType());
    }
    return {of_x, of_weight, of_bias};
  }
};

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  static const auto below = operation<Linear>("megatron::linear");
  if (!needs_gradient(x, weight, bias)) return call_below(below, x, weight, bias);
  return LinearFunction::apply(x, weight, bias);
}

}  // namespace
}  // namespace megatron::linear

TORCH_LIBRARY_IMPL(megatron, Autograd, library) { library.impl("linear", &megatron::linear::linear); }
