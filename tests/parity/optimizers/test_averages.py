"""Means of weights: by hand, through a checkpoint bit by bit, in evaluations, and where a checkpoint has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.config import RunConfig
from megatron.engine.engine import Engine
from megatron.engine.freezing import NOTHING_FROZEN, FreezeSpec
from megatron.engine.state import owned_bytes, owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.parallel.pieces import Kind, PieceKey
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.optimizers.test_optimizers import RECIPE

pytestmark = pytest.mark.slow
DECAY = 0.8
Pieces = dict[tuple[str, Kind], torch.Tensor]


def engine_of(stage: int, *flags: str, freezing: FreezeSpec = NOTHING_FROZEN) -> tuple[Engine, RunConfig]:
    """An engine in one process."""
    config = layout_config(RECIPE, (1, 1, 1), stage, list(flags))
    return build_engine(config, open_mesh(config.parallel), freezing), config


def pieces(engine: Engine, *, with_optimizer: bool = True) -> Pieces:
    """Copies of everything that is saved."""
    stored = owned_pieces(engine, with_optimizer=with_optimizer)
    return {(key.name, key.kind): values.clone() for key, values in stored}


def train(engine: Engine, config: RunConfig, step: int) -> None:
    engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=True), RECIPE.learning_rate)


def loss_of(engine: Engine, config: RunConfig) -> float:
    return engine.evaluate(local_batches(RECIPE, config, engine.mesh, 9, uneven=True))[0]


def of_averages(engine: Engine) -> Iterator[tuple[PieceKey, object]]:
    """The weights of an engine, to be filled with means."""
    for key, fill in pieces_to_load(engine, with_optimizer=False):
        yield key.of_kind("average"), fill


def begins_with_weights(engine: Engine, main: Kind) -> bool:
    """Whether every mean is the weight."""
    held = pieces(engine)
    return all(torch.equal(held[name, "average"], values) for (name, kind), values in held.items() if kind == main)


def run(rank: int, stage: int, dtype: str, folder: str) -> None:
    flags = ["--ema-decay", str(DECAY), dtype]
    engine, config = engine_of(stage, *flags)
    assert engine.averages is not None
    main: Kind = "master" if dtype == "--bf16" else "weight"
    mean = {name: values for (name, kind), values in pieces(engine).items() if kind == main}
    for step in range(3):
        train(engine, config, step)
        now = pieces(engine)
        for name, known in mean.items():
            known.lerp_(now[name, main], 1.0 - DECAY)
            assert torch.allclose(now[name, "average"], known, rtol=0, atol=1e-7), name
        if step == 1:
            save(Path(folder), 2, owned_pieces(engine), {}, engine.mesh)
    after = pieces(engine)

    # a resume
    resumed, _ = engine_of(stage, *flags)
    load(Path(folder) / "iter_0000002", pieces_to_load(resumed), resumed.mesh)
    refresh_weights(resumed, 2)
    train(resumed, config, 2)
    assert all(torch.equal(values, after[key]) for key, values in pieces(resumed).items())

    # an evaluation of the means, which leaves everything as it was
    trained = loss_of(engine, config)
    with engine.using_averages():
        averaged = loss_of(engine, config)
    assert averaged != trained == loss_of(engine, config)
    assert all(torch.equal(values, after[key]) for key, values in pieces(engine).items())
    save(Path(folder), 3, owned_pieces(engine, with_optimizer=False), {}, engine.mesh)
    reader, _ = engine_of(stage, dtype)
    load(Path(folder) / "iter_0000003", of_averages(reader), reader.mesh)
    refresh_weights(reader, None)
    assert loss_of(reader, config) == averaged

    # without the optimizer: the means of the checkpoint, or of its weights where it has none, or where they start anew
    restarted, _ = engine_of(stage, *flags)
    load(Path(folder) / "iter_0000003", pieces_to_load(restarted, with_optimizer=False), restarted.mesh)
    refresh_weights(restarted, None)
    with restarted.using_averages():
        assert loss_of(restarted, config) == averaged
    kept = pieces(restarted)
    assert all(torch.equal(kept[name, kind], after[name, kind]) for name in mean for kind in (main, "average"))
    refresh_weights(restarted, None, restarts_averages=True)
    assert begins_with_weights(restarted, main)
    save(Path(folder), 4, owned_pieces(reader, with_optimizer=False), {}, reader.mesh)
    without, _ = engine_of(stage, *flags)
    load(Path(folder) / "iter_0000004", pieces_to_load(without, with_optimizer=False), without.mesh)
    refresh_weights(without, None)
    assert begins_with_weights(without, main) and loss_of(without, config) == averaged
    assert owned_bytes(engine) == sum(values.nbytes for values in after.values())
    bare = pieces(engine, with_optimizer=False)
    assert {kind for _, kind in bare} == {main, "average"}
    assert owned_bytes(engine, with_optimizer=False) == sum(values.nbytes for values in bare.values())


@pytest.mark.parametrize(("stage", "dtype"), [(0, "--no-bf16"), (1, "--bf16"), (3, "--bf16")])
def test_means_of_weights(stage: int, dtype: str, tmp_path: Path) -> None:
    run_ranks(run, 1, stage, dtype, str(tmp_path))


def run_schedule_free(rank: int, runs: list[tuple[int, str]], folder: str) -> None:
    for stage, dtype in runs:
        place = Path(folder) / f"{stage}{dtype}"
        flags = ["--optimizer", "schedule-free", "--lr-decay-style", "constant", dtype]
        engine, config = engine_of(stage, *flags)
        main: Kind = "master" if dtype == "--bf16" else "weight"
        begun = pieces(engine)
        assert begins_with_weights(engine, main) and owned_bytes(engine) == sum(each.nbytes for each in begun.values())
        train(engine, config, 0)
        train(engine, config, 1)
        record = {"weight": engine.averaging_weight}
        save(place, 2, owned_pieces(engine), record, engine.mesh)
        assert record["weight"] == 2 * RECIPE.learning_rate**2
        train(engine, config, 2)
        after = pieces(engine)

        # a resume
        resumed, _ = engine_of(stage, *flags)
        assert load(place / "iter_0000002", pieces_to_load(resumed), resumed.mesh) == record
        refresh_weights(resumed, 2, averaging_weight=record["weight"])
        train(resumed, config, 2)
        assert all(torch.equal(values, after[key]) for key, values in pieces(resumed).items())
        assert resumed.averaging_weight == engine.averaging_weight

        # a resume with a parameter that was frozen until then: only what it was trained with counts
        rate, name = RECIPE.learning_rate**2, "decoder.final_layernorm.weight"
        thawed = FreezeSpec(frozenset(), frozenset({name}), {name: 2}, {name: record["weight"]})
        partly, _ = engine_of(stage, *flags, freezing=thawed)
        load(place / "iter_0000002", pieces_to_load(partly), partly.mesh)
        refresh_weights(partly, 2, averaging_weight=record["weight"])
        train(partly, config, 2)
        counted = {float(state["weight"]) for state in partly.optimizer.state.values()}
        assert sorted(counted) == pytest.approx([rate, 3 * rate], rel=1e-12)

        # an evaluation of the mean, which leaves everything as it was
        trained = loss_of(engine, config)
        with engine.using_averages():
            averaged = loss_of(engine, config)
        assert averaged != trained == loss_of(engine, config)
        assert all(torch.equal(values, after[key]) for key, values in pieces(engine).items())

        # without the optimizer: the mean is what training begins with
        save(place, 3, owned_pieces(engine, with_optimizer=False), {}, engine.mesh)
        assert owned_bytes(engine, with_optimizer=False) == 2 * owned_bytes(engine) // 4
        restarted, other = engine_of(stage, *flags)[0], engine_of(stage, dtype)[0]
        for each in (restarted, other):
            wanted = pieces_to_load(each, with_optimizer=False, starts_from_averages=True)
            load(place / "iter_0000003", wanted, each.mesh)
            refresh_weights(each, None)
            assert loss_of(each, config) == averaged
        assert begins_with_weights(restarted, main)


def test_the_mean_of_a_schedule_free_optimizer(tmp_path: Path) -> None:
    run_ranks(run_schedule_free, 1, [(0, "--no-bf16"), (1, "--bf16"), (3, "--bf16")], str(tmp_path))
