"""Every family: imported, continued, exported and taken back, with the numbers of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.model.blocks.feed_forward import FeedForward
from tests.trident.convert.comparison import (
    compare,
    gradient_difference,
    load_network,
    load_reference,
    relative,
    run_both,
)
from tests.trident.convert.family_table import HEADER, main
from tests.trident.convert.tiny_encoders import TINY_ENCODERS
from tests.trident.convert.tiny_models import TINY_MODELS, sample_tokens
from trident.convert.hugging_face.registry import FAMILIES

TOLERANCE = 1e-5
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_model_is_the_same_on_both_sides(
    name: str, tiny_model: Callable[[str], Path], imported_model: Callable[[str], Path], tmp_path: Path
) -> None:
    found = compare(tiny_model(name), imported_model(name), tmp_path)
    assert found.import_difference <= TOLERANCE
    assert found.export_difference <= TOLERANCE
    assert found.loss_difference <= TOLERANCE
    assert found.gradient_difference <= TOLERANCE
    assert found.generates_equally
    assert found.loads_completely
    assert found.returns_equal


def test_a_branch_that_passes_no_gradient_back_is_noticed(
    tiny_model: Callable[[str], Path],
    imported_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits and loss stay equal, and all parameters have gradients: those before the branch are wrong."""
    imported, forward = imported_model("llama"), FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda layer, hidden, *rest: forward(layer, hidden.detach(), *rest))
    reference = load_reference(tiny_model("llama"))[0]
    model, network = load_network(imported)
    logits, _, expected = run_both(network, model, reference, sample_tokens())
    assert relative(logits.detach(), expected.logits.detach()) <= TOLERANCE
    assert gradient_difference(network, model, reference, tmp_path / "gradients") > 0.01


def test_every_family_has_a_tiny_model() -> None:
    text_only = {family.model_type for family in FAMILIES if not family.text_field}
    tiny = (*TINY_MODELS.values(), *TINY_ENCODERS.values())
    assert {model.model_type for model in tiny} == text_only


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gpt2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0] == "| " + " | ".join(HEADER) + " |"
    assert lines[-1].startswith("| gpt2 |") and lines[-1].endswith("| equal | bit-equal |")


def test_the_documented_table_has_every_model() -> None:
    text = (ROOT / "docs" / "hugging_face.md").read_text()
    table = text.partition("| " + " | ".join(HEADER) + " |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in cells] == list(TINY_MODELS)
    for row in cells:
        assert max(map(float, row[1:5])) <= TOLERANCE and row[5:] == ["equal", "bit-equal"], row[0]
