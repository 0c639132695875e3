"""The commands of docs/prefix_lm.md, run in their order on a small corpus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.data.sources.pairs import TokenPairs
from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ("pretrain_gpt.py", "pretrain_prefix_lm.py", "finetune_t0_non_causal_decoder.py")


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident", *PROGRAMS):
        (tmp_path / name).symlink_to(ROOT / name)
    corpus = write_tiny_corpus(tmp_path)
    (tmp_path / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, tmp_path / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / "data" / f"demo_text_document{ending}")
    guide = (ROOT / "docs" / "prefix_lm.md").read_text()
    assert guide.count("--train-iters 40") == 2 and all(f"`{name}`" in guide for name in PROGRAMS)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", guide, flags=re.S)).replace(
        "--train-iters 40", "--train-iters 6"
    )
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert "Using loss reweighting" in finished.stderr
    assert "finetuning the weights of checkpoints/prefix/iter_0000006" in finished.stderr
    assert len(TokenPairs(str(tmp_path / "data" / "sums"))) == 800
    assert (tmp_path / "data" / "prompts.txt.out").read_text().startswith("{")
