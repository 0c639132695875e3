"""The commands of docs/finetuning.md, run in their order on a small corpus; and what the guide says of names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.data.datasets.examples.example_files import SUFFIXES
from megatron.data.datasets.examples.records import ANSWER_KEYS, PROMPT_KEYS
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.tokenizers.chat.named import SOURCES
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.programs import forking_python
from tests.helpers.vocabulary import write_vocabulary

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "finetuning.md").read_text()


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("pretrain_gpt.py", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    questions = tmp_path / "examples" / "data" / "questions.jsonl"
    questions.parent.mkdir(parents=True)
    questions.write_text((ROOT / "examples" / "data" / "questions.jsonl").read_text())
    (tmp_path / "data").mkdir()
    tokenizer = build_tokenizer(write_vocabulary(tmp_path / "data"))
    with IndexedWriter(str(tmp_path / "data" / "demo_text_document"), np.uint16) as writer:
        for line in questions.read_text().splitlines():
            writer.add_document([np.array([*tokenizer.encode(line), tokenizer.eod_id])])
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.S))
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    output = finished.stdout + finished.stderr
    assert re.search(r"train: 2\d\d examples of examples/data/questions.jsonl in \d+ rows of 257 tokens, 9\d", output)
    assert "finetuning the weights of checkpoints/demo/iter_0000010 from iteration 0" in output
    assert "resumed checkpoints/chat/iter_0000005: iteration 5" in output
    assert list((tmp_path / "checkpoints" / "chat").glob("iter_*"))
    assert (tmp_path / "examples" / "data" / "index-cache").is_dir()


@pytest.mark.parametrize("name", [*SOURCES, *PROMPT_KEYS, *ANSWER_KEYS])
def test_the_guide_names_everything(name: str) -> None:
    assert f"`{name}`" in GUIDE or f'"{name}"' in GUIDE


def test_the_guide_names_the_suffixes() -> None:
    assert all(suffix.removesuffix(".gz") in GUIDE for suffix in SUFFIXES if suffix != ".ndjson")
