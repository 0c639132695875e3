"""What the routers of a network did: figures of a step or an interval, and a warning when one of them collapses."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.model.blocks.router import (
    BALANCE_LOSS,
    ENTROPY,
    PASSES,
    Z_LOSS,
    dropped_tokens,
    expert_tokens,
    layers_of,
)

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


@dataclass(frozen=True)
class RoutingFigures:
    """Figures of a step or an interval of a network with experts, over all its routed layers.

    Attributes:
        load_balancing_loss: mean over layers and micro-batches, without its coefficient; 1 for an even load.
        z_loss: the same of the router's z-loss.
        entropy: mean entropy of a token's router probabilities, in nats; log(experts) for a router without preference.
        largest_load: tokens of the busiest expert of any layer over a global batch, relative to an even load.
        mean_largest_load: the same for the busiest expert of each layer, mean over the layers.
        idle_experts: experts that no token of the global batch chose, all layers together.
        dropped_ratio: share of the choices of all layers that experts did not take; None without a capacity.
        layers: the same layer by layer, by index.
    """

    load_balancing_loss: float
    z_loss: float
    entropy: float
    largest_load: float
    mean_largest_load: float
    idle_experts: float
    dropped_ratio: float | None = None
    layers: Mapping[int, LayerRouting] = field(default_factory=dict)

    @property
    def by_label(self) -> dict[str, float]:
        """The figures of all layers by the names that logs show."""
        figures = {
            "load balancing loss": self.load_balancing_loss,
            "router z loss": self.z_loss,
            "router entropy": self.entropy,
            "largest expert load": self.largest_load,
            "mean largest expert load": self.mean_largest_load,
            "idle experts": self.idle_experts,
        }
        return figures if self.dropped_ratio is None else {**figures, "dropped tokens": self.dropped_ratio}


Figures = TypeVar("Figures", LayerRouting, RoutingFigures)


def routing_figures(metrics: Mapping[str, Sequence[float]]) -> RoutingFigures | None:
    """The figures of a step from the sums that its routers recorded; None without experts."""
    if PASSES not in metrics:
        return None
    passes = max(metrics[PASSES][0], 1.0)
    routed = layers_of(metrics)
    loads = {layer: metrics[expert_tokens(layer)] for layer in routed}
    dropped = {layer: metrics[name] for layer in routed if (name := dropped_tokens(layer)) in metrics}
    is_listed = sum(map(len, loads.values())) <= MOST_LISTED
    layers = {layer: _layer(tokens, dropped.get(layer), is_listed) for layer, tokens in loads.items()}
    largest = [layer.largest_load for layer in layers.values()]
    choices = math.fsum(math.fsum(tokens) for tokens in loads.values())
    return RoutingFigures(
        load_balancing_loss=metrics[BALANCE_LOSS][0] / passes,
        z_loss=metrics[Z_LOSS][0] / passes,
        entropy=metrics[ENTROPY][0] / passes,
        largest_load=max(largest),
        mean_largest_load=math.fsum(largest) / len(largest),
        idle_experts=float(sum(count == 0 for tokens in loads.values() for count in tokens)),
        dropped_ratio=sum(map(math.fsum, dropped.values())) / max(choices, 1.0) if dropped else None,
        layers=layers,
    )


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


def mean_routing(steps: Sequence[RoutingFigures]) -> RoutingFigures | None:
    """The mean of every figure over several steps of a network; None for no steps."""
    if not steps:
        return None
    layers = {index: _mean([step.layers[index] for step in steps]) for index in steps[0].layers}
    return dataclasses.replace(_mean([dataclasses.replace(step, layers={}) for step in steps]), layers=layers)


def _mean(parts: Sequence[Figures]) -> Figures:
    """The mean of every figure that the parts have, of tuples entry by entry; single experts are the last step's."""
    values = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    return dataclasses.replace(parts[0], **{name: _mean_value(of_parts) for name, of_parts in values.items()})


def _mean_value(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(math.fsum(entries) / len(entries) for entries in zip(*values, strict=True))
    return math.fsum(values) / len(values) if isinstance(values[0], float) else values[-1]


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

    def sentences(self, routing: RoutingFigures) -> Iterator[str]:
        """Takes note of a step; one sentence for each layer whose router has collapsed with it."""
        for index, layer in routing.layers.items():
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
