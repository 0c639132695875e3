"""The router of a mixture of experts: the choice of experts for each token, their weights, and the router's losses.

Statistics of the routing are recorded with every training step under the names that `router_metric_sizes` lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.config.architecture.feed_forward import SAMPLE
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.step_state import StepState
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate
from megatron.parallel.tensor.collectives import gather_from

# Names of the recorded statistics. Each is summed over layers, micro-batches and ranks.
BALANCE_LOSS = "router_balance_loss"
Z_LOSS = "router_z_loss"
ENTROPY = "router_entropy"
PASSES = "router_passes"

_EXPERT_TOKENS = "router_expert_tokens"
_DROPPED_TOKENS = "router_dropped_tokens"
_ROUTER_LOSS = "router_loss"
_SMALLEST_SUM = 1.0e-20


class Routing(NamedTuple):
    """The choice of experts; a tuple, so that ZeRO-3 finds the tensors whose gradients trigger its hooks.

    Shapes: logits `[n, e]` float32 for n tokens and e experts; experts `[n, k]` int64; weights `[n, k]` float32.
    """

    logits: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


class Router(StepState):
    """Scores every expert for every token and chooses the best k, in float32 also in a half-precision network.

    With groups, a token chooses only from the few groups whose best experts have the largest sum of scores. With
    --moe-router-enable-expert-bias, a bias is added to the scores for the choice, but not to the weights. After every
    step it rises by a fixed rate for experts with fewer tokens than the mean over the global batch, and falls for the
    others: this balances the load without a loss that competes with the main one.

    The matrix is replicated over the tensor-parallel axis. Its ranks have bitwise equal hidden states, since those come
    from an all-reduce, and so choose the same experts. With sequence parallelism each rank scores its own tokens, and
    the scores are gathered.

    Shapes: hidden `[b, s/t, h]` or `[n, h]`; weight `[e, h]`; bias, expert_bias and expert_shares `[e]`.

    Attributes:
        bias: the learned bias of the logits; None without --moe-router-bias.
        expert_bias: the bias of the scores for the choice; None without --moe-router-enable-expert-bias.
        expert_shares: the share of each expert in the choices of the last step, used by the next step's loss if that
            balances the global batch; otherwise None.

    Source: Shazeer et al., "Outrageously large neural networks", 2017, section 2.1 (without its noise); weights: Jiang
    et al., "Mixtral of experts", 2024, section 2.1 (softmax over the chosen); Fedus et al., "Switch transformers",
    2022, equation 1 (softmax over all); DeepSeek-AI, "DeepSeek-V3", 2024, equations 13 to 16 (sigmoid, bias); Wang et
    al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024, algorithm 1 (bias).
    """

    expert_bias: torch.Tensor | None
    expert_shares: torch.Tensor | None

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int = 0) -> None:
        super().__init__()
        self.top_k, self.tp = config.moe_router_topk, mesh.tp
        self.is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.keeps_scores = config.keeps_scores
        self.scale = config.moe_router_topk_scaling_factor
        self.groups, self.group_top_k = config.moe_router_num_groups, config.moe_router_group_topk or 0
        self.scored_experts = config.moe_router_group_scored_experts
        self.counts_name, self.bias_rate = expert_tokens(layer), config.moe_router_bias_update_rate
        experts = Dimension("experts", config.experts_of(layer))
        dimensions, summed_over = (experts, Dimension("hidden", config.hidden_size)), (mesh.sequence_parallel,)
        spec = ShardSpec(dimensions, is_matrix=True, summed_over=summed_over)
        self.weight = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)
        self.bias: nn.Parameter | None = None
        if config.moe_router_bias:
            of_bias = ShardSpec((experts,), summed_over=summed_over)
            self.bias = annotate(nn.Parameter(torch.zeros(of_bias.local_shape, device=mesh.device)), of_bias)
        self.register_buffer("expert_bias", None)
        self.register_buffer("expert_shares", None)
        zeros, of_experts = torch.zeros(experts.size, device=mesh.device), ShardSpec((experts,))
        if config.moe_router_enable_expert_bias:
            self.add_state("expert_bias", zeros, of_experts)
        if config.balances_global_batch:
            self.add_state("expert_shares", zeros + 1 / experts.size, of_experts, is_optional=True)

    def forward(self, hidden: torch.Tensor, splits_sequence: bool = False) -> Routing:
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(hidden.float(), self.weight.float(), bias)  # [b, s/t, e]
        if splits_sequence:
            logits = gather_from(logits, self.tp, dimension=1)
        logits = logits.flatten(0, -2)  # [n, e]
        experts = self._preferences(logits.detach()).topk(self.top_k, dim=-1).indices  # [n, k]
        weights = self._weights(logits, experts)
        return Routing(logits, experts, weights if self.scale == 1.0 else weights * self.scale)

    @torch.no_grad()
    def after_step(self, totals: Mapping[str, torch.Tensor], is_applied: torch.Tensor) -> None:
        """Updates the bias and the shares by the load of a step."""
        counts = totals[self.counts_name]
        if self.expert_bias is not None:
            direction = (counts.mean() - counts).sign() * is_applied
            self.expert_bias.add_(direction.to(torch.float32), alpha=self.bias_rate)
        if self.expert_shares is not None:
            shares = (counts / counts.sum()).to(torch.float32)
            self.expert_shares.copy_(torch.where(is_applied, shares, self.expert_shares))

    def _preferences(self, logits: torch.Tensor) -> torch.Tensor:
        """The values that experts are chosen by. Shapes: `[n, e]` to the same."""
        if self.expert_bias is None and self.groups is None:
            return logits  # in the order of the scores, but without the ties of rounded sigmoids
        scores = logits
        if self.is_sigmoid:
            scores = logits.sigmoid()
        elif self.keeps_scores or self.expert_bias is not None:
            scores = logits.softmax(dim=-1)
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if self.groups is None:
            return scores
        return limited_to_groups(scores, self.groups, self.group_top_k, self.scored_experts)

    def _weights(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights of the chosen experts. Shapes: `[n, e]` and `[n, k]` to `[n, k]`."""
        chosen = logits.gather(1, experts)
        if self.is_sigmoid:
            scores = chosen.sigmoid()
            return scores if self.keeps_scores else scores / (scores.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        if self.keeps_scores:
            return (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp()
        return chosen.softmax(dim=-1)


def limited_to_groups(scores: torch.Tensor, groups: int, chosen: int, best: int) -> torch.Tensor:
    """Sets the scores of experts outside a token's best groups to -inf.

    Groups are ranked by the sum of their best experts' scores.

    Shapes: `[n, e]` to the same.

    Args:
        groups: number of groups of consecutive experts, of equal size.
        chosen: number of groups per token.
        best: number of experts per group that count.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2 (a group counts by its best expert); DeepSeek-AI,
    "DeepSeek-V3", 2024, section 2.1.2 (node-limited routing, several experts); NVIDIA Megatron-LM
    `megatron/core/transformer/moe/moe_utils.py`, `group_limited_topk`.
    """
    grouped = scores.unflatten(-1, (groups, -1))  # [n, g, e/g]
    group_scores = grouped.topk(best, dim=-1).values.sum(dim=-1)  # [n, g]
    is_open = torch.zeros_like(group_scores, dtype=torch.bool)
    is_open.scatter_(-1, group_scores.topk(chosen, dim=-1).indices, True)
    return grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True)
class ExpertLoad:
    """The number of tokens that chose each expert.

    Shapes: counts, dropped and last_shares `[e]`.

    Attributes:
        counts: number of this rank's tokens, per expert.
        dropped: number of these that the expert dropped; None without a capacity.
        last_shares: see `Router.expert_shares`.
    """

    counts: torch.Tensor
    dropped: torch.Tensor | None = None
    last_shares: torch.Tensor | None = None


class RouterLosses:
    """The losses on the routing of one layer, and its statistics.

    All are means over the tokens, including padding and tokens without a loss, since the router handles them like any
    others. The load-balancing loss is a sum of products of two means: of the choices, which are constants for the
    gradient, and of the probabilities. Both are taken over the scope (--moe-aux-loss-scope):

    * a micro-batch: the loss depends on the micro-batch size, but not on the layout;
    * a sample: it depends on neither;
    * the global batch: it depends on neither. The choices of later micro-batches are not available yet, so the loss of
      a step uses the choices of the step before, which are state and saved in checkpoints (initially an even load).
      Given these it is linear in the probabilities, so that the mean of the micro-batches' losses and gradients is
      exactly that of the global batch.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.by_sample = config.moe_aux_loss_scope == SAMPLE
        self.top_k = config.moe_router_topk
        self.chooses_by_score = not config.moe_router_enable_expert_bias and config.moe_router_num_groups is None
        self.balance_coefficient = config.moe_aux_loss_coeff
        self.z_coefficient = config.moe_z_loss_coeff

    def attach(
        self,
        hidden: torch.Tensor,
        routing: Routing,
        load: ExpertLoad,
        losses: AuxiliaryLosses,
        split: SequenceSplit | None = None,
    ) -> torch.Tensor:
        """Returns `hidden` with the losses attached, and records the statistics. Shapes: hidden `[b, s, h]`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.balance_coefficient > 0):
            probabilities = router_probabilities(routing.logits, self.is_sigmoid)
            balance = self._balance(probabilities, routing, load, len(hidden), split)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.z_coefficient > 0):
            z = z_loss(routing.logits)
        self._record(losses, probabilities.detach(), load, balance, z)
        loss = self.balance_coefficient * balance + self.z_coefficient * z
        return losses.attach(hidden, _ROUTER_LOSS, self.layer, loss) if loss.requires_grad else hidden

    def _balance(
        self,
        probabilities: torch.Tensor,
        routing: Routing,
        load: ExpertLoad,
        samples: int,
        split: SequenceSplit | None,
    ) -> torch.Tensor:
        """The load-balancing loss; its mean over ranks that share samples equals the loss of whole samples, since it is
        linear in the probabilities.
        """
        if load.last_shares is not None:
            return balance_loss(probabilities, load.last_shares)
        counts = load.counts
        if self.by_sample or not self.chooses_by_score:
            # Choices by scores alone: the loss must not work against the bias or the limit to groups.
            best = routing.experts if self.chooses_by_score else routing.logits.detach().topk(self.top_k).indices
            chosen = best.view(samples if self.by_sample else 1, -1)
            counts = counts.new_zeros(len(chosen), counts.numel())
            counts = counts.scatter_add_(1, chosen, torch.ones_like(chosen))  # [b, e]
        return balance_loss(probabilities, counts if split is None else split.summed(counts))

    def _record(
        self,
        losses: AuxiliaryLosses,
        probabilities: torch.Tensor,
        load: ExpertLoad,
        balance: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        entropy = torch.special.entr(probabilities).sum(dim=-1).mean()
        values = {BALANCE_LOSS: balance, Z_LOSS: z, ENTROPY: entropy, PASSES: torch.ones_like(entropy)}
        values[expert_tokens(self.layer)] = load.counts
        if load.dropped is not None:
            values[dropped_tokens(self.layer)] = load.dropped
        for name, value in values.items():
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
    """The load-balancing loss `e * sum_i(f_i * P_i)`: 1 for an even load, `e / k` if k experts get every token.

    `f_i` is the share of expert i in the n * k choices (constant), `P_i` its mean probability; for several samples, the
    mean of their losses.

    Shapes: probabilities `[n, e]`; counts `[e]`, or `[b, e]` for b samples of n / b tokens each; result `[]`.

    Args:
        counts: the choices, or their shares.

    Source: Fedus et al., "Switch transformers", 2022, equations 4 to 6; for k > 1 `f` is divided by k as in NVIDIA
    Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `switch_load_balancing_loss_func`; by sample: DeepSeek-AI,
    "DeepSeek-V3", 2024, equations 17 to 20.
    """
    counts = counts.view(-1, probabilities.shape[-1]).to(probabilities.dtype)
    shares = counts / counts.sum(dim=1, keepdim=True)
    means = probabilities.view(len(counts), -1, counts.shape[1]).mean(dim=1)
    return counts.shape[1] * (shares * means).sum(dim=1).mean()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of `log(sum(exp(logits)))^2` over the tokens, which keeps the logits small.

    Shapes: `[n, e]` to `[]`.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.
    """
    return logits.logsumexp(dim=-1).square().mean()


def expert_tokens(layer: int) -> str:
    """The name under which a layer records its experts' numbers of tokens. Shapes: the value is `[e]`."""
    return f"{_EXPERT_TOKENS}.{layer}"


def dropped_tokens(layer: int) -> str:
    """The name under which a layer records its experts' numbers of dropped tokens."""
    return f"{_DROPPED_TOKENS}.{layer}"


def layers_of(metrics: Collection[str]) -> list[int]:
    """The layers that have recorded the tokens of their experts, sorted."""
    prefix = f"{_EXPERT_TOKENS}."
    return sorted(int(name.removeprefix(prefix)) for name in metrics if name.startswith(prefix))


def router_metric_sizes(config: ModelConfig) -> dict[str, int]:
    """Name and length of every statistic that the routers of a network record; empty without experts."""
    layers = range(config.num_layers + config.mtp_num_layers)
    routed = [layer for layer in layers if config.has_experts(layer)]
    scalars = dict.fromkeys((BALANCE_LOSS, Z_LOSS, ENTROPY, PASSES), 1) if routed else {}
    sizes = scalars | {expert_tokens(layer): config.experts_of(layer) for layer in routed}
    if not config.drops_tokens:
        return sizes
    return sizes | {dropped_tokens(layer): config.experts_of(layer) for layer in routed}
