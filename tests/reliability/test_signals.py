"""Real processes under a real launcher, killed or stopped by signals.

Nothing saved is lost, and the same run continues.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.errors import ExitCode
from megatron.observe.metrics_file import read_steps
from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train, write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(world_size: int, flags: Sequence[str]) -> list[str]:
    port = str(free_port())
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(world_size),
        "--master_port",
        port,
    ]
    return [*launcher, "pretrain_gpt.py", *flags]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Returns when a run has logged a step."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    path = folder / "run" / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and max(read_steps(path), default=0) >= step:
            return
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before step {step}:\n{process.communicate()[0]}")
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


def ranks_of(folder: Path) -> list[int]:
    """Running processes whose command line contains a run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if any(str(folder).encode() in word for word in words) and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc to see the ranks")
def test_ranks_of_a_killed_launcher_end_and_the_run_resumes(corpus: TinyCorpus, tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1, "attention_dropout": 0, "train_iters": 4000}
    flags = corpus.flags(folder=tmp_path, lr_decay_iters=100, lr_warmup_fraction=None, **layout)
    process = start(torchrun(2, flags))
    wait_for_step(tmp_path, 6, process)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any((tmp_path / "checkpoints").glob("iter_*")):  # written in the background
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(120)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks_of(tmp_path) == []
    before = losses(tmp_path)
    last_saved = max(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert last_saved >= 4
    stop_at = max(before)
    layout.update(tensor_model_parallel_size=1, train_iters=4000)
    resumed = corpus.flags(
        folder=tmp_path, lr_decay_iters=100, lr_warmup_fraction=None, exit_interval=stop_at + 1, **layout
    )
    assert train(resumed) == (0, "")
    after = losses(tmp_path)
    repeated = [step for step in before if step > last_saved]
    for step in repeated:
        assert after[step] == pytest.approx(before[step], rel=1e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_and_requests_a_requeue(corpus: TinyCorpus, tmp_path: Path, number: signal.Signals) -> None:
    flags = corpus.flags(
        folder=tmp_path, train_iters=4000, save_interval=4000, lr_decay_iters=100, lr_warmup_fraction=None
    )
    process = start([forking_python(), "pretrain_gpt.py", *flags])
    wait_for_step(tmp_path, 2, process)
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == ExitCode.REQUEUE, text
    assert number.name in text
    last = max(losses(tmp_path))
    assert (tmp_path / "checkpoints" / f"iter_{last:07d}").is_dir()


def test_a_signal_to_one_rank_stops_all_at_the_same_step(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(
        folder=tmp_path,
        train_iters=4000,
        save_interval=4000,
        lr_decay_iters=100,
        lr_warmup_fraction=None,
        tensor_model_parallel_size=2,
    )
    process = start(torchrun(2, flags))
    wait_for_step(tmp_path, 2, process)
    rank = next(number for number in ranks_of(tmp_path) if number != process.pid)
    os.kill(rank, signal.SIGTERM)
    text, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0
    assert "successfully saved checkpoint" in text
    last = max(losses(tmp_path))
    assert (tmp_path / "checkpoints" / f"iter_{last:07d}").is_dir(), text


def test_a_second_job_on_the_same_folder_is_rejected(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(folder=tmp_path, train_iters=4000, lr_decay_iters=100, lr_warmup_fraction=None)
    process = start([sys.executable, "pretrain_gpt.py", *flags])
    try:
        wait_for_step(tmp_path, 1, process)
        code, text = train(corpus.flags(folder=tmp_path, run_dir=tmp_path / "second"))
        assert code == ExitCode.USAGE
        assert str(process.pid) in text
    finally:
        process.kill()
        process.wait()
    assert train(corpus.flags(folder=tmp_path, train_iters=8, lr_decay_iters=100, exit_interval=1))[0] == 0


def test_a_damaged_newest_checkpoint_falls_back_to_an_older_one(corpus: TinyCorpus, tmp_path: Path) -> None:
    assert train(corpus.flags(folder=tmp_path))[0] == 0
    before = steps(tmp_path, "lm_loss")
    victim = next((tmp_path / "checkpoints" / "iter_0000008").glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert train(corpus.flags(folder=tmp_path))[0] == 0
    assert steps(tmp_path, "lm_loss") == before


@pytest.mark.full
def test_no_compiler_and_no_ninja_are_needed(corpus: TinyCorpus, tmp_path: Path) -> None:
    built = tmp_path / "extensions"
    surroundings = {**environment(), "PATH": str(tmp_path / "empty"), "TORCH_EXTENSIONS_DIR": str(built)}
    flags = corpus.flags(folder=tmp_path, train_iters=1, lr_warmup_fraction=None)
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not built.exists() or not any(built.rglob("*"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc to see the ranks")
def test_a_dead_rank_is_a_one_sentence_error_on_the_others(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(
        folder=tmp_path, train_iters=4000, lr_decay_iters=100, lr_warmup_fraction=None, tensor_model_parallel_size=2
    )
    port = str(free_port())
    processes = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [forking_python(), "pretrain_gpt.py", *flags],
                cwd=ROOT,
                env={**environment(), **variables, "MASTER_ADDR": "127.0.0.1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    wait_for_step(tmp_path, 2, processes[0])
    processes[1].kill()
    text, _ = processes[0].communicate(timeout=PATIENCE_SECONDS)
    processes[1].communicate()
    assert processes[0].returncode == ExitCode.REQUEUE, text
    assert re.search(r"\[rank 1\] error: rank 1 \(process \d+ on .*\) ended without a message", text), text
    assert "Traceback" not in text
