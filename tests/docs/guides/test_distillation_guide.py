"""The commands of docs/distillation.md, run in their order on a small corpus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("megatron", "trident", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    guide = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", guide, flags=re.S))
    for length, scaled in (("--train-iters 200", "--train-iters 4 --eval-iters 1"), ("interval 20", "interval 2")):
        assert length in blocks
        blocks = blocks.replace(length, scaled)
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert "teacher: checkpoints/teacher/iter_0000004, 4 layers of width 64" in finished.stderr
    assert len(re.findall(r"iteration +[24]/ +4 .* kd loss: \d", finished.stdout)) == 2
