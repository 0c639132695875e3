"""`pretrain_prefix_lm.py` and `finetune_t0_non_causal_decoder.py` with upstream's commands: trained, resumed, loaded.

What is asserted is that of upstream's `test_training_prefix_lm_all`, `test_training_t0` and `test_mode2_dataloading`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import finetune_t0_non_causal_decoder
import pretrain_gpt
import pretrain_prefix_lm
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import MegatronError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, steps, write_tiny_corpus

pytestmark = pytest.mark.full

PROGRAMS = {
    "gpt": pretrain_gpt.main,
    "prefix": pretrain_prefix_lm.main,
    "pairs": finetune_t0_non_causal_decoder.main,
}
FIELDS = ("lm_loss", "gradient_norm", "consumed_samples")
CALM = {"global_batch_size": 2, "train_iters": 4, "save_interval": 2, "eval_iters": 1}
COMBINATIONS = list(itertools.product((False, True), repeat=2))
TWO_RANKS = ("--tensor-model-parallel-size", "2")
ALIBI = ("--position-embedding-type", "alibi", "--loss-on-targets-only")


def run_programs(rank: int, commands: Sequence[tuple[str, list[str]]]) -> list[tuple[int, str]]:
    """Runs one program after the other in this process; exit code of each and what it wrote."""
    results = []
    for name, flags in commands:
        written = io.StringIO()
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            try:
                code, text = int(PROGRAMS[name](flags)), ""
            except MegatronError as failure:
                code, text = int(failure.exit_code), str(failure)
        results.append((code, written.getvalue() + text))
    return results


def run_well(commands: Sequence[tuple[str, list[str]]], world_size: int = 1) -> list[str]:
    """What the first rank wrote for each program, all of which must succeed."""
    results = run_ranks(run_programs, world_size, commands)
    for code, text in results[0]:
        assert code == 0, text
    return ["".join(texts) for texts in zip(*([text for _, text in rank] for rank in results), strict=True)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    corpus = write_tiny_corpus(tmp_path_factory.mktemp("corpus"))
    drawn = np.random.default_rng(1)
    sizes = drawn.integers(3, 12, (60, 2))
    for part, field in enumerate(("inputs", "targets")):
        with IndexedWriter(corpus.folder / f"news_{field}_document", np.uint16) as writer:
            for number, pair in enumerate(sizes):
                writer.add_document([(7 * number + np.arange(pair[part])) % 300])
    return corpus


def _pairs(corpus: TinyCorpus, *more: str, folder: Path | None = None, **changes: object) -> list[str]:
    return corpus.flags(*ALIBI, *more, folder=folder, **{**CALM, "data_path": corpus.folder / "news", **changes})


def _combination(targets: bool, weights: bool) -> list[str]:
    return [
        *(["--loss-on-targets-only"] if targets else []),
        *(["--reweight-loss-based-on-position-frequency"] if weights else []),
    ]


@dataclass(frozen=True)
class Ran:
    """Programs that ran in one process: their folder, and what each start wrote, by its place there."""

    folder: Path
    texts: dict[Path, list[str]]


@pytest.fixture(scope="module")
def ran(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every program run without interruption and in two parts."""
    folder = tmp_path_factory.mktemp("ran")
    commands: list[tuple[str, list[str]]] = []
    for targets, weights in COMBINATIONS:
        flags = [*_combination(targets, weights), "--reset-attention-mask", "--log-level", "debug"]
        place = folder / f"{targets}-{weights}"
        commands += [("prefix", corpus.flags(*flags, folder=place / "cut", exit_interval=2, **CALM))]
        commands += [("prefix", corpus.flags(*flags, folder=place / "cut", **CALM))]
    flags = corpus.flags(*_combination(True, True), "--reset-attention-mask", folder=folder / "whole", **CALM)
    commands += [("prefix", flags)]
    commands += [("pairs", _pairs(corpus, folder=folder / "pairs" / "whole"))]
    commands += [("pairs", _pairs(corpus, folder=folder / "pairs" / "cut", exit_interval=2))]
    commands += [("pairs", _pairs(corpus, folder=folder / "pairs" / "cut"))]
    base = {**CALM, "train_iters": 2}
    commands += [("gpt", corpus.flags(*ALIBI[:2], "--bf16", folder=folder / "base", **base))]
    texts: dict[Path, list[str]] = {}
    for (_, flags), text in zip(commands, run_well(commands), strict=True):
        texts.setdefault(Path(flags[flags.index("--save") + 1]).parent, []).append(text)
    return Ran(folder, texts)


