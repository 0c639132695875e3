"""Dropout probabilities that masks of 16 random bits per entry can represent."""

from __future__ import annotations

from collections.abc import Iterator

# A probability is rounded to a multiple of 1 / DROPOUT_STEPS.
DROPOUT_STEPS = 65536
_TOLERANCE = 0.01  # relative, of the probability to drop and of the probability to keep


def dropout_problems(option: str, probability: float) -> Iterator[str]:
    """Reports a probability that rounding would change by more than 1%.

    Near 0 nothing would be dropped, near 1 everything. torch's fused attention on a GPU rounds to fewer bits still
    (FlashAttention to 8).
    """
    if not 0 <= probability < 1:
        return
    steps = probability * DROPOUT_STEPS
    error = abs(round(steps) - steps) / DROPOUT_STEPS
    if error <= _TOLERANCE * min(probability, 1 - probability):
        return
    usable = [f"{step / DROPOUT_STEPS!r}" for step in (int(steps), int(steps) + 1) if 0 < step < DROPOUT_STEPS]
    below = ["0"] if steps < 1 else []
    yield (
        f"{option} {probability!r} cannot be represented: masks round it to a multiple of 1/{DROPOUT_STEPS}, here to "
        f"{round(steps) / DROPOUT_STEPS!r}. Use {' or '.join(below + usable)}."
    )
