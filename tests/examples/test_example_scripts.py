"""The scripts of examples/: their commands are the trainer's, from any folder and at every size; some really train."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.config import Machine, RunRequest, TokenizerFacts, parse, resolve
from megatron.observe.metrics_file import read_steps
from tests.helpers.programs import forking_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# The processes that a script is written for, all nodes together, and those of SCALE=tiny.
RANKS = {
    "pretrain_gpt_tiny.sh": (1, 1),
    "pretrain_gpt.sh": (1, 1),
    "pretrain_gpt_single_node.sh": (2, 2),
    "pretrain_gpt_distributed.sh": (8, 4),
    "pretrain_gpt_distributed_with_mp.sh": (8, 4),
    "pretrain_llama.sh": (8, 4),
    "pretrain_gpt_multilingual.sh": (2, 2),
    "pretrain_gpt_1t.sh": (3072, 4),
}
SHELL_FILES = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("examples", "tests") for path in (ROOT / folder).rglob("*.sh")
)
MANY_CASES = 10_000


def printed(script: str, folder: Path, *flags: str, **variables: str) -> list[str]:
    """The words of the command that a script would start."""
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


def processes(words: list[str]) -> int:
    """How many processes a launcher's command starts on all nodes."""
    value = dict(itertools.pairwise(words))
    each = value.get("--nproc-per-node") or value.get("--num_gpus") or "1"
    return int(each) * int(value.get("--nnodes", "1"))


def checked(words: list[str], device_type: str) -> RunRequest:
    """The request of a trainer's command, which also resolves on its ranks."""
    start = next(place for place, word in enumerate(words) if word.endswith("pretrain_gpt.py")) + 1
    request = parse(words[start:])
    machine = Machine(device_type, processes(words), supports_fp16=device_type == "cuda", supports_bf16=True)
    resolve(request, machine, TokenizerFacts(4000, 0, "fingerprint"))
    return request


@pytest.mark.parametrize("script", RANKS)
def test_a_script_starts_what_the_trainer_understands(script: str, tmp_path: Path) -> None:
    full, tiny = RANKS[script]
    words = printed(script, tmp_path, "--exit-interval", "3")
    request = checked(words, "cuda")
    assert processes(words) == full
    assert request.stopping.exit_interval == 3, "further flags are passed on"
    assert request.loading.load == request.saving.save, "a second start goes on"
    small = printed(script, tmp_path, SCALE="tiny", PYTHON="my python")
    assert small[0] == "my python" and processes(small) == tiny
    tiny_request = checked(small, "cpu")
    assert tiny_request.model.hidden_size == 64
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


def test_data_of_ones_own_and_several_nodes(tmp_path: Path) -> None:
    names = {"DATA_PATH": "my data", "VOCAB_FILE": "v.json", "MERGE_FILE": "m.txt", "NNODES": "2", "NODE_RANK": "1"}
    words = printed("pretrain_gpt_distributed.sh", tmp_path, DEVICES="4", MASTER_ADDR="node0", **names)
    request = checked(words, "cuda")
    assert (request.data.data_path, request.data.vocab_file, request.data.merge_file) == (
        ("my data",),
        "v.json",
        "m.txt",
    )
    assert processes(words) == 8 and words[words.index("--master-addr") + 1] == "node0"
    refused = subprocess.run(
        ["bash", str(EXAMPLES / "pretrain_gpt.sh")], env={**os.environ, "SCALE": "huge"}, capture_output=True, text=True
    )
    assert refused.returncode == 64 and "SCALE=huge is neither full nor tiny" in refused.stderr


def test_shell_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", "-x", *SHELL_FILES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("script", ["pretrain_gpt_multilingual.sh", *(name for name in RANKS if "multi" not in name)])
def test_a_tiny_one_trains(script: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if script != "pretrain_gpt_multilingual.sh" and pytestconfig.getoption("--cases") < MANY_CASES:
        pytest.skip(f"trains with --cases {MANY_CASES}")
    environment = {
        **os.environ,
        "PYTHON": forking_python(),
        "SCALE": "tiny",
        "DEMO_DATA": str(tmp_path / "data"),
        "DS_ACCELERATOR": "cpu",
        "MASTER_PORT": "0" if RANKS[script][1] == 1 else str(29_500 + os.getpid() % 2000),
    }
    (tmp_path / "data").mkdir()
    for language, word in (("english", "One"), ("tr", "Bir")):  # instead of corpora that take seconds to collect
        texts = [f"{word} {number} {number * 7919 % 1000} " * 40 for number in range(400)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "data" / f"{language}.jsonl").write_text(lines)
    command = ["bash", str(EXAMPLES / script), "--run-dir", "run", "--hidden-dropout", "0", "--attention-dropout", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = read_steps(tmp_path / "run")
    assert len(steps) >= 4
    assert list((tmp_path / "checkpoints" / "tiny_networks").glob("*/iter_*"))
    if "multilingual" in script:
        assert "ENGLISH" in done.stdout and "TURKISH" in done.stdout, "each validation set has a line"
