"""Exponential moving averages of weights.

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; with exponential weights:
Morales-Brotons et al., "Exponential moving average of weights in deep learning", 2024 (arXiv 2411.18704).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK = 1 << 24  # elements


class AveragedWeights:
    """The moving average of each tensor that an optimizer updates, initialized with the weights.

    Args:
        masters: the tensors, flat or not.
        decay: the decay of the average per update.

    Attributes:
        is_kept: the averages are separate tensors, saved in checkpoints.
    """

    is_kept = True

    def __init__(self, masters: Sequence[torch.Tensor], decay: float) -> None:
        self._masters = list(masters)
        self._means = [master.detach().clone() for master in masters]
        self._numbers = {id(master): number for number, master in enumerate(masters)}
        self._decay = decay

    @property
    def means(self) -> Sequence[torch.Tensor]:
        """All averages, in the order of the tensors."""
        return self._means

    def of(self, master: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The average of a range of one of the optimizer's tensors. Shapes: `[count]`, a view."""
        return self._means[self._numbers[id(master)]].view(-1).narrow(0, first, count)

    @torch.no_grad()
    def restart(self) -> None:
        """Resets the averages to the weights."""
        torch._foreach_copy_(self._means, self._masters)

    @torch.no_grad()
    def update(self, is_applied: torch.Tensor) -> None:
        """Moves the averages towards the weights unless the update was skipped; does not wait for the device.

        Shapes: is_applied `[]` bool.
        """
        share = is_applied.to(torch.float32) * (1.0 - self._decay)
        shares: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        for mean, master in zip(self._means, self._masters, strict=True):
            kind = mean.device, mean.dtype
            if kind not in shares:
                shares[kind] = share.to(*kind)
            mean.lerp_(master, shares[kind])

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps weights and averages; a second call swaps them back."""
        for mean, master in zip(self._means, self._masters, strict=True):
            pairs = zip(master.detach().view(-1).split(_CHUNK), mean.view(-1).split(_CHUNK), strict=True)
            for weights, average in pairs:  # in chunks, since a flat master may be most of a rank's memory
                saved = weights.clone()
                weights.copy_(average)
                average.copy_(saved)
