"""The commands of docs/recipes.md, shortened, on a small corpus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import write_tiny_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[str]:
    """The commands of the page."""
    guide = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    return re.findall(r"```bash\n(.*?)```", guide, flags=re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of the page."""
    made = tmp_path_factory.mktemp("recipes")
    corpus = write_tiny_corpus(made)
    (made / "data").mkdir()
    for source, name in ((corpus.vocab_file, "demo-vocab.json"), (corpus.merge_file, "demo-merges.txt")):
        shutil.copy(source, made / "data" / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, made / "data" / f"demo_text_document{ending}")
    return made


def run(folder: Path, commands: str) -> str:
    """Runs commands in the folder and returns what they print."""
    for name in ("megatron", "trident", "pretrain_gpt.py", "tools", "benchmarks"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    program = f"""set -euo pipefail
python() {{ "{forking_python()}" "$@"; }}
{commands}"""
    finished = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    return finished.stdout


def test_the_run_trains_and_its_mean_is_exported(folder: Path) -> None:
    (block,) = (text for text in blocks() if "pretrain_gpt.py" in text)
    shorter = {
        "--train-iters 240": "--train-iters 4 --eval-iters 1 --log-interval 1 --split 80,15,5",
        "--lr-wsd-decay-iters 24": "--lr-wsd-decay-iters 2",
        "--lr-warmup-iters 20": "--lr-warmup-iters 1",
        "--micro-batch-size 16 --global-batch-size 16": "--micro-batch-size 2 --global-batch-size 2",
    }
    for long, short in shorter.items():
        assert long in block
        block = block.replace(long, short)
    assert re.search(r"iteration +4/ +4 .* lm loss: \d", run(folder, block))
    assert json.loads((folder / "exported" / "muon" / "proof.json").read_text())["is_equal"]


def test_the_benchmark_measures_and_draws(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (block,) = (text for text in blocks() if "benchmarks/optimizers.py" in text)
    picture = folder / "curves.png"
    block = block.strip().replace("0.003 0.01 0.03", "0.01").replace("docs/optimizers.png", str(picture))
    printed = run(folder, f"{block} --steps 8 --seeds 1 --data {folder / 'data'}")
    records = [json.loads(line) for line in printed.splitlines()]
    found = [(record["figure"], record["optimizer"], record["lr"]) for record in records]
    assert found == [
        (figure, optimizer, 0.01)
        for optimizer in ("adam", "muon", "schedule-free")
        for figure in ("loss of a rate", "loss with the best rate")
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_losses_in_8_bits_are_compared(folder: Path) -> None:
    (block,) = (text for text in blocks() if "benchmarks/fp8_curve.py" in text)
    short = "--steps 2 --num-layers 3 --runs rowwise"
    records = [
        json.loads(line) for line in run(folder, f"{block.strip()} {short} --data {folder / 'data'}").splitlines()
    ]
    losses = {record["of"]: record["value"] for record in records if record["figure"] == "training loss"}
    (difference,) = (record["value"] for record in records if record["figure"] == "difference of training losses")
    assert 0 < abs(difference) < 1
    assert difference == pytest.approx(100 * (losses["rowwise"] / losses["bf16"] - 1), abs=5e-3)
