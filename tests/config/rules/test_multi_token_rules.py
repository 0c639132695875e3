"""Features that multi-token prediction cannot be combined with are refused with the way out."""

from __future__ import annotations

from tests.config.command_lines import small

ASKED = "--mtp-num-layers 2"


def test_its_blocks_are_like_the_last_one() -> None:
    model = small(
        f"{ASKED} --position-embedding-type rope --num-experts 4 8 --moe-layer-pattern 0 1 --attention-window 5 "
        "--attention-window-pattern 0 1 0 0"
    ).model
    assert [model.experts_of(layer) for layer in range(6)] == [1, 4, 1, 8, 8, 8]
    assert [model.window_of(layer) for layer in range(6)] == [None, 5, None, None, None, None]
