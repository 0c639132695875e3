"""Checkpoints of an earlier version load and resume with the same losses, in their own layout and in another.

`old_format/` says with `make_old_format.py` how they were made.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import find, verify
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.samples import sampled
from tests.helpers.tiny_run import TinyCorpus, steps, train_here

FOLDER = Path(__file__).parent
KNOWN: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
CASES: dict[str, dict[str, Any]] = KNOWN["cases"]
# How far a loss may be off in another layout, or on another machine, relative to the loss.
FP32_RATIO, BF16_RATIO = 1e-6, 1e-3
# How far it may be off in the same layout on the machine of the fixture: the program that made it rounded the mean over
# micro-batches to float32. Gradient norms, which show the training itself, must be equal to the last bit.
LAST_BIT_RATIO = 2.0**-24


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked fixture: `corpus/` and a checkpoint directory per case."""
    folder = tmp_path_factory.mktemp("old_format")
    with tarfile.open(FOLDER / "runs.tar.xz") as archive:
        # before Python 3.11.4 there are no filters
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


def train_all(rank: int, runs: Sequence[tuple[int, list[str]]]) -> list[tuple[int, str]]:
    """Runs the program once per (port, flags) in the same processes."""
    outcomes = []
    for port, flags in runs:
        os.environ["MASTER_PORT"] = str(port)
        outcomes.append(train_here(rank, flags))
    return outcomes


def resume_all(stored: Path, work: Path, wanted: Sequence[tuple[str, dict[str, int]]], world_size: int) -> list[Path]:
    """Resumes each (case, layout) and trains to the end; returns the folders with the logs.

    ZeRO 3 must come last: DeepSpeed then exchanges torch's linear function for the rest of the process.
    """
    stages = [layout["zero_stage"] == 3 for _, layout in wanted]
    assert stages == sorted(stages)
    corpus_folder = stored / "corpus"
    corpus = TinyCorpus(
        corpus_folder,
        str(corpus_folder / "tiny_text_document"),
        str(corpus_folder / "demo-vocab.json"),
        str(corpus_folder / "demo-merges.txt"),
    )
    folders, runs = [], []
    for number, (case, layout) in enumerate(wanted):
        folder = work / f"{number}-{case}"
        shutil.copytree(stored / case, folder / "checkpoints")
        changes = {**KNOWN["shape"], **layout, "save": None, "save_interval": None}
        runs.append((free_port(), corpus.flags(*CASES[case]["flags"], folder=folder, **changes)))
        folders.append(folder)
    for outcomes in run_ranks(train_all, world_size, runs, timeout_seconds=300):
        assert outcomes == [(0, "")] * len(runs)
    return folders


def machine() -> list[str]:
    """What the last bits of a sum depend on; the fixture says where it was made."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), model]


def check_losses(folder: Path, case: str, *, exactly: bool) -> None:
    """Compares the steps after the resume with those recorded by the earlier program."""
    logged = steps(folder, "lm_loss", "gradient_norm")
    first = KNOWN["saved_at"] + 1
    assert sorted(logged) == list(range(first, KNOWN["shape"]["train_iters"] + 1))
    is_bf16 = "--bf16" in CASES[case]["flags"]
    for step, (loss, norm) in enumerate(CASES[case]["losses"], start=first):
        if exactly and not is_bf16:  # half-precision products have since been rounded elsewhere
            assert logged[step][0] == pytest.approx(loss, rel=LAST_BIT_RATIO), (case, step)
            assert logged[step][1] == norm, (case, step)
            continue
        assert logged[step][0] == pytest.approx(loss, rel=BF16_RATIO if is_bf16 else FP32_RATIO), (case, step)
        assert logged[step][1] == pytest.approx(norm, rel=2e-2 if is_bf16 else 1e-4), (case, step)


@pytest.mark.parametrize("case", CASES)
def test_every_stored_byte_is_valid(case: str, stored: Path) -> None:
    (candidate,) = find(stored / case)
    manifest = verify(candidate.path)
    assert manifest.step == KNOWN["saved_at"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sampled([1, 2, 4], [1, 4]))
def test_an_old_checkpoint_resumes_in_its_own_layout(world_size: int, stored: Path, tmp_path: Path) -> None:
    own = [(case, known["layout"]) for case, known in CASES.items() if known["world_size"] == world_size]
    own.sort(key=lambda pair: pair[1]["zero_stage"])
    for folder, (case, _) in zip(resume_all(stored, tmp_path, own, world_size), own, strict=True):
        check_losses(folder, case, exactly=machine() == KNOWN["machine"])


PLAIN, TP2 = CASES["plain_fp32"]["layout"], CASES["tp2_fp32"]["layout"]
PP2, DP2_ZERO3 = CASES["pp2_fp32"]["layout"], CASES["dp2_zero3_fp32"]["layout"]
ELSEWHERE: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("tp2_pp2_zero1_fp32", PLAIN), ("dp2_zero3_fp32", PLAIN), ("dp2_zero2_bf16", PLAIN)],
    2: [
        ("plain_fp32", TP2),
        ("pp2_fp32", TP2),
        ("plain_bf16", PP2),
        ("tp2_fp32", DP2_ZERO3),
        ("tp2_pp2_zero1_bf16", DP2_ZERO3),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sampled(ELSEWHERE, [2]))
def test_an_old_checkpoint_resumes_in_another_layout(world_size: int, stored: Path, tmp_path: Path) -> None:
    wanted = ELSEWHERE[world_size]
    for folder, (case, _) in zip(resume_all(stored, tmp_path, wanted, world_size), wanted, strict=True):
        check_losses(folder, case, exactly=False)
