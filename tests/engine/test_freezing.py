"""Frozen parameters: which they are, and that every layout leaves them, and only them, as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.engine.engine import Engine
from megatron.engine.freezing import FreezeSpec, frozen_names
from megatron.engine.replicas import find_differences
from megatron.engine.state import owned_bytes, owned_pieces, pieces_to_load, refresh_weights
from megatron.errors import ConfigError
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import parameter_names
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.engine_opening import build_engine, parameter_counts
from tests.helpers.networks import build_gpt, tiny_config
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import initial_weights, layout_config, local_batches
from tests.parity.reference import Recipe, batch_mask, batch_tokens, forward

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=2, global_batch_size=4, hidden_size=16, learning_rate=3e-3)
BOTTOM = ("embedding.*", "decoder.layers.0.*")  # all that the first of two stages holds
TOP = ("decoder.layers.1.*", "decoder.final_layernorm.*", "embedding.word_embeddings.weight")  # all of the second
ALL_BUT_NORMS = ("embedding.*", "*.linear_*")  # a tensor-parallel rank but the first counts nothing
INSIDE = ("decoder.layers.*.mlp.*", "*.bias")
SAME = 1e-5


def test_names_are_those_of_the_built_network_and_cost_no_memory() -> None:
    config = tiny_config()
    names = parameter_names(gpt_layers(config, ParallelMesh.single()))
    assert names == [name for name, _ in build_gpt(config).named_parameters()]


def test_patterns_match_whole_names() -> None:
    names = [f"decoder.layers.{number}.mlp.weight" for number in range(12)]
    assert frozen_names(["decoder.layers.[0-2].*"], names) == frozenset(names[:3])
    assert frozen_names(["decoder.layers.1*", "*.7.*"], names) == {names[1], names[7], names[10], names[11]}


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigError, match=r"--freeze 'decoder.layer.0.w' matches none of the 2 parameters.*layers.0.w"):
        frozen_names(["decoder.layer.0.w"], ["decoder.layers.0.w", "embedding.w"])


def test_a_run_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--freeze a\* b matches all 2 parameters of the network"):
        frozen_names(["a*", "b"], ["a1", "b"])


def freezing_of(patterns: tuple[str, ...]) -> FreezeSpec:
    config = layout_config(RECIPE, (1, 1, 1), 0, [])
    names = parameter_names(gpt_layers(config.model, ParallelMesh.single()))
    return FreezeSpec(frozen_names(patterns, names))


def train(rank: int, layout: tuple[int, int, int], cases: list[Any]) -> list[Any]:
    """Trains once per ZeRO stage, precision and patterns; what came of it, and what was held for it."""
    found, mesh = [], None
    for stage, flags, patterns in cases:
        config = layout_config(RECIPE, layout, stage, list(flags))
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh, freezing_of(patterns))
        before = weights(engine)
        curve = []
        for step in range(RECIPE.steps):
            result = engine.train_batch(local_batches(RECIPE, config, mesh, step, True), RECIPE.learning_rate)
            curve.append((result.loss, result.gradient_norm))
        pieces = [(key.name, key.kind, key.numel) for key, _ in owned_pieces(engine)]
        state = sum(
            value.numel()
            for entry in engine.optimizer.state.values()
            for name, value in entry.items()
            if name in ("exp_avg", "exp_avg_sq")
        )
        assert find_differences(engine) == []
        after = weights(engine)
        found.append(
            {
                "curve": curve,
                "moved": {name for name, values in after.items() if not torch.equal(values, before[name])},
                "pieces": pieces,
                "state": state,
                "counts": parameter_counts(engine),
                "bytes": owned_bytes(engine),
                "written": sum(values.numel() * values.element_size() for _, values in owned_pieces(engine)),
                "updates": engine.update_count,
            }
        )
    return found


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """What the network computes with: this rank's part under ZeRO-3."""
    return {p.global_name: getattr(p, "ds_tensor", p).detach().clone() for p in engine.parameters()}


def check(ranks: list[Any], number: int, patterns: tuple[str, ...]) -> list[tuple[float, float]]:
    """Checks one case on all ranks, and returns the curve."""
    results = [rank[number] for rank in ranks]
    frozen = freezing_of(patterns).frozen
    sizes = {name: values.numel() for name, values in initial_weights(RECIPE).items()}
    moved = set().union(*(result["moved"] for result in results))
    assert moved == sizes.keys() - frozen
    written: dict[tuple[str, str], int] = {}
    for result in results:
        for name, kind, numel in result["pieces"]:
            written[name, kind] = written.get((name, kind), 0) + numel
        assert result["bytes"] == result["written"] and result["updates"] == RECIPE.steps
        assert result["state"] <= 2 * result["counts"][2] + 64, "at most two moments of what is trained, and padding"
    assert {name: written[name, "weight"] for name in frozen} == {name: sizes[name] for name in frozen}
    assert {name for name, kind in written if kind in ("exp_avg", "exp_avg_sq", "master")} == sizes.keys() - frozen
    return list(results[0]["curve"])


