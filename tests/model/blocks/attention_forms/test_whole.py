"""A network computes the same with bounded attention and with dense biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.blocks.attention_forms import whole
from megatron.model.blocks.attention_forms.form import Scoring
from megatron.model.interface.step_context import MaskKind, StepContext
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import build_gpt, tiny_config

CASES: dict[str, dict[str, Any]] = {
    "documents": {},
    "window": {"attention_window": 5},
    "every bound": {
        "attention_window": 3,
        "position_embedding_type": "alibi",
        "attention_logit_softcap": 0.5,
        "num_query_groups": 2,
    },
}
PREFIXES = torch.zeros(2, 16, dtype=torch.bool)
PREFIXES[0, :3] = PREFIXES[0, 7:12] = PREFIXES[1, :1] = PREFIXES[1, 4:16] = True


@pytest.mark.parametrize("prefixes", [None, PREFIXES], ids=["causal", "prefixes"])
@pytest.mark.parametrize("name", CASES)
def test_bounded_and_dense_attention_agree(
    name: str, prefixes: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, **CASES[name])
    network = build_gpt(config, ParallelMesh.single())
    tokens = torch.randint(0, 101, (2, 16), generator=torch.Generator().manual_seed(1))
    segments = (
        None if name == "window" and prefixes is None else torch.tensor([[0] * 7 + [1] * 9, [2] + [4] * 3 + [5] * 12])
    )
    plans, results = [], []
    for dense in (False, True):
        if dense:
            monkeypatch.setattr(whole, "bounded_plan", lambda *_, **__: None)
        context = StepContext(
            torch.arange(2),
            segment_ids=segments,
            mask=MaskKind.CAUSAL if segments is None else MaskKind.DOCUMENTS,
            prefix_mask=prefixes,
        )
        logits = network(tokens, context)
        gradients = torch.autograd.grad(logits.square().mean(), list(network.parameters()))
        results.append([logits.detach(), *gradients])
        plans.append([key[0] for key in context.shared])
    assert "attention plan" in plans[0] and "score bias" not in plans[0]
    assert "score bias" in plans[1] and "attention plan" not in plans[1]
    for bounded, reference in zip(*results, strict=True):
        torch.testing.assert_close(bounded, reference, rtol=1e-4, atol=1e-5)


def test_no_plan_for_plain_attention() -> None:
    query = torch.zeros(1, 2, 16, 4)
    plain, narrow = (Scoring(tiny_config(attention_window=width), ParallelMesh.single(), 0) for width in (None, 3))
    assert whole.bounded_plan(StepContext(torch.arange(1)), query, plain) is None
    assert whole.bounded_plan(StepContext(torch.arange(1)), query, narrow) is not None
