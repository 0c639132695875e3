"""The commands of docs/training.md § Data and of docs/data.md, run in their order on a small corpus."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from tests.helpers.programs import forking_python
from trident.corpus.inputs.demo import corpus_documents

ROOT = Path(__file__).resolve().parents[3]
_CORPUS_BYTES = 600_000


def shell() -> str:
    """What the commands run in: this interpreter, and a corpus that is there instead of collected."""
    python = forking_python()
    return f"""
set -euo pipefail
python() {{
    if [ "$1" = tools/corpus/build_demo_corpus.py ]; then cp corpus.jsonl data/demo.jsonl; else "{python}" "$@"; fi
}}
torchrun() {{ "{python}" -m torch.distributed.run --master-addr 127.0.0.1 "$@"; }}
"""


def shell_blocks(text: str) -> str:
    return "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S))


@pytest.mark.slow
def test_every_data_command_of_the_documents_works(tmp_path: Path) -> None:
    for package in ("sentencex", "sentencepiece", "ftfy", "py3langid", "datasketch", "pyarrow"):
        pytest.importorskip(package, reason=f"the guide needs {package}")
    for name in ("tools", "megatron", "trident", "tests", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_corpus(tmp_path / "corpus.jsonl")
    training = (ROOT / "docs" / "training.md").read_text()
    section = training[training.index("\n## Data\n") : training.index("\n## Train\n")]
    guide = shell_blocks((ROOT / "docs" / "data.md").read_text())
    smaller = {"--train-iters 4 ": "--train-iters 4 --eval-iters 1 "}
    smaller["--micro-batch-size 4 --global-batch-size 8 "] = "--micro-batch-size 2 --global-batch-size 4 "
    for words, fewer in smaller.items():
        assert words in guide, f"the guide no longer says {words}"
        guide = guide.replace(words, fewer)
    program = shell() + shell_blocks(section) + guide
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]

    data = tmp_path / "data"
    whole = (data / "demo_text_document.bin").read_bytes()
    for same in ("demo-many", "demo-dist", "whole"):
        assert (data / f"{same}_text_document.bin").read_bytes() == whole, same
    plain = (data / "parts_text_document.bin").read_bytes()
    for same in ("job", "ranks", "stored"):
        assert (data / f"{same}_text_document.bin").read_bytes() == plain, same
    assert (data / "back_text_document.bin").read_bytes() == whole
    assert IndexedDataset(str(data / "old_text_document")).dtype.name == "int32"
    sentences, documents = (
        IndexedDataset(str(data / name)) for name in ("sentences_text_sentence", "parts_text_document")
    )
    assert len(sentences.documents) == len(documents.documents) < len(sentences)
    assert json.loads((data / "clean-report.json").read_text())
    assert re.search(r"lm loss demo_text_document: \d\.\d+E[+-]\d+ \| lm loss windows\S*: ", finished.stdout)
    assert len((data / "steps.jsonl").read_text().splitlines()) >= 8
    assert len((data / "spike.jsonl").read_text().splitlines()) == 2


def write_corpus(path: Path) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as stream:
        for source, text in corpus_documents():
            size += stream.write(json.dumps({"text": text[:4000], "src": source}) + "\n")
            if size > _CORPUS_BYTES:
                return
