"""Norms by layer, zeros and noise of gradients: equal in every layout, and to what torch computes in one process."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.gradient_stats import NoiseEstimate
from megatron.engine.tensor_parts import is_block_matrix
from megatron.parallel.joining import open_mesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import RECIPE
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import steps, train, write_tiny_corpus
from tests.parity.layouts import layout_config, local_batches

# Without the bias of keys, whose gradient is 0 but for rounding, so that an element of it is 0 or not by chance.
FLAGS = ["--log-grad-norm", "--log-num-zeros-in-grad", "--log-gradient-noise-scale", "--disable-bias-linear"]
UNTIED = "--untie-embeddings-and-output-weights"  # so that words that do not occur have no gradient
EXPERTS = ["--num-experts", "4", UNTIED]
CHUNKS = ["--num-layers", "4", "--pipeline-schedule", "interleaved-zb", UNTIED]
Layout = tuple[tuple[int, int, int], int, list[str]]


@dataclass(frozen=True)
class Figures:
    """What a step says of its gradients."""

    norm: float
    norms: dict[str, float]
    zeros: int | None
    small: float
    large: float

    def check(self, expected: Figures, largest_ratio: float) -> None:
        assert self.norms == {name: pytest.approx(norm, rel=largest_ratio) for name, norm in expected.norms.items()}
        assert self.norm == pytest.approx(math.hypot(*self.norms.values()), rel=1e-6)
        assert expected.zeros is None or self.zeros == expected.zeros
        assert (self.small, self.large) == pytest.approx((expected.small, expected.large), rel=largest_ratio)


def measured(rank: int, runs: list[Layout]) -> list[Figures]:
    """Those of the second step of each run, on one rank."""
    found = []
    for layout, stage, extra in runs:
        config = layout_config(RECIPE, layout, stage, [*FLAGS, *extra])
        engine = build_engine(config, open_mesh(config.parallel))
        for step in (0, 1):
            result = engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=True), 1e-3)
        value, prefix = result.metrics.value, "gradient_norms/"
        norms = {name[len(prefix) :]: each.value for name, each in result.metrics.items() if name.startswith(prefix)}
        small, large = (
            value("gradient_signal") + value("gradient_noise") / size
            for size in (RECIPE.micro_batch_size, RECIPE.global_batch_size)
        )
        found.append(Figures(result.gradient_norm, norms, value("gradient_zeros"), small, large))
    return found


def computed(rank: int, extras: list[list[str]]) -> list[Figures]:
    """The same from the gradients of one process, of which each micro-batch's is the difference of two sums."""
    return [computed_of(extra) for extra in extras]


def computed_of(extra: list[str]) -> Figures:
    config = layout_config(RECIPE, (1, 1, 1), 0, [FLAGS[-1], *extra])
    engine = build_engine(config, open_mesh(config.parallel))
    view, sums = engine.view, [{}]
    assert isinstance(view, GradientOwner)
    rows = {id(each): each.shape[0] for each in engine.parameters()}
    for each in engine.parameters():
        if each.shape[0] == config.model.padded_vocab_size:
            rows[id(each)] = config.model.vocab_size

    def note(parameters: object = None) -> None:
        sums.append({each.global_name: each.grad[: rows[id(each)]].double() for each in engine.parameters()})  # type: ignore[attr-defined, index]

    view.accumulate = note  # type: ignore[method-assign]
    for step in (0, 1):
        del sums[1:]
        result = engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=True), 1e-3)
    squares: dict[str, float] = defaultdict(float)
    chosen = [each for each in engine.parameters() if is_block_matrix(each) and not shard_spec_of(each).summed_over]
    matrices = {name for name in (each.global_name for each in chosen) if ".experts." not in name}  # type: ignore[attr-defined]
    total, small = sums[-1], 0.0
    for name, gradient in total.items():
        (layer,) = [one for one in engine.layer_names if name.startswith(f"{one}.")]
        squares[layer] += float(gradient.square().sum())
    count = len(sums) - 1
    for before, after in itertools.pairwise(sums):
        small += sum(float((after[name] - before.get(name, 0.0)).square().sum()) for name in matrices) * count
    large = sum(float(total[name].square().sum()) for name in matrices)
    norms = {layer: math.sqrt(squares[layer]) for layer in engine.layer_names}
    zeros = sum(int((gradient == 0).sum()) for gradient in total.values())
    assert zeros > 0 and count == 4
    assert small > large > 0 and not result.metrics
    return Figures(result.gradient_norm, norms, zeros, small, large)


