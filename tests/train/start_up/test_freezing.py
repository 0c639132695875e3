"""Runs with --freeze: what they leave alone, what their checkpoints hold, and how they continue with other patterns."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import read_tensors
from megatron.checkpoint.manifest import read_manifest
from megatron.config import FinetuningConfig, LoadingConfig
from megatron.errors import ConfigError
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.engine_opening import check_patterns, find_freezing
from tests.checkpoint.made.records import make_record
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train, train_here, write_tiny_corpus

BOTTOM = ("--freeze", "embedding.*", "decoder.layers.0.*")
MORE = (*BOTTOM, "decoder.layers.1.mlp.*")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained network, and a fine-tuning of it with frozen weights, both of eight steps."""
    folder = tmp_path_factory.mktemp("base")
    assert train(corpus.flags(folder=folder / "pretrained")) == (0, "")
    assert train(tuned(corpus, folder, *BOTTOM)) == (0, "")
    return folder


def tuned(corpus: TinyCorpus, folder: Path, *more: str, **changes: Any) -> list[str]:
    own = folder / "tuned"
    settings = {"save": own / "checkpoints", "load": folder / "pretrained" / "checkpoints", "run_dir": own / "run"}
    return corpus.flags("--finetune", *more, **{**settings, "save_interval": 4, "lr": 1e-3, **changes})


def tensors(folder: Path, step: int, kind: Any = "weight") -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"iter_{step:07d}"
    names = sorted({run.key.name for run in read_manifest(path).catalogue.runs if run.key.kind == kind})
    return {name: values.clone() for name, values in read_tensors(path, names, kind)}


def is_bottom(name: str) -> bool:
    return name.startswith(("embedding.", "decoder.layers.0."))


def test_frozen_weights_keep_every_bit_and_the_checkpoint_holds_no_moments_of_them(base: Path) -> None:
    before, after = tensors(base / "pretrained", 8), tensors(base / "tuned", 8)
    assert before.keys() == after.keys()
    assert {name for name in after if torch.equal(before[name], after[name])} == set(filter(is_bottom, after))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert tensors(base / "tuned", 8, kind).keys() == {name for name in after if not is_bottom(name)}


def train_and_listen(rank: int, flags: list[str]) -> tuple[tuple[int, str], str]:
    """Runs the program on one rank; also returns what it wrote to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return train_here(rank, flags), said.getvalue()


def continued(corpus: TinyCorpus, base: Path, folder: Path, *more: str, world_size: int = 1, **changes: Any) -> str:
    """Continues the fine-tuning from its fourth step in a copy of its folder; returns what the first rank said."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "tuned" / "checkpoints" / "iter_0000008")
    ranks = run_ranks(train_and_listen, world_size, tuned(corpus, folder, *more, **changes))
    assert all(outcome == (0, "") for outcome, _ in ranks)
    return str(ranks[0][1])


def test_it_continues_bit_by_bit_with_the_same_patterns(
    corpus: TinyCorpus, base: Path, tmp_path: Path, capfd: Any
) -> None:
    log = continued(corpus, base, tmp_path, *BOTTOM)
    assert "trained parameters: 1" in log and "the others are frozen (--freeze)" in log
    expected, found = tensors(base / "tuned", 8), tensors(tmp_path / "tuned", 8)
    assert all(torch.equal(values, found[name]) for name, values in expected.items())
    assert "moments start from zero" not in log


def test_more_may_be_frozen_at_a_resume(corpus: TinyCorpus, base: Path, tmp_path: Path) -> None:
    log = continued(corpus, base, tmp_path, *MORE, world_size=2, tensor_model_parallel_size=2)
    then, now = (" ".join(flags[1:]) for flags in (BOTTOM, MORE))
    assert f"--freeze changed from {then} in the checkpoint to {now}." in log
    half, after = tensors(base / "tuned", 4), tensors(tmp_path / "tuned", 8)
    stayed = {name for name in after if torch.equal(half[name], after[name])}
    assert stayed == {name for name in after if is_bottom(name) or ".mlp." in name}
    assert not any(".mlp." in name for name in tensors(tmp_path / "tuned", 8, "exp_avg"))


def test_what_is_no_longer_frozen_begins_with_moments_of_zero(
    corpus: TinyCorpus, base: Path, tmp_path: Path, capfd: Any
) -> None:
    layout = {"pipeline_model_parallel_size": 2, "zero_stage": 1}
    log = continued(corpus, base, tmp_path, "--freeze", "embedding.*", world_size=2, **layout)
    assert "12 parameters that were frozen are trained from here on (decoder.layers.0." in log
    assert "their moments start from zero" in log
    after, moments = tensors(tmp_path / "tuned", 8), tensors(tmp_path / "tuned", 8, "exp_avg")
    assert moments.keys() == {name for name in after if not name.startswith("embedding.")}
    record = read_manifest(tmp_path / "tuned" / "checkpoints" / "iter_0000008").record
    assert record["began_at"] == {name: 4 for name in sorted(after) if name.startswith("decoder.layers.0.")}
    assert record["optimizer_updates"] == 8


def test_what_is_trained_again_keeps_what_iterates_counted_before(capfd: Any) -> None:
    """The mean of a schedule-free optimizer takes none of them for a parameter that stood still."""
    model, mesh = tiny_config(), ParallelMesh.single()
    record = make_record(
        config={"finetuning": {"freeze": ["decoder.layers.0.*"]}},
        averaging_weight=0.5,
        began_at={name: 2 for name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")},
        averaged_from={"decoder.final_layernorm.weight": 0.125},
    )
    freezing = find_freezing(
        FinetuningConfig(), LoadingConfig(load=Path("folder")), network_layers(model, mesh), mesh, record
    )
    weights = dict(freezing.averaged_from)
    assert weights.pop("decoder.final_layernorm.weight") == 0.125
    assert set(weights) == freezing.thawed and set(weights.values()) == {0.5}
    assert set(freezing.as_of(3, 0.25).averaged_from.values()) == {0.125, 0.25}


def test_patterns_are_checked_against_the_names_of_the_network_alone() -> None:
    check_patterns(FinetuningConfig(freeze=("embedding.*",)), tiny_config())
    heads = FinetuningConfig(freeze=("output_layer.lm_head.*",))
    check_patterns(heads, tiny_config(bidirectional=True, masked_lm_head=True))
    for wrong, name in ((FinetuningConfig(freeze=("decoder.layer.0",)), "decoder.layer.0"), (heads, heads.freeze[0])):
        with pytest.raises(ConfigError, match=re.escape(f"--freeze '{name}' matches none of the")):
            check_patterns(wrong, tiny_config())
