"""Products in 8 bits are those of the matrices that are split, in the blocks that are named."""

from __future__ import annotations

from megatron.kernels.float8 import Float8
from megatron.model.float8 import use_float8
from tests.helpers.networks import build_gpt, tiny_config


def test_the_split_matrices_of_the_blocks_that_are_named() -> None:
    stack, float8 = build_gpt(tiny_config(num_layers=3)), Float8()
    assert use_float8(stack, float8, range(1, 3)) == (8, 8)
    chosen = {name for name, module in stack.named_modules() if getattr(module, "float8", None) is float8}
    layers = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert chosen == {f"decoder.layers.{index}.{layer}" for index in (1, 2) for layer in layers}


def test_experts_are_left_out_and_sizes_that_do_not_fit_are_counted() -> None:
    stack = build_gpt(tiny_config(num_experts=2, moe_layer_pattern=(1, 0), ffn_hidden_size=40))
    assert use_float8(stack, Float8(), range(2)) == (6, 4)
