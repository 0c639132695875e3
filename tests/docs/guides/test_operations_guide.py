"""The commands of docs/operations.md, run in their order on a small corpus."""

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
    for name in ("tools", "megatron", "trident", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path, documents=300)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx", ".json"):
        if Path(corpus.prefix + ending).exists():
            shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    guide = (ROOT / "docs" / "operations.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", guide, flags=re.S))
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    kept = sorted(path.name for path in (tmp_path / "backup" / "guide").glob("iter_*"))
    assert {"iter_0000006", "iter_0000009", "iter_0000012"} <= set(kept) and "iter_0000003" not in kept
    assert "resuming from the copy" in finished.stderr
    assert (tmp_path / "checkpoints" / "guide" / "iter_0000015").is_dir()
