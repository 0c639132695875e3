// The gradients of rotations, and of a fused projection's split into heads.
#include "base/autograd.h"

#include <ATen/ops/as_strided.h>

#include <tuple>

namespace megatron::rotary {
namespace {

using at::Tensor;

using Rotary = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool);
using RotarySplit = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, bool);
using RotaryJoin = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool);
using JoinHeads = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                             std::optional<at::ScalarType>);

// Backward is the rotation by the opposite angles.
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& query, const Tensor& key,
                               const Tensor& cosines, const Tensor& sines, bool interleaved, bool opposite) {
    static const auto rotary = operation<Rotary>("megatron::rotary");
    context->save_for_backward({cosines, sines});
    context->saved_data["interleaved"] = interleaved;
    context->saved_data["opposite"] = opposite;
    const auto [new_query, new_key] = call_below(rotary, query, key, cosines, sines, interleaved, opposite);
    return {new_query, new_key};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto rotary = operation<Rotary>("megatron::rotary");
    check_first_derivative("rotations", "rotary");
    const variable_list saved = context->get_saved_variables();
    const auto [of_query, of_key] =
        rotary.call(gradients[0], gradients[1], saved[0], saved[1], context->saved_data["interleaved"].toBool(),
                    !context->saved_data["opposite"].toBool());
    return {of_query, of_key, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct RotarySplitFunction : torch::autograd::Function<RotarySplitFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& qkv, const Tensor& cosines, const Tensor& sines,
                               bool interleaved) {
    static const auto split = operation<RotarySplit>("megatron::rotary_split");
    context->save_for_backward({cosines, sines});
    context->saved_data["interleaved"] = interleaved;
    const auto [query, key, value] = call_below(split, qkv, cosines, sines, interleaved);
    return {query, key, value};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto join = operation<RotaryJoin>("megatron::rotary_join");
    check_first_derivative("rotations", "rotary");
    const variable_list saved = context->get_saved_variables();
    return {join.call(gradients[0], gradients[1], gradients[2], saved[0], saved[1],
                      context->saved_data["interleaved"].toBool()),
            Tensor(), Tensor(), Tensor()};
  }
};

// The heads of some members of each group, `[b, g * count, s, d]`; a view if their strides are uniform.
Tensor heads_of(const Tensor& qkv, int64_t first, int64_t count) {
  const int64_t batch = qkv.size(0), tokens = qkv.size(1), groups = qkv.size(2), channels = qkv.size(4);
  if (count > 1 && groups > 1) {
    return qkv.narrow(3, first, count).reshape({batch, tokens, groups * count, channels}).transpose(1, 2);
  }
  const int64_t between = count > 1 ? qkv.stride(3) : qkv.stride(2);
  return at::as_strided(qkv, {batch, groups * count, tokens, channels},
                        {qkv.stride(0), between, qkv.stride(1), qkv.stride(4)},
                        qkv.storage_offset() + first * qkv.stride(3));
}

// The heads are views of the product; backward their gradients are joined, and those of the bias summed, in one pass.
struct SplitHeadsFunction : torch::autograd::Function<SplitHeadsFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& qkv, const Tensor& bias) {
    if (requires_grad(bias)) context->saved_data["bias_dtype"] = bias.scalar_type();
    const at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t queries = qkv.size(3) - 2;
    return {heads_of(qkv, 0, queries), heads_of(qkv, queries, 1), heads_of(qkv, queries + 1, 1)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto join = operation<JoinHeads>("megatron::join_heads");
    check_first_derivative("projections", "rotary");
    const auto bias_dtype = context->saved_data.find("bias_dtype");
    const bool has_bias = bias_dtype != context->saved_data.end();
    std::optional<at::ScalarType> sums_dtype;
    if (has_bias) sums_dtype = bias_dtype->second.toScalarType();
    const auto [of_qkv, of_bias] = join.call(gradients[0], gradients[1], gradients[2], sums_dtype);
    return {of_qkv, has_bias ? of_bias : Tensor()};
  }
};

std::tuple<Tensor, Tensor> rotary(const Tensor& query, const Tensor& key, const Tensor& cosines, const Tensor& sines,
                                  bool interleaved, bool opposite) {
  static const auto below = operation<Rotary>("megatron::rotary");
  if (!needs_gradient(query, key)) return call_below(below, query, key, cosines, sines, interleaved, opposite);
  const variable_list results = RotaryFunction::apply(query, key, cosines, sines, interleaved, opposite);
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor, Tensor> rotary_split(const Tensor& qkv, const Tensor& cosines, const Tensor& sines,
                                                bool interleaved) {
  static const auto below = operation<RotarySplit>("megatron::rotary_split");
  if (!needs_gradient(qkv)) return call_below(below, qkv, cosines, sines, interleaved);
  const variable_list results = RotarySplitFunction::apply(qkv, cosines, sines, interleaved);
  return {results[0], results[1], results[2]};
}

std::tuple<Tensor, Tensor, Tensor> split_heads(const Tensor& qkv, const Tensor& bias) {
  const variable_list results = SplitHeadsFunction::apply(qkv, bias);
  return {results[0], results[1], results[2]};
}

}  // namespace
}  // namespace megatron::rotary

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("split_heads(Tensor qkv, Tensor bias) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(megatron, Autograd, library) {
  library.impl("rotary", &megatron::rotary::rotary);
  library.impl("rotary_split", &megatron::rotary::rotary_split);
  library.impl("split_heads", &megatron::rotary::split_heads);
}
