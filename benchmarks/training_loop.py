"""A plain training loop, and networks of transformers for it: the baselines of `train_cpu.py` and of the GPU page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from megatron.config import ModelConfig, OptimConfig
    from megatron.data.loader import Batch


class TrainingLoop:
    """AdamW with two parameter groups, gradient accumulation and clipping.

    In bf16 the network's weights are bf16, and the optimizer updates float32 copies of them.

    Args:
        network: maps tokens `[b, s]` to logits `[b, s, v]`.
        is_compiled: whether network and loss go through `torch.compile` as one function.
        autocast: the dtype in which torch's autocast computes; None for that of the weights.

    Attributes:
        on_phase: called with the phase that begins, as `Engine.on_phase` is.
    """

    def __init__(
        self,
        network: nn.Module,
        optim: OptimConfig,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        is_compiled: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.autocast = autocast
        self.network = network.to(device, dtype)
        self.device = torch.device(device)
        self._loss = torch.compile(self._plain_loss) if is_compiled else self._plain_loss
        self.clip = optim.clip_grad
        self.weights = list(network.parameters())
        self.masters = self.weights
        if dtype != torch.float32:
            self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [weight for weight in self.masters if weight.dim() > 1], "weight_decay": optim.weight_decay},
                {"params": [weight for weight in self.masters if weight.dim() <= 1], "weight_decay": 0.0},
            ],
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            fused=True,
        )

    def _plain_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        narrow = self.autocast is not None
        with torch.autocast(self.device.type, self.autocast) if narrow else contextlib.nullcontext():
            logits = self.network(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def step(self, batches: Sequence[Batch], learning_rate: float) -> torch.Tensor:
        """One optimizer step on the micro-batches; returns the loss. Does not wait for a GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        total = torch.zeros((), device=self.device)
        for batch in batches:
            self.on_phase("forward")
            tokens, labels = (
                torch.from_numpy(part).to(self.device, non_blocking=True) for part in (batch.tokens, batch.labels)
            )
            loss = self._loss(tokens, labels) / len(batches)
            self.on_phase("backward")
            loss.backward()
            self.on_phase("step")
            total += loss.detach()
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.network.zero_grad(set_to_none=True)
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return total


class TransformersNetwork(nn.Module):
    """The same architecture in the transformers library.

    Args:
        attention: the library's name of an implementation of attention.
    """

    def __init__(self, config: ModelConfig, attention: str) -> None:
        super().__init__()
        import transformers

        common = {"vocab_size": config.padded_vocab_size, "attn_implementation": attention, "use_cache": False}
        if config.uses_rope:
            self.network = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=config.hidden_size,
                    intermediate_size=config.ffn_hidden_size,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_attention_heads,
                    num_key_value_heads=config.num_query_groups,
                    max_position_embeddings=config.max_position_embeddings,
                    rms_norm_eps=config.layernorm_epsilon,
                    attention_dropout=config.attention_dropout,
                    **common,
                )
            )
            _add_hidden_dropout(self.network, config.hidden_dropout)
        else:
            self.network = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_embd=config.hidden_size,
                    n_layer=config.num_layers,
                    n_head=config.num_attention_heads,
                    n_positions=config.max_position_embeddings,
                    embd_pdrop=config.hidden_dropout,
                    attn_pdrop=config.attention_dropout,
                    resid_pdrop=config.hidden_dropout,
                    **common,
                )
            )
        self.network.train()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens `[b, s]` to logits `[b, s, v]`."""
        return self.network(tokens).logits  # type: ignore[no-any-return]


def _add_hidden_dropout(network: nn.Module, probability: float) -> None:
    """Gives the library's Llama, which has none, dropout after the embedding and after both branches of a block."""
    if probability == 0:
        return
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in ("embed_tokens", "o_proj", "down_proj"):
            module.register_forward_hook(lambda _, inputs, output: F.dropout(output, probability))
