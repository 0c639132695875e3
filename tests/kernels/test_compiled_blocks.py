"""Transformer blocks under torch.compile: inductor's programs and the operations of `csrc/ops` against eager blocks."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch

from megatron.kernels.choice import TORCH_KERNELS, Implementation
from megatron.kernels.float8 import Float8
from megatron.kernels.native.library import Library
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from tests.helpers.networks import build_gpt, tiny_config

SEED = 5
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_function": "silu",
    "gated_linear_unit": True, "num_query_groups": 2,
}  # fmt: skip
CSRC = dict.fromkeys(("softmax", "norm", "activation", "dropout_add", "rotary"), Implementation.CSRC)


def blocks(changes: dict[str, Any], kernels: dict[str, Implementation]) -> list[TransformerBlock]:
    """Three blocks with weights that are not zero."""
    mesh = dataclasses.replace(ParallelMesh.single(), kernels=TORCH_KERNELS.replace(kernels))
    config, generator = tiny_config(**changes), torch.Generator().manual_seed(3)
    built = [TransformerBlock(config, mesh, index) for index in range(3)]
    for parameter in (parameter for block in built for parameter in block.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return built


def results(built: list[TransformerBlock]) -> list[torch.Tensor]:
    """The output of the blocks and the gradients of their input and parameters."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(2, 6, built[0].input_layernorm.weight.numel(), generator=generator).requires_grad_()
    hidden, context = start, StepSettings(seed=SEED, holds_parameters=True).context(torch.arange(2))
    for block in built:
        hidden = block(hidden, context)
    parameters = [parameter for block in built for parameter in block.parameters()]
    return [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), [start, *parameters])]


def programs() -> int:
    """The number of compiled programs since the counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def check(
    changes: dict[str, Any], kernels: dict[str, Implementation], backend: str, float8: Float8 | None = None
) -> None:
    """Compiled blocks give what eager ones give, and share one program, whatever they drop."""
    built = blocks(changes, kernels)
    for layer in (layer for block in built for layer in block.modules()):
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.float8 = float8
    expected = results(built)
    for block in built:
        block.compile_for(SEED, torch.device("cpu"), backend)
    torch._dynamo.utils.counters.clear()
    for one, other in zip(expected, results(built), strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max()
    assert programs() == 1
    torch.compiler.reset()


@pytest.mark.full
@pytest.mark.slow
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    check({**LLAMA, "hidden_dropout": 0.2, "attention_dropout": 0.0}, {}, "inductor")


@pytest.mark.parametrize("changes", [{}, {**LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0}])
def test_compiled_operations_are_traced(compiled: Library, changes: dict[str, Any]) -> None:
    check({"hidden_dropout": 0.2, "attention_dropout": 0.1, **changes}, CSRC, "aot_eager")


def test_products_in_8_bits_are_traced() -> None:
    check({"hidden_dropout": 0.2, "attention_dropout": 0.0}, {}, "aot_eager", Float8(by_row=True, is_emulated=True))


def test_documents_and_windows() -> None:
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0, attention_window=3, position_embedding_type="rope")
    stack, documents = build_gpt(config), torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    tokens, settings = torch.arange(24).view(2, 12), StepSettings(seed=SEED, mask=MaskKind.DOCUMENTS)
    expected = stack(tokens, settings.context(torch.arange(2), documents))
    stack.compile_blocks(SEED, torch.device("cpu"), "aot_eager")
    for segments in (documents, documents.flip(0)):  # other lengths of documents are no other program
        context = settings.context(torch.arange(2), segments)
        assert torch.allclose(stack(tokens, context), expected, atol=1e-5) == (segments is documents)
    torch.compiler.reset()


def test_what_is_scored_or_generated_compiles_nothing() -> None:
    stack = build_gpt(tiny_config(hidden_dropout=0.0, attention_dropout=0.0)).eval()
    tokens, settings = torch.arange(12)[None], StepSettings(seed=SEED)
    with torch.no_grad():
        expected = [stack(tokens[:, :length], settings.context(torch.arange(1))) for length in (5, 12)]
        stack.compile_blocks(SEED, torch.device("cpu"), "aot_eager")
        torch._dynamo.utils.counters.clear()
        for length, logits in zip((5, 12), expected, strict=True):
            assert torch.equal(stack(tokens[:, :length], settings.context(torch.arange(1))), logits)
        cached = stack(tokens[:, :5], settings.context(torch.arange(1), caches=stack.new_caches(8)))
        torch.testing.assert_close(cached, expected[0])
    assert programs() == 0
    torch.testing.assert_close(stack.train()(tokens, settings.context(torch.arange(1))), expected[1])
    assert programs() == 1
    torch.compiler.reset()
