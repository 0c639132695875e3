"""From logits to the loss that is trained on, and what it was for each source of the data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron.data.loader import Batch
from megatron.model.gpt import language_model_loss
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum


class LanguageModelObjective:
    """The loss of a micro batch; where samples say which source they are of, its share of each is noted beside it.

    Noting reads the losses that were computed anyway, so it changes nothing in the training.

    Args:
        mesh: the open mesh.
        vocab_size: tokens that count; padded logits do not.
    """

    def __init__(self, mesh: ParallelMesh, vocab_size: int) -> None:
        self.source_count = 0
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, logits: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The weighted sum of the tokens' losses.

        Shapes: logits `[b, s, v/t]`; targets: labels and weights `[b, s]`, maybe source ids `[b]`; result `[]`.
        """
        labels, weights, *sources = targets
        observe = partial(self._note, sources[0]) if sources else None
        return language_model_loss(logits, labels, weights, self._mesh.tp, self._vocab_size, observe=observe)

    def source_losses(self, batches: Sequence[Batch], token_count: int) -> tuple[tuple[float, int], ...]:
        """(Sum of the token losses, counted tokens) of every source in the global batch just done; collective.

        Empty, without any communication, when the micro batches do not say which source their samples are of.

        Args:
            batches: this rank's micro batches.
            token_count: tokens that counted in the global batch.
        """
        noted, self._noted = self._noted, []
        if not batches or batches[0].source_ids is None:
            return ()
        mesh = self._mesh
        totals = torch.zeros(2, self.source_count, dtype=torch.float64)  # loss sums, tokens
        if mesh.pp.rank == mesh.pp.size - 1:
            for source_ids, losses in noted:
                totals[0].index_add_(0, source_ids.cpu(), losses.cpu())
            for batch in batches:
                tokens = torch.from_numpy(batch.loss_mask).sum(dim=1, dtype=torch.float64)  # [b]
                totals[1].index_add_(0, torch.from_numpy(batch.source_ids), tokens)
        totals[0] *= max(token_count, 1) / (len(batches) * mesh.dp.size)  # undoes the weight of a token
        totals = all_reduce_sum(all_reduce_sum(totals.to(mesh.device), mesh.dp), mesh.pp)
        return tuple((float(loss), round(float(tokens))) for loss, tokens in totals.T.tolist())

    def _note(self, source_ids: torch.Tensor, losses: torch.Tensor) -> None:
        self._noted.append((source_ids, losses.sum(dim=1, dtype=torch.float64)))
