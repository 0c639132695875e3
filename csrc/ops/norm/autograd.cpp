// The gradients of the norms.
#include "base/autograd.h"

#include <ATen/ops/sum.h>

#include <tuple>

namespace megatron::norm {
namespace {

using at::Tensor;

using Norm = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, double, bool, bool);
using AddNorm = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                           const OptionalTensor&, const OptionalTensor&, double, bool,
                                                           bool);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                            const Tensor&, const Tensor&, const Tensor&, bool, bool,
                                                            std::optional<at::ScalarType>);

// Saves the tensors of both norms: the normalized sum, the weight, and the statistics.
void keep(AutogradContext* context, const Tensor& normalized, const Tensor& weight, const OptionalTensor& bias,
          const Tensor& mean, const Tensor& inverse, bool zero_centered) {
  context->save_for_backward({normalized, weight, mean, inverse});
  context->mark_non_differentiable({mean, inverse});
  context->set_materialize_grads(false);
  context->saved_data["zero_centered"] = zero_centered;
  if (bias.has_value()) context->saved_data["bias_dtype"] = bias->scalar_type();
}

struct Gradients {
  Tensor of_x, of_weight, of_bias, of_branch_bias;
};

// Either gradient may be undefined. Without a dtype for the gradient of the branch's bias there is none.
Gradients gradients_of(AutogradContext* context, const Tensor& of_total, const Tensor& of_y,
                       std::optional<at::ScalarType> branch_dtype = std::nullopt) {
  static const auto backward = operation<Backward>("megatron::norm_backward");
  check_first_derivative("norms", "norm");
  if (!of_y.defined()) {  // only the sum was used
    const bool sums = branch_dtype.has_value() && of_total.defined();
    return {of_total, Tensor(), Tensor(), sums ? at::sum(of_total.flatten(0, -2), 0, false, branch_dtype) : Tensor()};
  }
  const variable_list saved = context->get_saved_variables();
  const auto bias_dtype = context->saved_data.find("bias_dtype");
  const bool has_bias = bias_dtype != context->saved_data.end();
  auto [of_x, of_weight, of_bias, of_branch_bias] =
      backward.call(of_y, or_nothing(of_total), saved[0], saved[1], saved[2], saved[3],
                    context->saved_data["zero_centered"].toBool(), has_bias, branch_dtype);
  return {of_x, of_weight, has_bias ? of_bias.to(bias_dtype->second.toScalarType()) : Tensor(),
          branch_dtype.has_value() ? of_branch_bias : Tensor()};
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, double eps, bool subtract_mean, bool zero_centered) {
    static const auto norm = operation<Norm>("megatron::norm");
    const auto [y, mean, inverse] = call_below(norm, x, weight, bias, eps, subtract_mean, zero_centered);
    keep(context, x, weight, bias, mean, inverse, zero_centered);
    return {y, mean, inverse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Gradients own = gradients_of(context, Tensor(), gradients[0]);
    return {own.of_x, own.of_weight, own.of_bias, Tensor(), Tensor(), Tensor()};
  }
};

struct AddNormFunction : torch::autograd::Function<AddNormFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& branch_bias, double eps,
                               bool subtract_mean, bool zero_centered) {
    static const auto norm = operation<AddNorm>("megatron::add_norm");
    const auto [total, y, mean, inverse] =
        call_below(norm, x, residual, weight, bias, branch_bias, eps, subtract_mean, zero_centered);
    keep(context, total, weight, bias, mean, inverse, zero_centered);
    if (requires_grad(branch_bias)) context->saved_data["branch_dtype"] = branch_bias->scalar_type();
    return {total, y, mean, inverse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto dtype = context->saved_data.find("branch_dtype");
    std::optional<at::ScalarType> branch_dtype;
    if (dtype != context->saved_data.end()) branch_dtype = dtype->second.toScalarType();
    const Gradients own = gradients_of(context, gradients[0], gradients[1], branch_dtype);
    return {own.of_x, own.of_x, own.of_weight, own.of_bias, own.of_branch_bias, Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double eps,
                                        bool subtract_mean, bool zero_centered) {
  static const auto below = operation<Norm>("megatron::norm");
  if (!needs_gradient(x, weight, bias)) return call_below(below, x, weight, bias, eps, subtract_mean, zero_centered);
  const variable_list results = NormFunction::apply(x, weight, bias, eps, subtract_mean, zero_centered);
  return {results[0], results[1], results[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    const OptionalTensor& bias, const OptionalTensor& branch_bias,
                                                    double eps, bool subtract_mean, bool zero_centered) {
  static const auto below = operation<AddNorm>("megatron::add_norm");
  if (!needs_gradient(x, residual, weight, bias, branch_bias)) {
    return call_below(below, x, residual, weight, bias, branch_bias, eps, subtract_mean, zero_centered);
  }
  const variable_list results =
      AddNormFunction::apply(x, residual, weight, bias, branch_bias, eps, subtract_mean, zero_centered);
  return {results[0], results[1], results[2], results[3]};
}

}  // namespace
}  // namespace megatron::norm

TORCH_LIBRARY_IMPL(megatron, Autograd, library) {
  library.impl("norm", &megatron::norm::norm);
  library.impl("add_norm", &megatron::norm::add_norm);
}
