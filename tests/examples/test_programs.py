"""The programs of other projects start in their folder under their own names, and from anywhere by their path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = (
    *("gpt2_all_in/train.py", "gpt2_all_in/benchmark.py", "gpt2_all_in/sft.py", "dsgpt2/ds_trainer.py"),
    *("hello_deepspeed/train_bert.py", "hello_deepspeed/train_bert_ds.py", "jax_lm_training/jax_lm/train.py"),
)


def usage(folder: Path, *words: str) -> str:
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\n")[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_starts_in_its_folder_and_elsewhere(program: str, tmp_path: Path) -> None:
    path = EXAMPLES / program
    assert path.name in usage(path.parent, path.name)
    assert path.name in usage(tmp_path, str(path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", ["jax_lm.train", "jax_lm.preprocess"])
def test_a_module_starts_in_its_projects_folder(module: str) -> None:
    assert "usage: " in usage(EXAMPLES / "jax_lm_training", "-m", module)
