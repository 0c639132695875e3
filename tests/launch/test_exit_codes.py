"""One exit code for many processes."""

from __future__ import annotations

import pytest

from megatron.launch.exit_codes import combined_code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([], 0),
        ([77, 75, 75], 77),
        ([75, 77], 77),
        ([-9, 75, 75], 75),
        ([137, 75], 75),
        ([1, 75], 1),
        ([76, 77], 76),
        ([0, 78], 78),
        ([-11, -15], 139),
        ([143, -9], 143),
        ([255, 75], 75),
        ([255, 143], 255),
    ],
)
def test_the_cause_wins(codes: list[int], code: int) -> None:
    assert combined_code(codes) == code
