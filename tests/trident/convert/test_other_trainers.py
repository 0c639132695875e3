"""The Python programs of docs/other_trainers.md, on a tiny exported model, in this process: the imports are slow."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.ranks import LAUNCH_VARIABLES
from tests.inference.checkpoints import make_checkpoint
from tools.convert import export_hf, import_hf

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "other_trainers.md"
LLAMA = (
    *("--swiglu", "--no-add-bias-linear", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--attention-dropout", "0"),
)


def program(heading: str) -> str:
    """The Python block of a section."""
    section = GUIDE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    return str(text)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with exported/demo in it."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoints = make_checkpoint(folder, *LLAMA)
    assert export_hf.main(["--load", str(checkpoints), "--output", str(folder / "exported" / "demo")]) == 0
    return folder


def run(heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:  # left by a run in this process: accelerate would join a group
        monkeypatch.delenv(name, raising=False)
    path = folder / "program.py"
    path.write_text(program(heading))
    monkeypatch.chdir(folder)
    runpy.run_path(str(path))


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


def test_lora_by_peft_is_merged_and_comes_back(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    run("LoRA with PEFT", exported, monkeypatch)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 8 and losses[-1] + losses[-2] < losses[0] + losses[1]
    before, after = logits(exported / "exported" / "demo"), logits(exported / "exported" / "lora")
    assert before.shape == after.shape and not torch.allclose(before, after, atol=1e-3)
    assert import_hf.main(["exported/lora", "--save", "lora"]) == 0
    assert export_hf.main(["--load", "lora", "--output", "again"]) == 0
    assert torch.equal(logits(exported / "again"), after)


def test_preferences_by_trl(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="DPO needs trl")
    run("Preferences with TRL", exported, monkeypatch)
    before, after = logits(exported / "exported" / "demo"), logits(exported / "exported" / "dpo")
    assert before.shape == after.shape and not torch.equal(before, after)
