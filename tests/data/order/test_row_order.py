"""The order of the rows of a source: a permutation of blocks and of the rows in a chunk."""

import numpy as np
import pytest

from megatron.data.order.row_order import EpochRowOrder


def rows_of(order: EpochRowOrder) -> list[int]:
    """Every row by position, each looked up by itself."""
    places = [order.chunk_of(position) for position in range(len(order))]
    return [int(order.chunk(chunk)[place]) for chunk, place in places]


def every(rows: int, block: int) -> np.ndarray:
    """Edges of blocks of equal size, the last one maybe smaller."""
    return np.append(np.arange(0, rows, block), rows)


@pytest.mark.parametrize(
    "edges", [[0, 1], [5, 7], [0, 3, 4, 20, 21], [10, 12, 30, 31, 32, 40], every(100, 7), every(64, 1), every(64, 64)]
)
@pytest.mark.parametrize("chunk_rows", [1, 4, 16, 1000])
def test_an_order_is_a_permutation_in_whole_blocks(edges: list[int] | np.ndarray, chunk_rows: int) -> None:
    order = EpochRowOrder(np.array(edges), chunk_rows, 3, 0)
    rows = rows_of(order)
    assert sorted(rows) == list(range(edges[0], edges[-1])) and len(order) == len(rows)
    blocks = [
        set(np.searchsorted(edges, order.chunk(number), side="right").tolist())
        for number in range(len(edges))
        if number <= order.chunk_of(len(order) - 1)[0]
    ]
    assert sum(map(len, blocks)) == len(edges) - 1 == len(set.union(*blocks))


def test_an_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = rows_of(EpochRowOrder(every(50, 4), 16, 3, 0))
    assert rows_of(EpochRowOrder(every(50, 4), 16, 3, 0)) == first
    assert rows_of(EpochRowOrder(every(50, 4), 16, 3, 1)) != first != rows_of(EpochRowOrder(every(50, 4), 16, 4, 0))
    written_in_plans = [41, 3, 45, 47, 5, 43]
    assert first[:6] == written_in_plans
