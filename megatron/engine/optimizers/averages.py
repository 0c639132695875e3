"""Means of weights over the updates of a run, in which older ones count less and less.

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; with exponential weights:
Morales-Brotons et al., "Exponential moving average of weights in deep learning", 2024 (arXiv 2411.18704).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK = 1 << 24  # elements


class AveragedWeights:
    """The mean of each tensor that an optimizer updates; it begins with the weights as they are.

    Args:
        masters: the tensors, flat or not.
        decay: the share of the mean that an update leaves.

    Attributes:
        is_kept: whether they are tensors of their own, which a checkpoint fills.
    """

    is_kept = True

    def __init__(self, masters: Sequence[torch.Tensor], decay: float) -> None:
        self._masters = list(masters)
        self._means = [master.detach().clone() for master in masters]
        self._numbers = {id(master): number for number, master in enumerate(masters)}
        self._decay = decay

    @property
    def means(self) -> Sequence[torch.Tensor]:
        """All of them, in the order of the tensors."""
        return self._means

    def of(self, master: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The mean of a range of a tensor that the optimizer updates. Shapes: `[count]`, a view."""
        return self._means[self._numbers[id(master)]].view(-1).narrow(0, first, count)

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again with the weights as they are."""
        torch._foreach_copy_(self._means, self._masters)

    @torch.no_grad()
    def update(self, is_applied: torch.Tensor) -> None:
        """Moves the means towards the weights, unless the update was dropped; does not wait for the device.

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
        """Exchanges the weights and their means: the optimizer's tensors hold the means, or the weights again."""
        for mean, master in zip(self._means, self._masters, strict=True):
            pairs = zip(master.detach().view(-1).split(_CHUNK), mean.view(-1).split(_CHUNK), strict=True)
            for own, other in pairs:  # in parts, since a flat master may be most of a rank's memory
                kept = own.clone()
                own.copy_(other)
                other.copy_(kept)
