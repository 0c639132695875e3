"""Training through the engine with compiled and with torch's operations, on each device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.kernels.native.library import Library
from tests.helpers import tiny_run
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus
from tests.kernels.devices.checks import DEVICES

ROOT = Path(__file__).resolve().parents[3]
GPT = ("--hidden-dropout", "0.1", "--attention-dropout", "0")
LLAMA = (
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--activation-function", "silu", "--gated-linear-unit", "--no-add-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--bf16"),
)
# Attention of packed documents has a form of its own on each device: on a GPU torch's variable-length one.
DOCUMENTS = (*GPT, "--bf16", "--reset-attention-mask", "--reset-position-ids", "--num-query-groups", "1")
HALF = (*GPT, "--fp16", "--initial-loss-scale", "4096")
NETWORKS = [
    *(pytest.param(GPT, 2e-6, id="gpt"), pytest.param(LLAMA, 3e-3, id="llama")),
    pytest.param(DOCUMENTS, 3e-3, id="documents"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def _start(words: Sequence[str], device: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment |= {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    command = [sys.executable, "pretrain_gpt.py", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _train(words: Sequence[str], device: str) -> None:
    if device == "cpu":
        assert tiny_run.train(words) == (0, "")
        return
    with _start(words, device) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed[-3000:]


def _losses(corpus: TinyCorpus, folder: Path, device: str, flags: tuple[str, ...]) -> dict[int, float]:
    words = corpus.flags(*flags, train_iters=5, eval_iters=0, run_dir=folder / "run", split="100,0,0")
    _train(words, device)
    return tiny_run.losses(folder)


def _check_parity(corpus: TinyCorpus, folder: Path, device: str, flags: tuple[str, ...], tolerance: float) -> None:
    expected, found = (
        _losses(corpus, folder / name, device, (*flags, "--kernels", name)) for name in ("torch", "csrc")
    )
    assert list(found) == list(expected) == [1, 2, 3, 4, 5]
    for step, loss in expected.items():
        assert math.isfinite(loss) and found[step] == pytest.approx(loss, rel=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("flags", "tolerance"), NETWORKS)
def test_losses_do_not_depend_on_the_kernels(
    compiled: Library,
    corpus: TinyCorpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    flags: tuple[str, ...],
    tolerance: float,
) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", str(compiled.folder))
    _check_parity(corpus, tmp_path, device, flags, tolerance)


@pytest.mark.gpu  # on the CPU DeepSpeed refuses float16
def test_losses_in_float16_do_not_depend_on_the_kernels(
    compiled: Library, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", str(compiled.folder))
    _check_parity(corpus, tmp_path, "cuda", HALF, 3e-3)
