"""Every kind of dataset implements the interface."""

from __future__ import annotations

import pytest

from megatron.data.datasets.blended import BlendedDataset, PhasedDataset
from megatron.data.datasets.gpt import GPTDataset
from megatron.data.datasets.row_dataset import RowDataset
from megatron.data.datasets.sample import SampleDataset


@pytest.mark.parametrize("kind", [GPTDataset, RowDataset, BlendedDataset, PhasedDataset])
def test_every_dataset_implements_the_interface(kind: type) -> None:
    wanted = {name for name in vars(SampleDataset) if not name.startswith("_")} | {"__len__", "__getitem__"}
    assert wanted >= {"read", "source_of", "locate", "spans"} and not [
        name for name in wanted if not hasattr(kind, name)
    ]
