"""Routing statistics of a step or an interval, and a warning when a router collapses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.model.blocks.router import (
    BALANCE_LOSS,
    ENTROPY,
    PASSES,
    Z_LOSS,
    dropped_tokens,
    expert_tokens,
    layers_of,
)
from megatron.objective.metric import Metric, Reduction

ROUTING = "routing"  # the group of the metrics
MOST_LISTED = 512  # the shares of all experts are recorded with every step up to this number over all layers
EXTREMES = 4  # above it, the number of busiest and idlest experts recorded per layer
COLLAPSE_STEPS = 20
_COLLAPSE_RATIO = 0.1


@dataclass(frozen=True)
class LayerRouting:
    """The distribution of a layer's tokens over its experts.

    Attributes:
        experts: number of experts.
        largest_load: tokens of the busiest expert relative to an even load.
        effective_experts: `exp(entropy)` of the shares: the number of equally used experts with the same entropy.
        dropped_ratio: share of dropped tokens; None without a capacity.
        shares: share of each expert in the tokens; empty in a network of many experts.
        dropped_ratios: share of dropped tokens by expert; empty without a capacity, or in a network of many experts.
        busiest, idlest: largest and smallest shares by expert, in order; empty if `shares` has all.
    """

    experts: int
    largest_load: float
    effective_experts: float
    dropped_ratio: float | None = None
    shares: tuple[float, ...] = ()
    dropped_ratios: tuple[float, ...] = ()
    busiest: Mapping[int, float] = field(default_factory=dict)
    idlest: Mapping[int, float] = field(default_factory=dict)


def layers_of_step(sums: Mapping[str, Sequence[float]]) -> dict[int, LayerRouting]:
    """The routing of each layer in a step, from the sums recorded by its routers."""
    loads = {layer: sums[expert_tokens(layer)] for layer in layers_of(sums)}
    is_listed = sum(map(len, loads.values())) <= MOST_LISTED
    return {layer: _layer(tokens, sums.get(dropped_tokens(layer)), is_listed) for layer, tokens in loads.items()}


def routing_metrics(sums: Mapping[str, Sequence[float]], layers: Mapping[int, LayerRouting]) -> Iterator[Metric]:
    """The metrics of a step over all routed layers; none without experts.

    Losses and the entropy of a token's router probabilities (nats) are means over layers and micro-batches: the loss is
    1 for an even load, the entropy log(experts) for a uniform router. Loads are relative to an even load of the global
    batch: of the busiest expert of any layer, and the mean over layers of the busiest experts. Idle experts received no
    token; tokens are dropped only with a capacity.
    """
    if not layers:
        return
    for name, recorded in {"load_balancing_loss": BALANCE_LOSS, "z_loss": Z_LOSS, "entropy": ENTROPY}.items():
        yield Metric(f"{ROUTING}/{name}", sums[recorded][0], max(sums[PASSES][0], 1.0))
    largest = [layer.largest_load for layer in layers.values()]
    loads = [sums[expert_tokens(layer)] for layer in layers]
    dropped = [sums[name] for layer in layers if (name := dropped_tokens(layer)) in sums]
    choices = max(math.fsum(map(math.fsum, loads)), 1.0)
    values = {
        "largest_load": max(largest),
        "mean_largest_load": math.fsum(largest) / len(largest),
        "idle_experts": float(sum(count == 0 for tokens in loads for count in tokens)),
        "dropped_ratio": sum(map(math.fsum, dropped)) / choices if dropped else None,
    }
    for name, value in values.items():
        yield Metric(f"{ROUTING}/{name}", value)
    yield Metric(f"{ROUTING}/layers", {index: vars(layer) for index, layer in layers.items()}, reduction=Reduction.LAST)


def _layer(tokens: Sequence[float], dropped: Sequence[float] | None, is_listed: bool) -> LayerRouting:
    total = max(math.fsum(tokens), 1.0)
    shares = [count / total for count in tokens]
    entropy = -math.fsum(share * math.log(share) for share in shares if share > 0)
    ratios = [lost / max(count, 1.0) for lost, count in zip(dropped or (), tokens, strict=False)]
    order = [] if is_listed else sorted(range(len(shares)), key=shares.__getitem__)
    return LayerRouting(
        experts=len(tokens),
        largest_load=max(shares) * len(shares),
        effective_experts=math.exp(entropy),
        dropped_ratio=None if dropped is None else math.fsum(dropped) / total,
        shares=tuple(round(share, 5) for share in shares) if is_listed else (),
        dropped_ratios=tuple(round(ratio, 5) for ratio in ratios) if is_listed else (),
        busiest={expert: round(shares[expert], 5) for expert in order[: -EXTREMES - 1 : -1]},
        idlest={expert: round(shares[expert], 5) for expert in order[:EXTREMES]},
    )


class CollapseWatch:
    """Detects collapsed routers.

    If every token chose the same k of e experts, k would be in effective use; with random choices, all e. A router has
    collapsed after 20 consecutive steps with at most `k + (e - k) / 10` effective experts. It is reported once, and
    again only after a step above that.

    Args:
        top_k: experts per token.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._steps: Counter[int] = Counter()

    def sentences(self, layers: Mapping[int, LayerRouting]) -> Iterator[str]:
        """Adds a step; yields a message for each layer whose router has now collapsed."""
        for index, layer in layers.items():
            fewest = min(self._top_k, layer.experts)
            limit = fewest + _COLLAPSE_RATIO * (layer.experts - fewest)
            is_few = fewest < layer.experts and layer.effective_experts <= limit
            self._steps[index] = self._steps[index] + 1 if is_few else 0
            if self._steps[index] == COLLAPSE_STEPS:
                yield (
                    f"the router of layer {index} has collapsed: over {COLLAPSE_STEPS} steps, its tokens used only "
                    f"{layer.effective_experts:.1f} of {layer.experts} experts (effective number; the minimum is "
                    f"{fewest}, more than {limit:.1f} are expected). Use a larger --moe-aux-loss-coeff, or "
                    "--moe-router-enable-expert-bias from the start."
                )
