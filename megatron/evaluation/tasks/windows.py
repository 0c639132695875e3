"""Overlapping windows over a text that is longer than a network's context.

The first window scores all of its tokens. Each later one begins `stride` tokens after the one before and scores only
its last `stride` tokens, so that every token is scored exactly once and, with a small stride, after a long context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.evaluation.scoring import Query


def overlapping_windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[Query]:
    """The queries that score every token but the first exactly once.

    Args:
        window: the most tokens that a query scores, and one less than it may hold.
        stride: tokens that each query after the first scores; a stride above the window counts as the window.

    Source: bigscience Megatron-DeepSpeed `tasks/zeroshot_gpt/datasets.py` (`--overlapping-eval`).
    """
    stride = max(1, min(stride, window))
    stop = min(window + 1, len(tokens))
    done = 1
    while done < len(tokens):
        start = max(0, done - 1 - (window - stride))
        yield Query(tuple(tokens[start:stop]), done - start)
        done, stop = stop, min(stop + stride, len(tokens))
