"""Every script of examples/ has SCALE=tiny and DRY_RUN=1 and runs in a test at that size, or a list says why not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.observe.metrics_file import read_steps
from tests.examples.test_example_scripts import RANKS
from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(
    path.relative_to(EXAMPLES).as_posix() for end in ("sh", "slurm") for path in EXAMPLES.rglob(f"*.{end}")
)
NO_SIZE = {
    "environment.sh": "sourced: finds an interpreter",
    "training.sh": "sourced: the functions of the training scripts",
    "dsgpt2/settings.sh": "sourced: the sizes of that folder",
    "turkish/settings.sh": "sourced: the sizes of that folder",
    "slurm/preprocess.slurm": "encodes the user's own text; a real Slurm runs it in tests/trident/launch/test_slurm.py",
    "slurm/merge_shards.slurm": "merges what preprocess.slurm wrote; runs there too",
}
TURKISH = ("prepare", "pretrain", "finetune", "evaluate", "generate", "export", "run")
DSGPT2 = ("1_upload", "2_clean", "3_vocabulary", "4_statistics", "5_train", "6_finetune", "7_evaluate", "8_serve")
# Where each other script runs at a tiny size.
RUN_BY = {
    **dict.fromkeys(RANKS, "tests/examples/test_example_scripts.py"),
    **dict.fromkeys([f"turkish/{name}.sh" for name in TURKISH], "tests/seeds/turkish_gpt2/guide.py"),
    **dict.fromkeys([f"dsgpt2/{name}.sh" for name in DSGPT2], "tests/seeds/dsgpt2/guide.py"),
    "slurm/pretrain.slurm": "tests/trident/launch/test_slurm.py",
    "slurm/pretrain_gpt.slurm": "tests/docs/test_commands.py",
    "quickstart.sh": "tests/examples/test_kill_and_resume.py",
    "chat.sh": "here",
    "pretrain_bert.sh": "here",
    "gpt2_all_in/make_dev_corpus.sh": "here",
}
OTHERS_DRY_RUNS = {*RANKS, "slurm/pretrain.slurm"}  # in the tests that run them
TRAINS_NOTHING = {"gpt2_all_in/make_dev_corpus.sh"}


def start(script: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SCALE": "tiny", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_every_script_runs_somewhere_or_has_a_reason() -> None:
    assert sorted({**NO_SIZE, **RUN_BY}) == SCRIPTS and not NO_SIZE.keys() & RUN_BY.keys()
    for place in {*RUN_BY.values()} - {"here"}:
        assert (ROOT / place).is_file()
    for name, reason in NO_SIZE.items():
        if reason.startswith("sourced"):
            assert not (EXAMPLES / name).read_text().startswith("#!"), f"{name} is started, not sourced"


@pytest.mark.parametrize("script", sorted(RUN_BY.keys() - OTHERS_DRY_RUNS - TRAINS_NOTHING))
def test_a_dry_run_prints_commands_of_the_size_and_writes_nothing(script: str, tmp_path: Path) -> None:
    variables = {"DRY_RUN": "1", "PYTHON": "python", "DSGPT2_DIR": str(tmp_path / "demo")}
    tiny = start(script, tmp_path, **variables)
    full = start(script, tmp_path, **{**variables, "SCALE": "full"})
    assert tiny.returncode == full.returncode == 0, tiny.stderr + full.stderr
    assert "python" in tiny.stdout and list(tmp_path.iterdir()) == []
    if any(word in script for word in ("train", "finetune", "quickstart", "chat", "run")):
        assert tiny.stdout != full.stdout
    refused = start(script, tmp_path, **{**variables, "SCALE": "huge"})
    assert refused.returncode == 64 and "SCALE=huge is neither full nor tiny" in refused.stderr


@pytest.mark.full
def test_the_corpus_of_the_notebook_at_a_tiny_size(tmp_path: Path) -> None:
    done = start("gpt2_all_in/make_dev_corpus.sh", tmp_path, str(tmp_path / "made"), PYTHON=forking_python())
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "made" / "vocab.json").read_text())) == 400
    assert (tmp_path / "made" / "dev_text_document.idx").is_file()


@pytest.mark.slow
@pytest.mark.full
def test_a_tiny_bert_trains(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    texts = [
        f"One {number} is here. Two {number * 7919 % 1000} are there. All of them came. " * 10 for number in range(200)
    ]
    (tmp_path / "data" / "english.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    variables = {"PYTHON": forking_python(), "DEMO_DATA": str(tmp_path / "data"), "MASTER_PORT": str(free_port())}
    done = start("pretrain_bert.sh", tmp_path, "--run-dir", "run", **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(read_steps(tmp_path / "run")) == 4
    assert list((tmp_path / "checkpoints" / "tiny_networks").glob("*/iter_*"))


@pytest.mark.slow
@pytest.mark.full
def test_a_tiny_chat_is_trained_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    texts = [f"One {number} is here, two {number * 7919 % 1000} are there. " * 20 for number in range(300)]
    (folder / "demo.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = start("chat.sh", tmp_path, str(folder), PYTHON=forking_python())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "right answers:" in done.stdout and len(read_steps(folder / "run-pretrained")) == 4


def test_the_networks_of_chat_are_one_at_every_scale(tmp_path: Path) -> None:
    done = start("chat.sh", tmp_path, DRY_RUN="1", PYTHON="python")
    commands = [shlex.split(line) for line in done.stdout.splitlines() if "pretrain_gpt.py" in line]
    first, second = (parse(words[words.index("pretrain_gpt.py") + 1 :]).model for words in commands)
    assert first == second and first.hidden_size == 32
