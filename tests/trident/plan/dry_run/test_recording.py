"""Operations on tensors without memory, whose results are made from those before."""

from __future__ import annotations

import pytest
import torch

from trident.plan.dry_run.recording import RecordedMessages

OPERATIONS = {
    "integer factor": lambda tensor: tensor * 2,
    "fraction": lambda tensor: tensor * 2.0,
    "factor of another type": lambda tensor: tensor.long() * 0.5,
    "transposed": lambda tensor: tensor.t() + 1,
    "sum of rows": lambda tensor: tensor.sum(0, keepdim=True),
    "largest and their places": lambda tensor: tensor.max(1),
    "norm": lambda tensor: torch.native_layer_norm(tensor.float(), [3], None, None, 1e-5),
    "in place": lambda tensor: tensor.add_(1),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_result_from_memory_is_like_the_first(operation, dtype):
    results = {}
    expected = operation(torch.empty(2, 3, dtype=dtype, device="meta"))
    for _ in range(2):
        with RecordedMessages(0, results):
            made = operation(given := torch.empty(2, 3, dtype=dtype, device="meta"))
        assert results
        for one, other in zip(_each(made), _each(expected), strict=True):
            assert (one.shape, one.stride(), one.dtype, one.device) == (
                *(other.shape, other.stride(), other.dtype),
                torch.device("meta"),
            )
        assert (made is given) == (operation is OPERATIONS["in place"])


def test_views_and_values_are_not_made_from_memory():
    results = {}
    with RecordedMessages(0, results):
        tensor = torch.empty(4, 2, device="meta")
        assert all(tensor[1:].storage_offset() == 2 for _ in range(2))
        sums = [(torch.ones(2) * count).sum() for count in (1, 2)]
    assert [each.item() for each in sums] == [2.0, 4.0]


def _each(made):
    return [made] if isinstance(made, torch.Tensor) else list(made)
