"""BERT trains in every layout like plain PyTorch, sentence-order loss included."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pretrain_bert
from megatron.config import RunConfig
from megatron.objective.masked import ORDER_LOSS
from megatron.observe.metrics_file import read_steps
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_sentences import TinySentences, write_tiny_sentences
from tests.parity.layouts import initial_weights, layout_config, layout_name
from tests.parity.plain_bert import masked_text, train_plain_bert
from tests.parity.reference import Recipe

RECIPE = Recipe(num_layers=2, steps=3, learning_rate=2.0e-3)
BERT = ["--objective", "masked", "--bidirectional", "--masked-lm-head", "--sentence-order-head"]
VARIANTS = {
    "megatron": BERT,
    "original": [*BERT, "--norm-placement", "post", "--embed-layernorm"],
}


def micro_batches(config: RunConfig, mesh: ParallelMesh, step: int) -> list[Any]:
    """This rank's micro-batches of one global batch, distributed as by the loader."""
    text, size = masked_text(RECIPE, step), config.optim.micro_batch_size
    found = []
    for first in range(mesh.batch.rank * size, RECIPE.global_batch_size, size * mesh.batch.size):
        part = type(text)(*(field[first : first + size] for field in text))
        found.append(
            SimpleNamespace(
                tokens=part.tokens.numpy(),
                labels=part.labels.numpy(),
                loss_mask=part.mask.numpy(),
                counted_labels=float(part.mask.sum()),
                segment_ids=part.segments.numpy(),
                token_types=part.types.numpy(),
                predicted=part.predicted.numpy(),
                swapped=part.swapped.numpy(),
                sample_ids=np.arange(first, first + size, dtype=np.int64),
                source_ids=None,
            )
        )
    return found


def train_variants(rank: int, layout: tuple[int, int, int], stages: list[int], extra: list[str]) -> Any:
    """(masked loss, sentence-order loss, gradient norm) of every step, by variant and ZeRO stage."""
    curves, mesh = {}, None
    for name, flags in VARIANTS.items():
        for stage in stages:
            config = layout_config(RECIPE, layout, stage, [*flags, *extra])
            mesh = mesh or open_mesh(config.parallel)
            engine, curve = build_engine(config, mesh), []
            for step in range(RECIPE.steps):
                result = engine.train_batch(micro_batches(config, mesh, step), RECIPE.learning_rate)
                order_sum, samples = result.sums[ORDER_LOSS]
                assert samples == RECIPE.global_batch_size
                curve.append((result.loss, order_sum / samples, result.gradient_norm))
            curves[name, stage] = curve
    return curves


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, float, float]]]:
    return {
        name: train_plain_bert(initial_weights(RECIPE, flags), RECIPE, post=name == "original")
        for name, flags in VARIANTS.items()
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("layout", "stages", "extra"),
    [
        ((1, 1, 1), [0], []),
        ((2, 1, 1), [0], []),
        ((1, 2, 1), [0], ["--micro-batch-size", "1"]),
        ((1, 1, 2), [0, 2, 3], ["--checkpoint-activations"]),
        ((2, 2, 1), [0], []),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, tuple) else None,
)
def test_a_layout_equals_plain_torch(
    layout: tuple[int, int, int], stages: list[int], extra: list[str], expected: Any
) -> None:
    world = layout[0] * layout[1] * layout[2]
    for curves in run_ranks(train_variants, world, layout, stages, extra):
        for (name, stage), curve in curves.items():
            for found, true in zip(curve, expected[name], strict=True):
                label = f"{name}, ZeRO-{stage}"
                assert found[:2] == pytest.approx(true[:2], rel=1e-5), label
                assert found[2] == pytest.approx(true[2], rel=1e-4), label


def train_and_resume(rank: int, corpus: TinySentences) -> None:
    """Six steps of two data-parallel ranks, then the last three again from the checkpoint, also in other layouts."""
    first = str(corpus.folder / "whole")
    runs: dict[str, tuple[dict[str, Any], list[str]]] = {
        "whole": ({"zero_stage": 2}, []),
        "resumed": ({"zero_stage": 2}, ["--load", first, "--ckpt-step", "3"]),
        "zero3": ({"zero_stage": 3}, ["--load", first, "--ckpt-step", "3"]),
        "tp2": ({"tensor_model_parallel_size": 2}, ["--load", first, "--ckpt-step", "3"]),
        "pp2": ({"pipeline_model_parallel_size": 2}, ["--load", first, "--ckpt-step", "3"]),
        "ulysses": ({"ds_sequence_parallel_size": 2}, ["--load", first, "--ckpt-step", "3"]),
    }
    for name, (changes, more) in runs.items():
        folder = corpus.folder / name
        flags = corpus.flags(*more, run_dir=folder / "run", **changes)
        if name == "whole":
            flags += ["--save", str(folder), "--save-interval", "3"]
        assert pretrain_bert.main(flags) == 0


@pytest.mark.full
def test_a_run_resumes_bit_for_bit_and_in_other_layouts(tmp_path: Path) -> None:
    corpus = write_tiny_sentences(tmp_path)
    run_ranks(train_and_resume, 2, corpus)
    curves = {
        name: {
            step: (record["lm_loss"], record["order_loss"])
            for step, record in read_steps(tmp_path / name / "run").items()
        }
        for name in ("whole", "resumed", "zero3", "tp2", "pp2", "ulysses")
    }
    rest = {step: figures for step, figures in curves.pop("whole").items() if step > 3}
    assert sorted(rest) == [4, 5, 6]
    assert curves.pop("resumed") == rest
    for name, curve in curves.items():
        for step, figures in rest.items():
            assert curve[step] == pytest.approx(figures, rel=1e-5), f"{name}, step {step}"
