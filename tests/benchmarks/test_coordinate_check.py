"""muP keeps activations and logits as they are while the network grows; the standard parametrization does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.coordinate_check import HIDDEN, LOGITS, CheckFlags, coordinates, main

FLAGS = CheckFlags(widths=(64, 512))


def growth(place: str, *, use_mup: bool) -> float:
    """How much larger an activation of the wide network is after the last step than that of the narrow one."""
    narrow, wide = (coordinates(width, FLAGS, use_mup=use_mup)[place][-1] for width in FLAGS.widths)
    return wide / narrow


def test_hidden_states() -> None:
    assert 0.5 < growth(HIDDEN, use_mup=True) < 1.5
    assert growth(HIDDEN, use_mup=False) > 8


def test_logits() -> None:
    assert 0.4 < growth(LOGITS, use_mup=True) < 1.5
    assert growth(LOGITS, use_mup=False) > 3


def test_the_program_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert main(["--widths", "16", "32", "--steps", "1", "--output", str(path)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["figure"], record["width"]) for record in records] == [
        (f"{place}, {name}", width) for name in ("standard", "muP") for width in (16, 32) for place in (HIDDEN, LOGITS)
    ]
    assert path.read_bytes().startswith(b"\x89PNG")
