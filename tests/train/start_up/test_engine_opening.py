"""All stages combined must hold the requested layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron import log
from megatron.engine.engine import Engine
from megatron.errors import LaunchError
from megatron.kernels.float8 import Float8
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up import engine_opening
from megatron.train.start_up.engine_opening import check_compiler, check_layers, choose_products, use_float8
from tests.helpers.networks import build_gpt, tiny_config
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe


def engine_with(blocks: int) -> Engine:
    """The part of an engine that `check_layers` uses, with `blocks` blocks built."""
    kinds = [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * blocks, LayerKind.HEAD]
    layers = [
        (LayerSpec(str(place), kind, LayerCost(1), nn.Identity), nn.Identity()) for place, kind in enumerate(kinds)
    ]
    fake: Any = SimpleNamespace(mesh=ParallelMesh.single(), stack=SimpleNamespace(named_layers=lambda: layers))
    return cast(Engine, fake)


def test_a_missing_layer_is_an_error() -> None:
    with pytest.raises(LaunchError, match="hold 28 transformer layers, not the 30"):
        check_layers(engine_with(28), 30)


def test_matrices_that_do_not_fit_8_bits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    config = layout_config(Recipe(num_layers=2), (1, 1, 1), 1, ["--bf16", "--fp8-hybrid", "--fp8-emulation"])
    for width in (48, 40):
        stack = build_gpt(tiny_config(ffn_hidden_size=width))
        choose_products(config, cast(Engine, SimpleNamespace(stack=stack)))
    (warning,) = warnings
    assert "--fp8-format hybrid: 4 of 8 matrices on a rank have sizes that are not multiples of 16" in warning


def test_what_inductor_needs_is_looked_for_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(engine_opening, "is_installed", lambda package: package != "triton")
    with pytest.raises(LaunchError, match="--compile requires Triton on a GPU, which is not installed"):
        check_compiler("inductor", gpu)
    monkeypatch.setenv("CXX", "nowhere/c++ -O2")
    with pytest.raises(LaunchError, match=r"--compile requires a C\+\+ compiler, and nowhere/c\+\+ was not found"):
        check_compiler("inductor", cpu)
    check_compiler("aot_eager", cpu)
    monkeypatch.setenv("CXX", "sh")
    check_compiler("inductor", cpu)


def test_the_split_matrices_of_the_blocks_that_are_named() -> None:
    stack, float8 = build_gpt(tiny_config(num_layers=3)), Float8()
    assert use_float8(stack, float8, range(1, 3)) == (8, 8)
    chosen = {name for name, module in stack.named_modules() if getattr(module, "float8", None) is float8}
    layers = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert chosen == {f"decoder.layers.{index}.{layer}" for index in (1, 2) for layer in layers}
