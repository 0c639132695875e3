"""The commands of docs/watching_a_run.md, run in their order on a small corpus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from megatron.observe.names import RECORDED
from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "watching_a_run.md"


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path, documents=100)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.S))
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert "Self CPU" in finished.stdout and "first, validation: " in finished.stdout
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    rates = [
        set(record["learning_rate"] for record in read_steps(tmp_path / "runs" / name).values())
        for name in ("first", "second")
    ]
    assert max(rates[0]) > 1.5 * max(rates[1]) > 0


def test_the_guide_names_fields_that_records_have() -> None:
    table = GUIDE.read_text().partition("## What is recorded")[2].partition("## Profiles")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) == 19 and named <= set(RECORDED)
