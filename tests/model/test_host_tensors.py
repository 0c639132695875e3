"""Nothing that forward, loss and backward compute with is made on the host and copied to the device.

A CUDA graph refuses such a copy, and without a graph the host waits for it.

A tensor that is made without a device lies on the default one, which is `meta` here: whoever copies it from there, or
computes with it and with one of the network, fails. What is made once for all micro-batches may be copied in the first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import Axis
from tests.helpers.networks import SEED, build_gpt, tiny_config

BATCH, LENGTH = 2, 12
ROTARY: dict[str, Any] = {"position_embedding_type": "rope"}
LLAMA: dict[str, Any] = {
    **ROTARY, "normalization": "RMSNorm", "activation_function": "silu", "gated_linear_unit": True,
    "num_query_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt": PLAIN,
    "gpt, dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt, alibi": {**PLAIN, "position_embedding_type": "alibi"},
    "gpt, rotary": {**PLAIN, **ROTARY},
    "llama": LLAMA,
    "llama, scaled as llama 3": {**LLAMA, "rope_scaling_type": "llama3", "rope_scaling_factor": 8.0},
    "llama, scaled by length": {**LLAMA, "rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
    "gemma, windows": {
        **LLAMA,
        "attention_window": 4,
        "rotary_base_windowed": 100.0,
        "attention_window_pattern": (1, 0),
    },
    "experts with a capacity": {**LLAMA, "num_experts": 4, "moe_expert_capacity_factor": 1.0},
}
DOCUMENTS = StepSettings(seed=SEED, factored_logits=True, mask=MaskKind.DOCUMENTS, restart_positions=True)


class _Trainer:
    """Computes the loss of micro-batches of a network and its gradients."""

    def __init__(self, changes: dict[str, Any], settings: StepSettings) -> None:
        self.network = build_gpt(tiny_config(**changes))
        self.objective, self.settings = LanguageModelObjective(Axis.single("tp"), 101), settings
        self.tokens, self.ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64), torch.arange(BATCH)
        self.segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3]) if settings.needs_segments else None
        self.targets = {"labels": self.tokens, "loss_mask": torch.ones(BATCH, LENGTH)}
        self.one = torch.ones(())

    def micro_batch(self) -> float:
        """Forward, loss and backward of one."""
        context = self.settings.context(self.ids, self.segments, first_sample=0)
        loss = self.objective(self.network(self.tokens, context), self.targets, self.one).loss_sum
        loss.backward()
        return loss.item()


@pytest.mark.parametrize("form", NETWORKS)
def test_no_tensor_of_a_micro_batch_comes_from_the_host(form: str) -> None:
    trainer = _Trainer(NETWORKS[form], StepSettings(seed=SEED, factored_logits=True))
    first = trainer.micro_batch()
    with torch.device("meta"):
        assert trainer.micro_batch() == first


@pytest.mark.parametrize("form", ["gpt", "llama"])
def test_none_of_documents_does(form: str) -> None:
    trainer = _Trainer(NETWORKS[form], DOCUMENTS)
    first = trainer.micro_batch()
    with torch.device("meta"):
        assert trainer.micro_batch() == first


def test_what_is_kept_depends_on_the_length_where_frequencies_do() -> None:
    config = tiny_config(**NETWORKS["llama, scaled by length"], rope_original_max_positions=4)
    network, settings = build_gpt(config), StepSettings(seed=SEED)
    generator = torch.Generator().manual_seed(1)
    for length in (3, 6, 12, 6):
        tokens = torch.randint(0, 101, (BATCH, length), generator=generator)
        kept = network(tokens, settings.context(torch.arange(BATCH)))
        assert torch.equal(kept, network(tokens, StepSettings(seed=SEED).context(torch.arange(BATCH))))
    assert len(settings.kept) == 3
