"""Training through the engine with compiled and with torch's operations, on each device."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def _losses(corpus: TinyCorpus, folder: Path, device: str, flags: tuple[str, ...]) -> dict[int, float]:
    words = corpus.flags(*flags, train_iters=5, eval_iters=0, run_dir=folder / "run", split="100,0,0")
    if device == "cpu":
        assert tiny_run.train(words) == (0, "")
    else:
        environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
        command = [sys.executable, "pretrain_gpt.py", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return tiny_run.losses(folder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("flags", "tolerance"), [(GPT, 2e-6), (LLAMA, 3e-3)], ids=["gpt", "llama"])
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
    expected, found = (
        _losses(corpus, tmp_path / name, device, (*flags, "--kernels", name)) for name in ("torch", "csrc")
    )
    assert list(found) == list(expected) == [1, 2, 3, 4, 5]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=tolerance)
