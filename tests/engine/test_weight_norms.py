"""The norm of the weights, by layer: equal in every layout, and to the norm of the weights of one process."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from megatron.engine.weight_norms import weight_norms
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import steps, train, write_tiny_corpus
from tests.parity.layouts import layout_config, layout_name
from tests.parity.reference import Recipe

BF16 = ["--bf16"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2"]


def norms_of(rank: int, layout: tuple[int, int, int], stage: int, extra: list[str]) -> dict[str, float]:
    """What every rank is told."""
    config = layout_config(Recipe(), layout, stage, extra)
    engine = build_engine(config, open_mesh(config.parallel))
    return dict(zip(engine.layer_names, weight_norms(engine).tolist(), strict=True))


def plain_norms(rank: int, extra: list[str]) -> dict[str, float]:
    """Those of the parameters of one process, by the first words of their names."""
    config = layout_config(Recipe(), (1, 1, 1), 0, extra)
    engine = build_engine(config, open_mesh(config.parallel))
    squares: dict[str, float] = defaultdict(float)
    for parameter in engine.parameters():
        padding = config.model.padded_vocab_size - config.model.vocab_size
        rows = len(parameter) - padding if len(parameter) == config.model.padded_vocab_size else len(parameter)
        name: str = parameter.global_name  # type: ignore[attr-defined]
        (layer,) = [one for one in engine.layer_names if name.startswith(f"{one}.")]
        squares[layer] += float(parameter[:rows].detach().double().square().sum())
    return {layer: math.sqrt(square) for layer, square in squares.items() if square}


@pytest.mark.parametrize(
    ("layout", "stage", "extra"),
    [((1, 1, 1), 1, BF16), ((2, 2, 1), 1, []), ((1, 1, 2), 3, []), ((1, 1, 2), 2, EXPERTS)],
    ids=lambda value: layout_name(value) if isinstance(value, tuple) else None,
)
def test_every_layout_has_the_norms_of_one_process(layout: tuple[int, int, int], stage: int, extra: list[str]) -> None:
    (expected,) = run_ranks(plain_norms, 1, [] if extra == BF16 else extra[:2])
    largest_ratio = 1e-3 if extra == BF16 else 1e-6  # the weights begin as what bf16 has of them
    for found in run_ranks(norms_of, math.prod(layout), layout, stage, extra):
        assert {layer for layer, norm in found.items() if norm} == expected.keys()
        for layer, norm in expected.items():
            assert found[layer] == pytest.approx(norm, rel=largest_ratio), layer


def test_a_run_records_them_at_every_log_interval(tmp_path: Path) -> None:
    flags = write_tiny_corpus(tmp_path).flags(
        "--log-params-norm", "--log-interval", "2", folder=tmp_path, train_iters=4
    )
    assert train(flags) == (0, "")
    found = steps(tmp_path, "weight_norm", "weight_norms")
    assert found[1] == found[3] == (None, None)
    for step in (2, 4):
        total, by_layer = found[step]
        assert "decoder.layers.0" in by_layer and total == pytest.approx(math.hypot(*by_layer.values()))
    assert " | params norm: " in (tmp_path / "run" / "log.txt").read_text()
