// Common code of the operations' gradients; only `autograd.cpp` files include it. They are autograd functions in C++,
// since a Python one costs the host more than a small operation itself.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>

namespace megatron {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// Finds an operation by name and C++ signature.
template <typename Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls an operation below autograd.
template <typename Signature, typename... Arguments>
auto call_below(const c10::TypedOperatorHandle<Signature>& operation, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return operation.call(arguments...);
}

inline bool requires_grad(const at::Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const OptionalTensor& tensor) { return tensor.has_value() && tensor->requires_grad(); }

// True if a result of these tensors requires a gradient.
template <typename... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Rejects second derivatives, which are not implemented.
inline void check_first_derivative(const char* operations, const char* kernels) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "The compiled ", operations,
                              " have first derivatives only. For derivatives of gradients use --kernels ", kernels,
                              "=torch.");
}

inline at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }
inline OptionalTensor or_nothing(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace megatron
