"""Steps of an optimizer of which every other is dropped by a flag, beside a twin that is never asked for those."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from megatron.kernels.optimizer import can_skip, update


def steps_with_a_twin(
    optimizer_of: Callable[[nn.Parameter], torch.optim.Optimizer],
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The state of the weight after each of four steps, and that of its twin; both weights must be equal."""
    weight, twin = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    ours, theirs = optimizer_of(weight), optimizer_of(twin)
    assert can_skip(ours)
    for is_dropped in (True, False, True, False):
        gradient = torch.randn(6)
        weight.grad, twin.grad = gradient * math.nan if is_dropped else gradient.clone(), gradient
        update(ours, skip=torch.tensor(float(is_dropped)))
        if not is_dropped:
            update(theirs)
        assert torch.equal(weight, twin)
        yield ours.state[weight], theirs.state.get(twin, {})
