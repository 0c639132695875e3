"""The router of a mixture of experts: which experts a token goes to, with which weights, and the losses on that choice.

Statistics of the routing are recorded with every training step under the names that `router_metric_sizes` lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.shard_spec import Dimension, ShardSpec, place
from megatron.parallel.tensor.collectives import gather_from

# Names of the recorded statistics. Each is summed over layers, micro-batches and ranks.
BALANCE_LOSS = "router_balance_loss"
Z_LOSS = "router_z_loss"
ENTROPY = "router_entropy"
PASSES = "router_passes"

_EXPERT_TOKENS = "router_expert_tokens"
_ROUTER_LOSS = "router_loss"
_SMALLEST_SUM = 1.0e-20


@dataclass(frozen=True)
class Routing:
    """The choice of experts.

    Shapes: logits `[n, e]` float32 for n tokens and e experts; experts `[n, k]` int64; weights `[n, k]` float32.
    """

    logits: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


class Router(nn.Module):
    """Scores every expert for every token and chooses the best k, in float32 also in a half-precision network.

    The matrix is replicated over the tensor-parallel axis. Its ranks see the same hidden states to the last bit, since
    an all-reduce made them, and so choose the same experts. With sequence parallelism each scores its own tokens, and
    the scores are gathered.

    Shapes: hidden `[b, s/t, h]` or `[n, h]`; weight `[e, h]`.

    Source: Shazeer et al., "Outrageously large neural networks", 2017, section 2.1 (without its noise); weights: Jiang
    et al., "Mixtral of experts", 2024, section 2.1 (softmax over the chosen); Fedus et al., "Switch transformers",
    2022, equation 1 (softmax over all); DeepSeek-AI, "DeepSeek-V3", 2024, equations 13 to 16 (sigmoid).
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int = 0) -> None:
        super().__init__()
        self.top_k, self.tp = config.moe_router_topk, mesh.tp
        self.is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.keeps_scores = config.moe_router_pre_softmax
        self.scale = config.moe_router_topk_scaling_factor
        dimensions = (Dimension("experts", config.experts_of(layer)), Dimension("hidden", config.hidden_size))
        spec = ShardSpec(dimensions, is_matrix=True, summed_over=(mesh.sequence_parallel,))
        self.weight = place(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)

    def forward(self, hidden: torch.Tensor, splits_sequence: bool = False) -> Routing:
        """Routes the tokens of all ranks."""
        logits = F.linear(hidden.float(), self.weight.float())  # [b, s/t, e]
        if splits_sequence:
            logits = gather_from(logits, self.tp, dimension=1)
        logits = logits.flatten(0, -2)  # [n, e]
        # by logits, which order as the scores do: a sigmoid close to 1 is rounded to ties
        experts = logits.detach().topk(self.top_k, dim=-1).indices  # [n, k]
        weights = self._weights(logits, experts)
        return Routing(logits, experts, weights if self.scale == 1.0 else weights * self.scale)

    def _weights(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights of the chosen experts. Shapes: `[n, e]` and `[n, k]` to `[n, k]`."""
        chosen = logits.gather(1, experts)
        if self.is_sigmoid:
            scores = chosen.sigmoid()
            return scores if self.keeps_scores else scores / (scores.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        if self.keeps_scores:
            return (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp()
        return chosen.softmax(dim=-1)


class RouterLosses:
    """The losses on the routing of one layer, and its statistics.

    Both losses are means over the tokens of a micro-batch, padding and tokens without a loss included,
    for the router handles those like any other. The load-balancing loss is a product of two such means; it therefore
    depends on how the global batch is cut into micro-batches, but not on the layout that trains them.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.balance_coefficient = config.moe_aux_loss_coeff
        self.z_coefficient = config.moe_z_loss_coeff

    def attach(
        self,
        hidden: torch.Tensor,
        routing: Routing,
        counts: torch.Tensor,
        losses: AuxiliaryLosses,
        split: SequenceSplit | None = None,
    ) -> torch.Tensor:
        """Returns `hidden` with the losses attached, and records the statistics.

        Shapes: hidden `[b, s, h]`; counts `[e]` int64, the tokens that each expert gets.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.balance_coefficient > 0):
            probabilities = router_probabilities(routing.logits, self.is_sigmoid)
            # Linear in the probabilities, so that the mean over ranks that share samples is that of the whole ones.
            balance = balance_loss(probabilities, counts if split is None else split.summed(counts))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.z_coefficient > 0):
            z = z_loss(routing.logits)
        self._record(losses, probabilities.detach(), counts, balance, z)
        loss = self.balance_coefficient * balance + self.z_coefficient * z
        return losses.attach(hidden, _ROUTER_LOSS, self.layer, loss) if loss.requires_grad else hidden

    def _record(
        self,
        losses: AuxiliaryLosses,
        probabilities: torch.Tensor,
        counts: torch.Tensor,
        balance: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        entropy = torch.special.entr(probabilities).sum(dim=-1).mean()
        values = {BALANCE_LOSS: balance, Z_LOSS: z, ENTROPY: entropy, PASSES: torch.ones_like(entropy)}
        for name, value in (values | {expert_tokens(self.layer): counts}).items():
            losses.record(name, self.layer, value)


def router_probabilities(logits: torch.Tensor, is_sigmoid: bool) -> torch.Tensor:
    """The scores of all experts as a distribution; sigmoids are divided by their sum.

    Shapes: `[n, e]` to the same.
    """
    if not is_sigmoid:
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)


def balance_loss(probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss `e * sum_i(f_i * P_i)`: 1 if the load is even, `e / k` if k experts get every token.

    `f_i` is the share of expert i in the n * k choices (constant), `P_i` its mean probability.

    Shapes: probabilities `[n, e]`, counts `[e]`; result `[]`.

    Source: Fedus et al., "Switch transformers", 2022, equations 4 to 6; for k > 1 `f` is divided by k as in NVIDIA
    Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `switch_load_balancing_loss_func`.
    """
    shares = counts.to(probabilities.dtype) / counts.sum()
    return counts.numel() * torch.dot(shares, probabilities.mean(dim=0))


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of `log(sum(exp(logits)))^2` over the tokens, which keeps the logits small.

    Shapes: `[n, e]` to `[]`.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.
    """
    return logits.logsumexp(dim=-1).square().mean()


def expert_tokens(layer: int) -> str:
    """The name under which a layer records how many tokens each expert got. Shapes: the value is `[e]`."""
    return f"{_EXPERT_TOKENS}.{layer}"


def is_expert_tokens(name: str) -> bool:
    """Whether a statistic is the tokens of each expert of some layer."""
    return name.startswith(f"{_EXPERT_TOKENS}.")


def router_metric_sizes(config: ModelConfig) -> dict[str, int]:
    """Name and length of every statistic that the routers of a network record; empty without experts."""
    routed = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    scalars = dict.fromkeys((BALANCE_LOSS, Z_LOSS, ENTROPY, PASSES), 1) if routed else {}
    return scalars | {expert_tokens(layer): config.experts_of(layer) for layer in routed}
