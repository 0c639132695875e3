"""The commands of docs/launching.md, run in their order on a small corpus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path, documents=300)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    guide = (ROOT / "docs" / "launching.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", guide, flags=re.S))
    python = f'python() {{ "{forking_python()}" "$@"; }}; export -f python'
    program = f"set -euo pipefail\n{python}\nPORT={free_port()}\n{blocks}"
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]

    said, shown = finished.stderr, finished.stdout
    assert "6 ranks: 2 tensor x 1 pipeline x 3 data" in said
    (notice,) = re.findall(r"```console\nwarning: (--elastic: .*)\n", guide)
    assert notice in said, "the guide shows another sentence"
    assert shown.count("ssh -T") == 3 and shown.count("srun --nodes=") == 2 and shown.count("env RANK=") == 2
    assert "--shard 3/4" in shown and "my-gpt2_shard4of4_text_document" in shown
    assert max(read_steps(tmp_path / "runs" / "two-nodes")) == 4
    assert (tmp_path / "checkpoints" / "elastic" / "iter_0000006").is_dir()
