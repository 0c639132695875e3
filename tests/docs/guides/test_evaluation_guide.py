"""The commands of docs/evaluation.md, run in their order on a small checkpoint; and what the guide says of the keys."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron.config.flags.fields import flags_of
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.programs import forking_python
from tests.inference.checkpoints import make_checkpoint
from trident.evaluate.results import read_results
from trident.evaluate.tasks.tasks_file import KINDS

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "evaluation.md").read_text()
EXAMPLES = ROOT / "examples" / "evaluation"


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "tasks", "megatron", "trident", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("data", "checkpoints", "made"):
        (tmp_path / name).mkdir()
    made = make_checkpoint(tmp_path / "made")
    for name in ("demo", "other"):
        (tmp_path / "checkpoints" / name).symlink_to(made)
    vocabulary, merges = (str(made.parent / name) for name in ("demo-vocab.json", "demo-merges.txt"))
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", vocabulary, merges))
    with IndexedWriter(str(tmp_path / "data" / "demo_text_document"), np.uint16) as writer:
        for text in (EXAMPLES / "text.txt").read_text().split("\n\n"):
            writer.add_document([np.array([*tokenizer.encode(text), tokenizer.eod_id])])
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.S))
    python = forking_python()
    program = f"""
set -euo pipefail
python() {{ "{python}" "$@"; }}
torchrun() {{ "{python}" -m torch.distributed.run --master-addr 127.0.0.1 "$@"; }}
{blocks}"""
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    results = read_results(tmp_path / "results.json")
    assert [task["kind"] for task in results["tasks"]] == list(KINDS)
    for task in results["tasks"][:2]:
        assert list(task["baselines"]) == ["uniform", "unigram", "bigram"]
    for name in ("WIKITEXT103", "LAMBADA"):
        assert f" validation results on {name} | " in finished.stdout
    assert "lambada:passages (lambada; 10 items)" in finished.stdout
    assert "no difference shown" in finished.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_guide_names_every_key(kind: str) -> None:
    begin = GUIDE.index(f"### `{kind}`")
    section = GUIDE[begin : GUIDE.index("\n##", begin + 5)]
    shared = ("name", "data", "train")
    missing = [
        key for key in [flag.field for flag in flags_of(KINDS[kind])] if key not in shared and f"`{key}" not in section
    ]
    assert not missing


def test_a_set_of_each_kind_ships() -> None:
    described = yaml.safe_load((EXAMPLES / "tasks.yaml").read_text())
    assert [task["task"] for task in described] == list(KINDS)
    assert {task["data"] for task in described} | {"tasks.yaml"} == {path.name for path in EXAMPLES.iterdir()}
