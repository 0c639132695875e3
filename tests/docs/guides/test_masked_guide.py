"""The commands of docs/masked_language_models.md, run in their order on a small corpus; the published launch script."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import pretrain_bert
from megatron.config import parse
from tests.examples.test_example_scripts import printed
from tests.helpers.programs import forking_python
from trident.corpus.inputs.demo import corpus_documents

ROOT = Path(__file__).resolve().parents[3]
_CORPUS_BYTES = 60_000
_SHORTER = {
    "--train-iters 4 ": "--train-iters 2 ",
    "--train-iters 20": "--train-iters 4",
    "--train-iters 30": "--train-iters 6",
}


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    pytest.importorskip("sentencex", reason="sentences are split by it")
    for name in ("tools", "megatron", "trident", "pretrain_bert.py", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "corpus.jsonl")
    guide = "\n".join(
        re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "masked_language_models.md").read_text(), flags=re.S)
    )
    for written, shorter in _SHORTER.items():
        assert written in guide
        guide = guide.replace(written, shorter)
    program = f"""
set -euo pipefail
python() {{
    case "$1" in */build_demo_corpus.py) cp corpus.jsonl data/demo.jsonl;; *) "{forking_python()}" "$@";; esac
}}
{guide}"""
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert "resumed checkpoints/bert/iter_0000004" in finished.stderr
    after_training, evaluated = (
        re.findall(rf"valid loss at {point} \| lm loss value: (\S+)", finished.stdout)
        for point in ("the end of training for val data", "iteration 6")
    )
    assert evaluated == [after_training[1]], "the same hidden tokens, in another layout"
    assert len(re.findall(r"\| lm loss: \S+ \| sop loss: \S+ \|", finished.stdout)) == 3
    assert len(re.findall(r"\| lm loss: \S+ \| grad norm", finished.stdout)) == 1, "without a sentence order"
    assert {path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()} == {"bert"}


def write_corpus(path: Path) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as stream:
        for _, text in corpus_documents():
            size += stream.write(json.dumps({"text": text[:2000]}) + "\n")
            if size > _CORPUS_BYTES:
                return


def test_the_published_script_starts_what_the_program_understands(tmp_path: Path) -> None:
    words = printed("pretrain_bert.sh", tmp_path)
    words = words[words.index(str(ROOT / "pretrain_bert.py")) + 1 :]
    request = parse(words, program=pretrain_bert.PROGRAM)
    assert (request.model.max_position_embeddings, request.precision.fp16) == (512, True)
    assert request.model.sentence_order_head and not request.notices