@pytest.fixture(scope="module")
def expected() -> list[Figures]:
    """Of the plain network, one with experts, and one of four blocks."""
    return run_ranks(computed, 1, [[], EXPERTS, ["--num-layers", "4", UNTIED]])[0]


def test_one_process(expected: list[Figures]) -> None:
    runs: list[Layout] = [((1, 1, 1), stage, []) for stage in (0, 1, 2)]
    (found,) = run_ranks(measured, 1, [*runs, ((1, 1, 1), 1, ["--bf16"])])
    for figures in found[:3]:
        figures.check(expected[0], 1e-5)
    assert found[3].norms == {name: pytest.approx(norm, rel=0.05) for name, norm in expected[0].norms.items()}


def test_every_layout_has_the_figures_of_one_process(expected: list[Figures]) -> None:
    runs: list[tuple[Layout, int]] = [
        (((2, 1, 2), 0, []), 0),
        (((2, 1, 2), 2, ["--sequence-parallel"]), 0),
        (((2, 1, 2), 1, []), 0),
        (((1, 2, 2), 1, []), 0),
        (((2, 2, 1), 0, []), 0),
        (((1, 2, 2), 1, CHUNKS), 2),
        (((1, 1, 4), 2, [*EXPERTS, "--expert-model-parallel-size", "2"]), 1),
        (((2, 1, 2), 0, [*EXPERTS, "--sequence-parallel"]), 1),
    ]
    for found in run_ranks(measured, 4, [layout for layout, _ in runs]):
        for figures, (_, number) in zip(found, runs, strict=True):
            figures.check(expected[number], 1e-5)


def zeros(rank: int, runs: list[Layout]) -> list[int | None]:
    """The zeros of the second step of each run."""
    counts = []
    for layout, stage, extra in runs:
        config = layout_config(RECIPE, layout, stage, [*FLAGS[1::2], *extra])
        engine = build_engine(config, open_mesh(config.parallel))
        for step in (0, 1):
            result = engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=True), 1e-3)
        counts.append(result.metrics.value("gradient_zeros"))
    return counts


def test_zeros_are_those_of_one_process_where_ranks_share_samples(expected: list[Figures]) -> None:
    runs: list[Layout] = [
        ((1, 1, 4), 1, ["--context-parallel-size", "2"]),
        ((1, 2, 2), 2, ["--ds-sequence-parallel-size", "2"]),
        ((1, 2, 2), 1, ["--pipeline-engine", "deepspeed"]),
    ]
    assert run_ranks(zeros, 4, runs) == [[expected[0].zeros] * 3] * 4


def test_the_estimate_is_exact_where_the_expectations_are() -> None:
    """E |G_B|² = |G|² + tr(Σ) / B, from which both follow; and gradients of which both are known."""
    noise, signal = 12.0, 0.5
    squares = [signal + noise / size for size in (4, 32)]
    estimate = NoiseEstimate.of(*squares, 4, 32)
    assert estimate is not None and estimate == pytest.approx((noise, signal))
    assert NoiseEstimate.of(1.0, 1.0, 8, 8) is None
    torch.manual_seed(0)
    mean, deviations = torch.linspace(-1, 1, 40), torch.linspace(0, 2, 40)
    samples = mean + deviations * torch.randn(4000, 64, 40)
    small = float(samples.unflatten(1, (16, 4)).mean(dim=2).square().sum(dim=-1).mean())
    large = float(samples.mean(dim=1).square().sum(dim=-1).mean())
    assert NoiseEstimate.of(small, large, 4, 64) == pytest.approx(
        (float(deviations.square().sum()), float(mean.square().sum())), rel=0.01
    )


def test_a_run_logs_them(tmp_path: Path) -> None:
    flags = write_tiny_corpus(tmp_path).flags(
        *(*FLAGS, UNTIED), "--log-interval", "2", "--micro-batch-size", "1", folder=tmp_path, train_iters=4
    )
    assert train(flags) == (0, "")
    names = ("gradient_norm", "gradient_norms", "gradient_zeros", "gradient_noise", "gradient_signal")
    for norm, norms, zeros, noise, signal in steps(tmp_path, *names).values():
        assert norm == pytest.approx(math.hypot(*norms.values()), rel=1e-5) and "decoder.layers.0" in norms
        assert zeros > 0 and noise is not None and signal is not None
    assert " | num zeros: " in (tmp_path / "run" / "log.txt").read_text()
