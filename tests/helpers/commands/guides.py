"""Running the commands of a page of docs/ in a folder, in order."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus
from trident.corpus.inputs.demo import corpus_documents

ROOT = Path(__file__).resolve().parents[3]
LINKED = ("tools", "tasks", "megatron", "trident", "tests", "benchmarks")


def page(name: str) -> str:
    """The text of a page."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name: str, language: str = "bash") -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page(name), flags=re.S)


def shortened(commands: str, shorter: Mapping[str, str]) -> str:
    """The commands with each key replaced by its value; every key must occur."""
    for written, replacement in shorter.items():
        assert written in commands, f"the page no longer has {written}"
        commands = commands.replace(written, replacement)
    return commands


def write_demo_data(folder: Path, documents: int = 60) -> TinyCorpus:
    """Writes a tiny corpus under the names of docs/training.md."""
    corpus = write_tiny_corpus(folder, documents=documents)
    (folder / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, folder / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, folder / "data" / f"demo_text_document{ending}")
    return corpus


def write_demo_text(path: Path, size: int, most_letters: int) -> None:
    """Writes about `size` bytes of the demo corpus as loose JSON."""
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        for source, text in corpus_documents():
            written += stream.write(json.dumps({"text": text[:most_letters], "src": source}) + "\n")
            if written > size:
                return


def run_commands(folder: Path, commands: str, *, examples: bool = False) -> tuple[str, str]:
    """Runs commands in a folder that links to the project; returns what they print, and their errors.

    `tools/corpus/build_demo_corpus.py` copies `corpus.jsonl` of the folder if it exists.

    Args:
        examples: also link to `examples/`.
    """
    programs = (path.name for path in ROOT.glob("*.py") if path.name != "setup.py")
    for name in (*LINKED, *(("examples",) if examples else ()), *programs):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    python = forking_python()
    program = f"""set -euo pipefail
python() {{
    case "$1" in
        */build_demo_corpus.py) cp corpus.jsonl data/demo.jsonl;;
        *) "{python}" "$@";;
    esac
}}
export -f python
torchrun() {{ "{python}" -m torch.distributed.run --master-addr 127.0.0.1 "$@"; }}
{commands}"""
    finished = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    return finished.stdout, finished.stderr
