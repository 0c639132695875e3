"""Every script of examples/ has SCALE=tiny and DRY_RUN=1, or a list gives the reason why not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

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
    "slurm/pretrain.slurm": "its dry run is in tests/trident/launch/test_slurm.py",
    "gpt2_all_in/make_dev_corpus.sh": "trains nothing",
}


def start(script: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SCALE": "tiny", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - NO_SIZE.keys() - RANKS.keys()))
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
