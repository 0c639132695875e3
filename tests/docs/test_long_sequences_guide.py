"""The commands of docs/long_sequences.md, shortened, on a small corpus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("flag", "length"), [("--sequence-parallel", " 512"), ("--context-parallel-size", " 4096")])
def test_a_command_trains(tmp_path: Path, flag: str, length: str) -> None:
    for name in ("megatron", "trident", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    guide = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"```bash\n(.*?)```", guide, flags=re.S) if flag in text)
    for long, short in (("--train-iters 200", "--train-iters 2 --eval-iters 1 --log-interval 1"), (length, " 32")):
        assert long in block
        block = block.replace(long, short)
    program = f"""set -euo pipefail
torchrun() {{ "{forking_python()}" -m torch.distributed.run --master-addr 127.0.0.1 "$@"; }}
{block}"""
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert re.search(r"iteration +2/ +2 .* lm loss: \d", finished.stdout)