# ZeRO stage, further flags, and patterns
PIPELINE_CASES = [
    (0, (), BOTTOM),
    (0, (), TOP),
    (1, (), BOTTOM),
    (1, (), TOP),
    (1, (), INSIDE),
    (1, ("--bf16",), BOTTOM),
    (1, ("--bf16",), INSIDE),
]
PLAIN_CASES = [
    (0, (), INSIDE),
    (1, (), BOTTOM),
    (1, ("--bf16",), ALL_BUT_NORMS),
    (2, (), ALL_BUT_NORMS),
    (2, ("--bf16",), INSIDE),
    (3, (), ALL_BUT_NORMS),
    (3, (), BOTTOM),
    (3, ("--bf16",), INSIDE),
]
GRID_CASES = [(1, (), BOTTOM), (1, ("--bf16",), INSIDE)]
# What is trained are copies on both tensor-parallel ranks, which two data-parallel ranks divide alike.
COPIES_CASES = [(2, (), ALL_BUT_NORMS), (1, ("--bf16",), ALL_BUT_NORMS)]
LAYOUTS = {
    (1, 2, 1): PIPELINE_CASES,
    (1, 1, 2): PLAIN_CASES,
    (2, 1, 1): PLAIN_CASES,
    (2, 2, 1): GRID_CASES,
    (2, 1, 2): COPIES_CASES,
}


@pytest.fixture(scope="module")
def single() -> dict[Any, Any]:
    """The curve of each case in one process."""
    cases = list(dict.fromkeys([*PIPELINE_CASES, *PLAIN_CASES]))
    ranks = run_ranks(train, 1, (1, 1, 1), cases)
    return {case: check(ranks, number, case[2]) for number, case in enumerate(cases)}


def reference(patterns: tuple[str, ...], frozen_steps: int, steps: int) -> list[tuple[float, float]]:
    """The curve of plain PyTorch, where a parameter that gets no gradient is not optimized."""
    initial = initial_weights(RECIPE)
    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    frozen = frozen_names(patterns, list(weights))
    matrices = [value for value in weights.values() if value.dim() > 1]
    vectors = [value for value in weights.values() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": RECIPE.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RECIPE.learning_rate)
    curve = []
    for step in range(steps):
        tokens, mask = batch_tokens(RECIPE, step), batch_mask(RECIPE, step, True)
        logits = forward(weights, tokens[:, :-1], RECIPE)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        if step < frozen_steps:
            for name in frozen:
                weights[name].grad = None
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), RECIPE.clip)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.mark.parametrize("patterns", [BOTTOM, TOP, ALL_BUT_NORMS, INSIDE])
def test_one_process_trains_as_plain_pytorch_does(patterns: tuple[str, ...], single: Any) -> None:
    expected = reference(patterns, RECIPE.steps, RECIPE.steps)
    for case, curve in single.items():
        if case[2] == patterns and not case[1]:
            for own, other in zip(curve, expected, strict=True):
                assert own == pytest.approx(other, rel=SAME), case


def thaw(rank: int, layout: tuple[int, int, int], stages: list[int], folder: str) -> list[list[tuple[float, float]]]:
    """Trains with frozen parameters, saves, and continues with fewer of them, three times: twice frozen, twice not."""
    curves, mesh = [], None
    for stage in stages:
        config = layout_config(RECIPE, layout, stage, [])
        mesh = mesh or open_mesh(config.parallel)
        now, curve, step = freezing_of(INSIDE), [], 0
        for last in (2, 4, 6):
            engine = build_engine(config, mesh, now)
            if step:
                record = load(Path(folder) / f"{stage}" / f"iter_{step:07d}", pieces_to_load(engine), mesh)
                refresh_weights(engine, record["updates"])
            for number in range(step, last):
                result = engine.train_batch(local_batches(RECIPE, config, mesh, number, True), RECIPE.learning_rate)
                curve.append((result.loss, result.gradient_norm))
            save(Path(folder) / f"{stage}", last, owned_pieces(engine), {"updates": engine.update_count}, mesh)
            thawed = now.frozen if step == 0 else frozenset()
            now, step = FreezeSpec(frozenset(), thawed, dict.fromkeys(sorted(now.frozen), 2) or now.began_at), last
        curves.append(curve)
    return curves


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2)])
def test_a_thawed_parameter_is_trained_as_a_new_one(layout: tuple[int, int, int], tmp_path: Path) -> None:
    stages = [0, 1] if layout[1] > 1 else [0, 1, 2, 3]
    expected = reference(INSIDE, 2, 6)
    for curve in run_ranks(thaw, 2, layout, stages, str(tmp_path))[0]:
        for own, other in zip(curve, expected, strict=True):
            assert own == pytest.approx(other, rel=SAME)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_and_leaves_frozen_weights(layout: tuple[int, int, int], single: Any) -> None:
    cases = LAYOUTS[layout]
    ranks = run_ranks(train, layout[0] * layout[1] * layout[2], layout, cases)
    for number, case in enumerate(cases):
        curve = check(ranks, number, case[2])
        ratio = 2e-2 if case[1] else SAME
        for own, expected in zip(curve, single[case], strict=True):
            assert own == pytest.approx(expected, rel=ratio), case
