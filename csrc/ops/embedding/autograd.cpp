// The gradient of lookups.
#include "base/autograd.h"

namespace megatron::embedding {
namespace {

using at::Tensor;

using Embedding = Tensor(const Tensor&, const Tensor&, int64_t);
using Backward = Tensor(const Tensor&, const Tensor&, int64_t, int64_t);

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& weight, const Tensor& ids, int64_t first_row) {
    static const auto embedding = operation<Embedding>("megatron::embedding");
    context->save_for_backward({ids});
    context->saved_data["rows"] = weight.size(0);
    context->saved_data["first_row"] = first_row;
    return call_below(embedding, weight, ids, first_row);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto backward = operation<Backward>("megatron::embedding_backward");
    check_first_derivative("lookups", "embedding");
    return {backward.call(gradients[0], context->get_saved_variables()[0], context->saved_data["rows"].toInt(),
                          context->saved_data["first_row"].toInt()),
            Tensor(), Tensor()};
  }
};

Tensor embedding(const Tensor& weight, const Tensor& ids, int64_t first_row) {
  static const auto below = operation<Embedding>("megatron::embedding");
  if (!needs_gradient(weight)) return call_below(below, weight, ids, first_row);
  return EmbeddingFunction::apply(weight, ids, first_row);
}

}  // namespace
}  // namespace megatron::embedding

TORCH_LIBRARY_IMPL(megatron, Autograd, library) { library.impl("embedding", &megatron::embedding::embedding); }
