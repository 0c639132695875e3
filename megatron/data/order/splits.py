"""How `--split` and weighted ranges cut a file's sequences into training, validation and test.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`get_train_valid_test_split_`).
"""

from __future__ import annotations


def split_boundaries(shares: tuple[float, float, float], size: int) -> tuple[int, int, int, int]:
    """Cuts `size` sequences into three consecutive ranges: [b0, b1), [b1, b2), [b2, b3).

    Rounding leaves a surplus or a gap at the end, which is taken from all three upper boundaries. Those that this
    would push outside the file are clipped to it.

    Args:
        shares: of training, validation and test, summing to 1.
    """
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * size))
    surplus = bounds[3] - size
    bounds[1:] = [bound - surplus for bound in bounds[1:]]
    first, second, third, fourth = (min(max(bound, 0), size) for bound in bounds)
    return first, second, third, fourth


def fraction_range(start: float, stop: float, size: int) -> tuple[int, int]:
    """The sequences that `START:STOP` of a weighted split path names."""
    return round(start * size), round(stop * size)
