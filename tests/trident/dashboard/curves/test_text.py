"""Curves as text."""

from __future__ import annotations

import pytest

from trident.dashboard.curves.reading import Curve
from trident.dashboard.curves.text import text_plot

FALLING = Curve("run", tuple((step, 10.0 - step) for step in range(10)))


def test_text_plot_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = text_plot([FALLING], width=10, height=5, unicode=False)
    assert lines == [
        "run: 10 -> 1 (iterations 0 to 9)",
        "        10 |**",
        "           |  **",
        "           |    **",
        "           |      **",
        "         1 |        **",
        "           +----------",
        "            iteration 0    9",
    ]


def test_the_axis_is_named_in_short() -> None:
    curve = Curve("run", ((1e6, 2.0), (3.2e9, 1.0)))
    lines = text_plot([curve], width=40, height=2, axis="flops")
    assert lines[0] == "run: 2 -> 1 (FLOPs 1.0M to 3.2B)"
    assert lines[-1].split() == ["FLOPs", "1.0M", "3.2B"]


def test_braille_has_eight_dots_a_character() -> None:
    diagonal = text_plot([FALLING], width=1, height=1)[1]
    assert diagonal == "        10 |" + chr(0x2800 + 0x01 + 0x02 + 0x20 + 0x80)


@pytest.mark.parametrize("points", [((5, 1.0),), ((1, 2.0), (9, 2.0)), ((1, 1e-300), (2, 1e300))])
def test_any_finite_curve_can_be_drawn(points: tuple[tuple[int, float], ...]) -> None:
    assert len(text_plot([Curve("a", points), Curve("b", points)], width=20, height=3)) == 2 * 6
