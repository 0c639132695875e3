"""What a step's routers did: their losses, their entropy and how evenly they loaded the experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, is_expert_tokens


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
    """

    load_balancing_loss: float
    z_loss: float
    entropy: float
    largest_load: float
    mean_largest_load: float
    idle_experts: float

    @property
    def by_label(self) -> dict[str, float]:
        """The figures by the names that logs show."""
        return {
            "load balancing loss": self.load_balancing_loss,
            "router z loss": self.z_loss,
            "router entropy": self.entropy,
            "largest expert load": self.largest_load,
            "mean largest expert load": self.mean_largest_load,
            "idle experts": self.idle_experts,
        }


def routing_figures(metrics: Mapping[str, Sequence[float]]) -> RoutingFigures | None:
    """The figures of a step from the sums that its routers recorded; None without experts."""
    if PASSES not in metrics:
        return None
    passes = max(metrics[PASSES][0], 1.0)
    loads = [tokens for name, tokens in metrics.items() if is_expert_tokens(name)]
    largest = [max(tokens) * len(tokens) / max(math.fsum(tokens), 1.0) for tokens in loads]
    return RoutingFigures(
        load_balancing_loss=metrics[BALANCE_LOSS][0] / passes,
        z_loss=metrics[Z_LOSS][0] / passes,
        entropy=metrics[ENTROPY][0] / passes,
        largest_load=max(largest),
        mean_largest_load=math.fsum(largest) / len(largest),
        idle_experts=sum(count == 0 for tokens in loads for count in tokens),
    )


def mean_routing(steps: Sequence[RoutingFigures]) -> RoutingFigures | None:
    """The mean of every figure over several steps; None for no steps."""
    if not steps:
        return None
    return RoutingFigures(
        **{name: math.fsum(getattr(step, name) for step in steps) / len(steps) for name in vars(steps[0])}
    )
