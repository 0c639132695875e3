"""The two commands of jax-lm-training's README, word for word, where its programs have their own names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from tests.helpers.programs import forking_python
from tests.helpers.projects.jax_lm import PREPROCESS_FLAGS
from tests.helpers.vocabulary import trained_vocabulary
from tools.corpus.featurize import workers_without_beam
from trident.corpus.vocabulary.learning import byte_level_files

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "jax_lm_training"
README = rf"""
python -m jax_lm.preprocess \{PREPROCESS_FLAGS}python -m jax_lm.train \
    --model-config-name "gpt2" \
    --train-dataset-paths "dataset/wikitext.train**" \
    --eval-dataset-paths "dataset/wikitext.test**" \
    --batch-size 16 \
    --random-seed 0 \
    --max-sequence-length 256 \
    --num-epochs 5 \
    --learning-rate 3e-5 \
    --dtype float32 \
    --wandb-username "codertimo" \
    --wandb-project "jax-lm-training" \
    --wandb-run-dir ".wandb" \
    --logging-frequency 100 \
    --eval-frequency 5000 \
    --save-frequency 5000 \
    --model-save-dir "artifacts/"
"""
# What the test adds: the other split, and a network that does not take a GPU.
SMALLER = '--model-save-dir "artifacts/" --num-layers 1 --hidden-size 32 --num-attention-heads 2'
HUB_PAGE = """---
configs:
- config_name: wikitext-103-v1
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_the_folder_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "jax_lm").symlink_to(EXAMPLE / "jax_lm")
    for name in ("gpt2", "wikitext"):  # in place of the hub's
        (tmp_path / name).mkdir()
    vocabulary, merges = trained_vocabulary(400)
    tokenizer = byte_level_files(vocabulary, [list(pair) for pair in merges], ())["-tokenizer.json"]
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes(tokenizer)
    (tmp_path / "wikitext" / "README.md").write_text(HUB_PAGE)
    for split, documents in (("train", 10), ("test", 1)):
        lines = [json.dumps({"text": f"{number} " + "x " * 150}) + "\n" for number in range(documents)]
        (tmp_path / "wikitext" / f"{split}.jsonl").write_text("".join(lines))
    prepare, _, train = README.partition("python -m jax_lm.train")
    program = (
        f'set -e; python() {{ "{forking_python()}" "$@"; }}\n{prepare}{prepare.replace("train", "test")}'
        f"python -m jax_lm.train{train}".replace('--model-save-dir "artifacts/"', SMALLER)
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[EVAL] epoch: " in done.stdout and "save checkpoint to artifacts/" in done.stdout
    assert len(read_steps(tmp_path / "artifacts" / "run")) >= 5


def test_options_of_beam_that_only_count_processes_need_no_beam() -> None:
    pytest.importorskip("tokenizers")
    mode, count = "--direct_running_mode", "--direct_num_workers"
    cores = len(os.sched_getaffinity(0))
    assert workers_without_beam([mode, "multi_processing", count, "0"]) in (cores, None)
    assert workers_without_beam([f"{mode}=multi_processing", f"{count}=3"]) in (3, None)
    assert workers_without_beam([mode, "in_memory"]) in (1, None)
    assert workers_without_beam([]) is None
    assert workers_without_beam(["--project", "mine", mode, "multi_processing"]) is None
    assert workers_without_beam([count, "many"]) in (1, None)
