"""What the routers of a network did: figures of a step or an interval, and a warning when one of them collapses."""

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
MOST_LISTED = 512  # experts of all layers together whose shares are recorded with every step
EXTREMES = 4  # of each layer in a network of more, the busiest and the idlest experts that are recorded
COLLAPSE_STEPS = 20
_COLLAPSE_RATIO = 0.1


@dataclass(frozen=True)
class LayerRouting:
    """How a layer's tokens were divided over its experts.

    Attributes:
        experts: their number.
        largest_load: tokens of the busiest expert relative to an even load.
        effective_experts: the number of equally used experts that would have the same entropy: `exp(-sum(p log p))` of
            the shares p.
        dropped_ratio: share of the choices that experts did not take; None without a capacity.
        shares: the share of each expert in the choices; empty in a network of many experts.
        dropped_ratios: the share of each expert's tokens that it did not take; empty without a capacity, and as shares.
        busiest, idlest: by expert, the largest and the smallest shares, in order; empty where `shares` has all.
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
    """How each routed layer divided the tokens of a step, from the sums that its routers recorded."""
    loads = {layer: sums[expert_tokens(layer)] for layer in layers_of(sums)}
    is_listed = sum(map(len, loads.values())) <= MOST_LISTED
    return {layer: _layer(tokens, sums.get(dropped_tokens(layer)), is_listed) for layer, tokens in loads.items()}


def routing_metrics(sums: Mapping[str, Sequence[float]], layers: Mapping[int, LayerRouting]) -> Iterator[Metric]:
    """The metrics of a step, over all routed layers; none without experts.

    Losses and the entropy of a token's router probabilities, in nats, are means over layers and micro-batches: the loss
    is 1 for an even load, the entropy log(experts) for a router without preference. Loads are those of a global batch
    relative to an even one: of the busiest expert of any layer, and the mean of the busiest ones of each layer. Idle
    are experts that no token chose; dropped, the share of choices that experts did not take, which only a capacity
    makes them do.
    """
    if not layers:
        return
    for name, recorded in {"load_balancing_loss": BALANCE_LOSS, "z_loss": Z_LOSS, "entropy": ENTROPY}.items():
        yield Metric(f"{ROUTING}/{name}", sums[recorded][0], max(sums[PASSES][0], 1.0))
    largest = [layer.largest_load for layer in layers.values()]
    loads = [sums[expert_tokens(layer)] for layer in layers]
    dropped = [sums[name] for layer in layers if (name := dropped_tokens(layer)) in sums]
    choices = max(math.fsum(map(math.fsum, loads)), 1.0)
    figures = {
        "largest_load": max(largest),
        "mean_largest_load": math.fsum(largest) / len(largest),
        "idle_experts": float(sum(count == 0 for tokens in loads for count in tokens)),
        "dropped_ratio": sum(map(math.fsum, dropped)) / choices if dropped else None,
    }
    for name, value in figures.items():
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
    """Notices routers that have stopped choosing.

    If every token chose the same k of e experts, as few as k would be in effective use; if each chose at random, all e.
    A router has collapsed once it was nearer than a tenth of that way to k in 20 consecutive steps: at most
    `k + (e - k) / 10` effective experts. It is reported once, and again only after a step above that.

    Args:
        top_k: experts per token.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._steps: Counter[int] = Counter()

    def sentences(self, layers: Mapping[int, LayerRouting]) -> Iterator[str]:
        """Takes note of a step; one sentence for each layer whose router has collapsed with it."""
        for index, layer in layers.items():
            fewest = min(self._top_k, layer.experts)
            limit = fewest + _COLLAPSE_RATIO * (layer.experts - fewest)
            is_few = fewest < layer.experts and layer.effective_experts <= limit
            self._steps[index] = self._steps[index] + 1 if is_few else 0
            if self._steps[index] == COLLAPSE_STEPS:
                yield (
                    f"the router of layer {index} has collapsed: in {COLLAPSE_STEPS} steps, its tokens used as few as "
                    f"{layer.effective_experts:.1f} of {layer.experts} experts (effective number; {fewest} is the "
                    f"least, and more than {limit:.1f} are expected). Use a larger --moe-aux-loss-coeff, or "
                    "--moe-router-enable-expert-bias from the start."
                )
