"""The scale of a micro-batch's loss, and its totals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.data.loader import Batch
from megatron.engine.passes.step_loss import StepLoss
from megatron.model.interface.step_context import StepSettings
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import Axis, ParallelMesh

MESH = ParallelMesh.single()
TOKENS = np.arange(8, dtype=np.int64).reshape(2, 4)


def batch(counted: int) -> Batch:
    mask = (np.arange(4) < counted).astype(np.float32)[None].repeat(2, 0)
    return Batch(TOKENS, TOKENS + 1, mask, np.array([5, 6]), None)


def test_gradients_are_of_the_mean_over_all_tokens_of_the_batch() -> None:
    objective = LanguageModelObjective(Axis.single("tp"), 10)
    losses = StepLoss(objective, StepSettings(), MESH, loss_scale=8.0, micro_batches=2)
    batches = losses.prepare([batch(1), batch(4)], with_inputs=True, with_targets=True)
    logits = [torch.randn(2, 4, 10, requires_grad=True) for _ in batches]
    for outputs, each in zip(logits, batches, strict=True):
        (losses.loss(outputs, each.targets) * losses.backward_scale).backward()
    whole = torch.cat([logits[0].detach()[:, :1].flatten(0, 1), logits[1].detach().flatten(0, 1)]).requires_grad_()
    labels = torch.from_numpy(np.concatenate([TOKENS[:, :1].ravel(), TOKENS.ravel()]) + 1)
    expected = torch.nn.functional.cross_entropy(whole, labels)
    (expected * 8.0).backward()
    torch.testing.assert_close(logits[1].grad.flatten(0, 1), whole.grad[2:])
    loss_sum, tokens = losses.totals.over_ranks(MESH)[:2].tolist()
    assert (loss_sum / tokens, tokens) == (pytest.approx(expected.item()), 10)


def test_ranks_without_the_head_copy_no_targets() -> None:
    objective = LanguageModelObjective(Axis.single("tp"), 10)
    losses = StepLoss(objective, StepSettings(), MESH, 1.0, 1)
    (only,) = losses.prepare([batch(4)], with_inputs=False, with_targets=False)
    assert (only.inputs, only.targets, only.shape) == ((), (), (2, 4))
    assert losses.prepare([], with_inputs=True, with_targets=True) == []
