// The gradient of bias, dropout and residual.
#include "base/autograd.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <tuple>

namespace megatron::dropout_add {
namespace {

using at::Tensor;

using DropoutAdd = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                          int64_t, double);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, int64_t, int64_t, double,
                                            std::optional<at::ScalarType>);

struct DropoutAddFunction : torch::autograd::Function<DropoutAddFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const OptionalTensor& bias,
                        const OptionalTensor& residual, const OptionalTensor& rows, int64_t threshold,
                        int64_t column_base, double multiplier) {
    static const auto dropout_add = operation<DropoutAdd>("megatron::dropout_add");
    context->save_for_backward({or_undefined(rows)});
    context->saved_data["threshold"] = threshold;
    context->saved_data["column_base"] = column_base;
    context->saved_data["multiplier"] = multiplier;
    context->saved_data["needs_x"] = requires_grad(x);
    context->saved_data["has_residual"] = requires_grad(residual);
    if (requires_grad(bias)) context->saved_data["bias_dtype"] = bias->scalar_type();
    return call_below(dropout_add, x, bias, residual, rows, threshold, column_base, multiplier);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto backward = operation<Backward>("megatron::dropout_add_backward");
    check_first_derivative("dropouts", "dropout_add");
    const Tensor& gradient = gradients[0];
    const auto& settings = context->saved_data;
    const int64_t threshold = settings.at("threshold").toInt();
    const double multiplier = settings.at("multiplier").toDouble();
    const auto dtype = settings.find("bias_dtype");
    std::optional<at::ScalarType> bias_dtype;
    if (dtype != settings.end()) bias_dtype = dtype->second.toScalarType();
    Tensor of_x, of_bias;
    if (settings.at("needs_x").toBool() || bias_dtype.has_value()) {
      if (threshold == 0) {  // nothing is copied without a multiplier
        of_x = multiplier == 1 ? gradient : at::mul(gradient, multiplier);
        if (bias_dtype.has_value()) of_bias = at::sum(of_x.flatten(0, -2), 0, false, bias_dtype);
      } else {
        std::tie(of_x, of_bias) =
            backward.call(gradient, or_nothing(context->get_saved_variables()[0]), threshold,
                          settings.at("column_base").toInt(), multiplier, bias_dtype);
        if (!bias_dtype.has_value()) of_bias = Tensor();
      }
    }
    const Tensor of_residual = settings.at("has_residual").toBool() ? gradient : Tensor();
    return {of_x, of_bias, of_residual, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor dropout_add(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                   const OptionalTensor& rows, int64_t threshold, int64_t column_base, double multiplier) {
  static const auto below = operation<DropoutAdd>("megatron::dropout_add");
  if (!needs_gradient(x, bias, residual)) {
    return call_below(below, x, bias, residual, rows, threshold, column_base, multiplier);
  }
  return DropoutAddFunction::apply(x, bias, residual, rows, threshold, column_base, multiplier);
}

}  // namespace
}  // namespace megatron::dropout_add

TORCH_LIBRARY_IMPL(megatron, Autograd, library) { library.impl("dropout_add", &megatron::dropout_add::dropout_add); }
