// A matrix product with a bias: torch's product, which the library gives a gradient of its own (autograd.cpp).
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "base/host.h"

namespace megatron::linear {
namespace {

// x W^T + b for x [..., i], W [o, i], b [o].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "linear: x is ", x.sizes(),
              " and the weight ", weight.sizes(), "; they must be [..., i] and [o, i]");
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const at::Tensor product = bias.has_value() ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return at::_unsafe_view(product, shape);
}

}  // namespace
}  // namespace megatron::linear

TORCH_LIBRARY_FRAGMENT(megatron, library) { library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }

TORCH_LIBRARY_IMPL(megatron, CPU, library) { library.impl("linear", &megatron::linear::linear); }

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) { library.impl("linear", &megatron::linear::linear); }
#endif
