"""Distillation from flags to losses: a teacher of another shape, in every kind of layout, interrupted and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import find
from megatron.checkpoint.manifest import read_manifest
from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.objective.distillation import DistillationObjective
from megatron.observe.metrics_file import read_steps
from megatron.train.build import open_run
from megatron.train.callbacks.distillation import teacher_problems
from tests.config.command_lines import small
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train_here, write_tiny_corpus

FACTS = ("lm_loss", "distillation_loss")
STUDENT = {"num_layers": 2, "hidden_size": 16, "hidden_dropout": 0, "attention_dropout": 0, "train_iters": 6}


def train_all(rank: int, commands: Sequence[list[str]]) -> list[tuple[int, str]]:
    """Runs one command after the other in the same processes."""
    return [train_here(rank, command) for command in commands]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def student(corpus: TinyCorpus, folder: Path, *more: str, **changes: Any) -> list[str]:
    """A student of the teacher in the folder of the corpus."""
    flags = {"load_teacher": corpus.folder / "teacher", "kd_temp": 2.0, "kd_beta_ce": 5.0, "eval_interval": 2}
    return corpus.flags("--kd", *more, folder=folder, **{**STUDENT, **flags, "save_interval": 3, **changes})


def digest(folder: Path) -> str:
    """Of every file of a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def whole(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process; before it, the teacher is trained, and after it, what cannot be taught is refused."""
    folder = tmp_path_factory.mktemp("whole")
    teacher = {"save": corpus.folder / "teacher", "save_interval": 8, "run_dir": folder / "teacher", "num_layers": 3}
    copied = {"num_layers": 3, "hidden_size": 32, "train_iters": 20, "kd_alpha_ce": 0, "kd_beta_ce": 1, "eval_iters": 0}
    notes = folder / "notes"
    notes.mkdir()
    (notes / "read.me").touch()
    refused = {
        "no checkpoint in": {"load_teacher": notes},
        "--num-layers-teacher is 4, but the teacher": {"num_layers_teacher": 4},
        "has a vocabulary of 600, this network of 640": {"vocab_size": 640},
        "has 32 positions, less than --seq-length 40": {"seq_length": 40, "max_position_embeddings": 40},
    }
    commands = [
        corpus.flags(**teacher),
        student(corpus, folder),
        student(corpus, folder / "copy", **copied),
        student(corpus, folder / "prefix", "--objective", "prefix", train_iters=2),
        *(student(corpus, folder / "refused", **changes) for changes in refused.values()),
    ]
    (results,) = run_ranks(train_all, 1, commands)
    assert results[:4] == [(0, "")] * 4
    for (code, text), sentence in zip(results[4:], refused, strict=True):
        assert code != 0 and sentence in text
    return folder


@pytest.mark.full
def test_every_layout_learns_the_same_and_a_resume_goes_on(corpus: TinyCorpus, whole: Path, tmp_path: Path) -> None:
    before = digest(corpus.folder / "teacher")
    split, replicas, staged = (tmp_path / name for name in ("split", "replicas", "staged"))
    stages = {"pipeline_model_parallel_size": 2}
    commands = [
        student(corpus, split, tensor_model_parallel_size=2, zero_stage=1, exit_interval=3),
        student(corpus, split, **stages),
        student(corpus, replicas, zero_stage=3),
        student(corpus, staged, "--mos", "--no-kd", kd_iters=3, pipeline_engine="deepspeed", **stages),
    ]
    assert all(results == [(0, "")] * 4 for results in run_ranks(train_all, 2, commands))
    expected = steps(whole, *FACTS)
    assert sorted(expected) == list(range(1, 7)) and all(divergence > 0 for _, divergence in expected.values())
    for folder in (split, replicas):
        found = steps(folder, *FACTS)
        assert sorted(found) == sorted(expected)
        for step in expected:
            assert found[step] == pytest.approx(expected[step], rel=1e-4)
    found = {step: losses(staged)[step] for step in range(1, 7)}
    assert [found[step] for step in (1, 2, 3, 4)] == pytest.approx(
        [expected[step][0] for step in (1, 2, 3, 4)], rel=1e-4
    )
    assert abs(found[6] - expected[6][0]) > 1e-3
    later = {step: record.get("distillation_loss") for step, record in read_steps(staged / "run").items()}
    assert [value is None for value in later.values()] == [False] * 3 + [True] * 3
    assert digest(corpus.folder / "teacher") == before


def test_a_student_approaches_its_teacher(whole: Path) -> None:
    divergences = [divergence for _, divergence in steps(whole / "copy", *FACTS).values()]
    assert divergences[-1] < divergences[0] / 4
    assert losses(whole / "copy")[20] < losses(whole / "copy")[1]


def test_a_checkpoint_holds_the_student_alone(whole: Path) -> None:
    newest = find(whole / "checkpoints")[0]
    names = read_manifest(newest.path).catalogue.names()
    assert len({name for name in names if name.startswith("decoder.layers.")}) == 2 * 12
    assert not any(name.startswith("decoder.layers.2.") for name in names)


@pytest.mark.parametrize(
    ("teacher", "flags", "sentence"),
    [
        ({"num_attention_heads": 3, "hidden_size": 48}, "", "cannot be split like this run: 3 attention heads"),
        (
            {"num_attention_heads": 2},
            "--ds-sequence-parallel-size 2 --seq-length 32 --num-attention-heads 4",
            "cannot be split like this run: 2 attention heads cannot be split over 4 ranks",
        ),
        ({"ffn_hidden_size": 99}, "", "cannot be split like this run: --ffn-hidden-size 99"),
        ({"bidirectional": True}, "", "is an encoder, which does not predict next tokens"),
        ({}, "--num-experts-teacher 4", "--num-experts-teacher is 4, but the teacher t has 1"),
        ({}, "", None),
    ],
)
def test_a_teacher_that_does_not_fit(teacher: dict[str, Any], flags: str, sentence: str | None) -> None:
    request = small(f"--kd --load-teacher t --tensor-model-parallel-size 2 {flags}")
    config = resolve(request, Machine("cpu", 4, False, True), TokenizerFacts(101, 0, "f"))
    problems = list(teacher_problems(tiny_config(max_position_embeddings=32, **teacher), config, Path("t")))
    assert len(problems) == (sentence is not None) and (sentence or "") in "".join(problems)


def test_nothing_of_the_teacher_is_trained(corpus: TinyCorpus, whole: Path, tmp_path: Path) -> None:
    def weights(network: torch.nn.Module) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in network.parameters()]

    with open_run(parse(student(corpus, tmp_path))) as (run, _):
        assert isinstance(run.engine.objective, DistillationObjective)
        teacher = run.engine.objective.teacher
        assert teacher is not None
        before = weights(teacher.network), weights(run.engine.stack)
        run.engine.train_batch(run.train_batches(), 1e-2)
        after = weights(teacher.network), weights(run.engine.stack)
        optimized = {id(parameter) for group in run.engine.optimizer.param_groups for parameter in group["params"]}
    assert all(map(torch.equal, before[0], after[0])) and not any(map(torch.equal, before[1], after[1]))
    assert optimized and not optimized.intersection(map(id, teacher.network.parameters()))
