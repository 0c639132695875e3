"""Dropout sites of hidden states and attention, and the dropout of each in a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron.kernels.dropout_add import Dropout
from megatron.kernels.hashing import signed
from megatron.model.interface.step_context import StepContext
from megatron.parallel.rng import hidden_dropout, hidden_keys

EMBEDDING_SITE = 0  # then two per block: attention and feed-forward


class DropoutSite:
    """One application of dropout in the network.

    Args:
        number: unique number of the site.
        keys_of: `hidden_keys`, or `attention_keys` for the probabilities of a layer.
    """

    def __init__(self, number: int, keys_of: Callable[[int, int], tuple[int, int]] = hidden_keys) -> None:
        self._number, self._keys_of = number, keys_of
        self._seed: int | None = None
        self._keys = (0, 0)
        self._tensor: torch.Tensor | None = None

    def keys(self, seed: int) -> tuple[int, int] | torch.Tensor:
        """The hash keys of a seed; in a compiled program, after `hold_keys`, a tensor `[2]` int64."""
        if seed != self._seed:
            self._seed, self._keys, self._tensor = seed, self._keys_of(seed, self._number), None
        return self._tensor if self._tensor is not None and torch.compiler.is_compiling() else self._keys

    def hold_keys(self, seed: int, device: torch.device) -> None:
        """Keeps the keys of a seed on the device as well, so that one compiled program serves all sites."""
        first, second = self.keys(seed)
        self._tensor = torch.tensor([first, signed(int(second), 64)], device=device)


def dropout_at(site: DropoutSite, probability: float, hidden: torch.Tensor, context: StepContext) -> Dropout | None:
    """The dropout of a site in training; None for none.

    Shapes: hidden `[b, s/t, h]` or `[b * s, h]`; rows of the result as those of hidden.
    """
    if probability == 0:
        return None
    rows = hidden.shape[:-1]
    length = rows.numel() // context.sample_ids.shape[0]
    dropout = hidden_dropout(
        probability,
        keys=site.keys(context.seed),
        sample_ids=context.sample_ids.to(hidden.device),
        length=length,
        first_position=context.first_position(length),
        positions=context.hidden_positions(length),
    )
    return None if dropout is None else dataclasses.replace(dropout, rows=dropout.rows.view(rows))
