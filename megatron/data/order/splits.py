"""How `--split` and weighted ranges cut a file's sequences into training, validation and test.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`get_train_valid_test_split_`); NVIDIA
Megatron-LM `megatron/core/datasets/blended_megatron_dataset_config.py` and `blended_megatron_dataset_builder.py`.
"""

from __future__ import annotations


def split_boundaries(
    shares: tuple[float, float, float], size: int, rule: str = "bigscience"
) -> tuple[int, int, int, int]:
    """Cuts `size` sequences into three consecutive ranges: [b0, b1), [b1, b2), [b2, b3).

    Rounding leaves a surplus or a gap at the end; bigscience (and deepspeedai) takes it from all three upper
    boundaries, NVIDIA rounds running sums and has none. Boundaries that the correction would push outside the file are
    clipped to it.

    Args:
        shares: of training, validation and test, summing to 1.
        rule: "bigscience" or "nvidia".
    """
    bounds = [0]
    if rule == "nvidia":
        running = 0.0
        for share in shares:
            running += share
            bounds.append(round(running * size))
    else:
        for share in shares:
            bounds.append(bounds[-1] + round(share * size))
        surplus = bounds[3] - size
        bounds[1:] = [bound - surplus for bound in bounds[1:]]
    first, second, third, fourth = (min(max(bound, 0), size) for bound in bounds)
    return first, second, third, fourth


def fraction_range(start: float, stop: float, size: int) -> tuple[int, int]:
    """The sequences that `START:STOP` of a weighted split path names."""
    return round(start * size), round(stop * size)
