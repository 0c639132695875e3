"""Accumulated gradients give the losses of the whole batch, and so do the switches that save memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.projects.all_in_one import losses, train_in

pytestmark = pytest.mark.full

STEPS = ("--train-iters", "4")
# Many heads, so that the probabilities of attention are a large part of what is kept.
MODEL = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "n_ctx": 64, "n_head": 16}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], int]:
    """Losses and peak memory of batches of 32 without any switch."""
    return measured(tmp_path_factory.mktemp("plain"))


def measured(folder: Path, **trainer: Any) -> tuple[list[float], int]:
    """The losses of four steps, and the most bytes that were kept for the backward pass at one time."""
    live: dict[int, int] = {}
    peak = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal peak
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in live:
            live[storage.data_ptr()] = storage.nbytes()
            weakref.finalize(storage, live.pop, storage.data_ptr(), None)
            peak = max(peak, sum(live.values()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run = train_in(folder, *STEPS, model=MODEL, **{"batch_size": 32, "attention_opt": False, **trainer})
    return losses(run), peak


def test_002_4_accumulation_equals_the_whole_batch(plain: tuple[list[float], int], tmp_path: Path) -> None:
    accumulated, _ = measured(tmp_path, batch_size=8, gradient_accumulation_steps=4)
    assert accumulated == pytest.approx(plain[0], rel=0, abs=1e-5)
    assert len(accumulated) == 4 and accumulated[-1] < accumulated[0] - 0.5


@pytest.mark.parametrize(
    ("switch", "tolerance", "saves"),
    [("gradient_checkpoint", 1e-6, 0.5), ("attention_opt", 1e-5, 0.7), ("bfloat16", 1e-2, 0.6)],
)
def test_a_switch_keeps_the_losses(
    plain: tuple[list[float], int], tmp_path: Path, switch: str, tolerance: float, saves: float
) -> None:
    switched, peak_bytes = measured(tmp_path, **{switch: True})
    assert switched == pytest.approx(plain[0], rel=0, abs=tolerance)
    assert peak_bytes < saves * plain[1]