@pytest.mark.full
@pytest.mark.parametrize(("targets", "weights"), COMBINATIONS)
def test_prefix_training_saves_and_resumes(ran: Ran, targets: bool, weights: bool) -> None:
    place = ran.folder / f"{targets}-{weights}" / "cut"
    check_two_starts(ran, place)
    for text in ran.texts[place]:
        assert ("Using loss reweighting" in text) is weights
    assert sorted(losses(place)) == [1, 2, 3, 4]


def check_two_starts(ran: Ran, place: Path) -> None:
    """Checks what upstream's tests look for in the output of a start and of its resumption."""
    first, second = ran.texts[place]
    for text in (first, second):
        for words in ("DeepSpeed info", "consumed samples", "successfully saved checkpoint at iteration"):
            assert words in text
    assert f"Unable to find latest file at {place}/checkpoints/latest" in first
    assert f"successfully loaded checkpoint from {place}/checkpoints" in second


def test_a_resumed_run_has_the_same_prefixes(ran: Ran) -> None:
    assert steps(ran.folder / "True-True" / "cut", *FIELDS) == steps(ran.folder / "whole", *FIELDS)


def test_weights_change_what_is_learned_and_not_what_is_logged(ran: Ran) -> None:
    first = {pair: steps(ran.folder / f"{pair[0]}-{pair[1]}" / "cut", *FIELDS)[1] for pair in COMBINATIONS}
    for targets in (False, True):
        assert first[targets, False][0] == first[targets, True][0]
        assert first[targets, False][1] != first[targets, True][1]
    assert first[False, False][0] != first[True, False][0]


def test_multitask_fine_tuning_resumes_as_if_it_had_not_stopped(ran: Ran) -> None:
    place = ran.folder / "pairs"
    check_two_starts(ran, place / "cut")
    assert steps(place / "cut", *FIELDS) == steps(place / "whole", *FIELDS)
    curve = losses(place / "whole")
    assert sorted(curve) == [1, 2, 3, 4] and curve[4] < curve[1]


def test_fine_tuning_from_a_causal_checkpoint_in_another_layout(corpus: TinyCorpus, ran: Ran, tmp_path: Path) -> None:
    base, tuned = ran.folder / "base" / "checkpoints", tmp_path / "tuned"
    flags = _pairs(corpus, "--bf16", "--finetune", *TWO_RANKS, folder=tuned, load=base, train_iters=2)
    assert f"finetuning the weights of {base}/iter_0000002 from iteration 0" in run_well([("pairs", flags)], 2)[0]
    changes = {**CALM, "load": tuned / "checkpoints", "train_iters": 2}
    prefix = corpus.flags(*ALIBI, "--bf16", "--finetune", folder=tmp_path / "prefix", **changes)
    run_well([("prefix", prefix)])
    for place in (tuned, tmp_path / "prefix"):
        assert sorted(losses(place)) == [1, 2]


def test_ranged_groups_of_data(corpus: TinyCorpus, tmp_path: Path) -> None:
    news, text = corpus.folder / "news", corpus.prefix
    commands = []
    for name, source, flags in (("prefix", text, []), ("pairs", str(news), list(ALIBI[:2]))):
        groups = [
            "--train-weighted-split-paths",
            f"TRAIN: 1 0:0.9 {source}, 0.3 0:0.8 {source}",
            "--valid-weighted-split-paths",
            f"VALID1: 1 0.9:0.98 {source}, 0.3 0.8:0.95 {source}",
            f"VALID2: 0.5 0.9:0.95 {source}, 0.5 0.85:1 {source}",
        ]
        changes = {**CALM, "data_path": None, "split": None, "train_iters": 2}
        commands.append((name, corpus.flags(*flags, *groups, folder=tmp_path / name, **changes)))
    for (name, _), text in zip(commands, run_well(commands), strict=True):
        assert sorted(losses(tmp_path / name)) == [1, 2]
        assert all(f"{group} loss at the end of training" in text for group in ("VALID1", "VALID2"))
