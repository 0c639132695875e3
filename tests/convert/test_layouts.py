"""Imported models split over tensor ranks and over pipeline stages: loss, logits and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.inference.weights import load_weights
from megatron.model.gpt import gpt_layers, whole_logits
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import build_tokenizer
from megatron.train.build import build_engine
from megatron.train.restore import find_saved_run, load_tensors
from tests.convert.tiny_models import LENGTH, sample_tokens
from tests.helpers.ranks import run_ranks

# Few keys per rank, soft caps and windows, a norm over the heads of all ranks, experts, one key head for all ranks.
MODELS = ("llama-grouped-llama3", "gemma2", "olmo2", "mixtral", "llama-multi-query-linear", "bloom-12")
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2)}


def load_config(imported: Path, tp: int, pp: int) -> RunConfig:
    """The configuration of a run that continues the training of an imported model."""
    flags = {
        "--config": imported / "model.yaml", "--load": imported, "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp, "--seq-length": LENGTH, "--micro-batch-size": 1,
        "--global-batch-size": 2, "--train-iters": 1, "--lr": 1e-4, "--data-path": "none",
    }  # fmt: skip
    request = parse([*(str(part) for pair in flags.items() for part in pair), "--finetune"])
    tokenizer = build_tokenizer(request.data)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    return resolve(request, Machine("cpu", tp * pp, False, True), facts)


def batches() -> list[Batch]:
    """Two micro-batches of one sample, whose last token has no successor."""
    tokens = sample_tokens()
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0
    return [
        Batch(
            tokens[row : row + 1].numpy(),
            tokens.roll(-1, dims=1)[row : row + 1].numpy(),
            mask[row : row + 1].numpy(),
            torch.tensor([row]).numpy(),
            None,
        )
        for row in range(2)
    ]


def continue_training(
    rank: int, layout: tuple[int, int], folders: dict[str, Path]
) -> dict[str, tuple[float, float, float]]:
    """Loss of an evaluation, then loss and gradient norm of the first step, of every model."""
    found = {}
    mesh: ParallelMesh | None = None
    for name in MODELS:
        config = load_config(folders[name], *layout)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        load_tensors(config.control, engine, find_saved_run(config.control, mesh))
        loss_sum, tokens = engine.evaluate(batches())
        step = engine.train_batch(batches(), 1e-4)
        found[name] = loss_sum / tokens, step.loss, step.gradient_norm
    return found


def split_logits(rank: int, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The logits of every model over two tensor ranks."""
    found = {}
    mesh: ParallelMesh | None = None
    for name in MODELS:
        config = load_config(folders[name], 2, 1)
        mesh = mesh or open_mesh(config.parallel)
        network = LayerStack(gpt_layers(config.model, mesh)).eval()
        load_weights(network, folders[name], mesh)
        with torch.no_grad():
            logits = network(sample_tokens(), StepSettings().context(torch.arange(2)))
            found[name] = whole_logits(logits, mesh.tp, config.model.vocab_size)
    return found


def evaluate_and_split(
    rank: int, layout: tuple[int, int], folders: dict[str, Path]
) -> tuple[dict[str, tuple[float, float, float]], dict[str, torch.Tensor]]:
    """Both, where the layout has tensor ranks."""
    logits = split_logits(rank, folders) if layout[0] > 1 else {}
    return continue_training(rank, layout, folders), logits


@pytest.fixture(scope="module")
def imported(imported_model: Callable[[str], Path]) -> dict[str, Path]:
    return {name: imported_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def expected(imported: dict[str, Path]) -> dict[str, tuple[float, float, float]]:
    return run_ranks(continue_training, 1, (1, 1), imported)[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_imported_model_is_the_same_in_every_layout(
    layout: tuple[int, int],
    imported: dict[str, Path],
    expected: dict[str, tuple[float, float, float]],
    tiny_model: Callable[[str], Path],
) -> None:
    for numbers, logits in run_ranks(evaluate_and_split, 2, layout, imported):
        for name in MODELS:
            assert numbers[name] == pytest.approx(expected[name], rel=2e-5), name
        for name, values in logits.items():
            reference = AutoModelForCausalLM.from_pretrained(tiny_model(name), attn_implementation="eager").eval()
            with torch.no_grad():
                theirs = reference(sample_tokens(), labels=sample_tokens())
            assert (values - theirs.logits).abs().max() <= 1e-5 * theirs.logits.abs().max(), name
            assert numbers[name][0] == pytest.approx(float(theirs.loss), rel=1e-5), name
