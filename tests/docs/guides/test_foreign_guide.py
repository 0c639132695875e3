"""The commands of docs/foreign_checkpoints.md, run in their order on a small checkpoint of Megatron-LM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megatron.checkpoint.recovery import OpenCheckpoint
from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus
from tests.trident.convert.foreign.foreign_files import foreign, gpt2_arguments, write_torch_layout
from tools.convert import import_megatron
from trident.checkpoints.differences import compare

ROOT = Path(__file__).resolve().parents[3]


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    corpus = write_tiny_corpus(tmp_path / "data")
    made = foreign(gpt2_arguments(num_layers=2), ranks=2)
    for name, value in made.tensors["weight"].items():
        value.mul_(0.05)
        made.tensors["exp_avg"][name].mul_(1e-3)
        made.tensors["exp_avg_sq"][name].abs_().mul_(1e-4)
    write_torch_layout(tmp_path / "theirs", made)
    guide = (ROOT / "docs" / "foreign_checkpoints.md").read_text()
    commands = "\n".join(re.findall(r"```(?:bash|shell)\n(.*?)```", guide, flags=re.S))
    assert commands.count("python ") == 6 and commands.count("--train-iters ") == 2
    commands = commands.replace("--train-iters ", "--eval-iters 0 --train-iters ")
    # The importer starts a child with flags that only an interpreter understands, so it gets a real one.
    choose = f'case "$1" in */import_megatron.py) "{sys.executable}" "$@";; *) "{forking_python()}" "$@";; esac'
    program = f"set -euo pipefail\npython() {{ {choose}; }}\n{commands}"
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    said = finished.stdout + finished.stderr
    assert "resumed checkpoints/imported" in said and "finetuning the weights" in said

    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", corpus.vocab_file]
    tokenizer += ["--merge-file", corpus.merge_file]
    imported = OpenCheckpoint.newest(tmp_path / "checkpoints" / "imported")
    for exported in ("for-deepspeed", "for-megatron"):
        again = tmp_path / f"again-{exported}"
        assert import_megatron.main([str(tmp_path / exported), "--save", str(again), *tokenizer]) == 0
        comparison = compare(imported, OpenCheckpoint.newest(again), with_moments=True)
        assert comparison.holds_same_tensors and not comparison.progress, exported
