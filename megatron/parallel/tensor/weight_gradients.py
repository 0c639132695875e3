"""Weight gradients that zero-bubble pipeline schedules defer, or that their products add to the accumulated sums.

The previous stage waits for the input gradient; the weight gradient is needed only at the end of the step. A schedule
that separates them opens the queue of its layers during a backward pass, and runs the collected work later.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from megatron.kernels.float8 import Float8, weight_gradient

Work = Callable[[], None]
Gradients = tuple[torch.Tensor | None, ...]
# Adds the product of two matrices, `[o, n]` and `[n, i]`, to the accumulated gradient of a parameter `[o, i]`; returns
# False if the gradient must be computed separately.
AddProduct = Callable[[nn.Parameter, torch.Tensor, torch.Tensor], bool]
# Minimum size of a weight whose gradient is added by its product: below, the Python function costs more than the pass
# over memory that it saves. Measured on a CPU; estimated for a GPU, from 40 microseconds of host time.
FEWEST_ADDED_CPU, FEWEST_ADDED_GPU = 1 << 19, 1 << 22


class WeightGradientQueue:
    """Collects the deferred weight gradients of backward passes, and holds the function that adds products to sums.

    Attributes:
        add_product: adds to the sum; None if autograd gets all gradients.
    """

    def __init__(self) -> None:
        self.add_product: AddProduct | None = None
        self._collected: list[Work] | None = None

    @property
    def is_open(self) -> bool:
        return self._collected is not None

    def open(self) -> None:
        """Defers the weight gradients of the next backward pass."""
        self._collected = []

    def add(self, work: Work) -> None:
        """Adds the work that computes the gradients of one layer; the queue must be open."""
        if self._collected is None:
            raise RuntimeError("the queue of weight gradients is closed")
        self._collected.append(work)

    def close(self) -> list[Work]:
        """Returns the collected work; calling each item once adds its gradients to `.grad`."""
        collected, self._collected = self._collected, None
        return collected or []


def add_by_product(modules: Iterable[nn.Module], add_product: AddProduct) -> None:
    """Adds the gradients of large weights to their sums by the matrix products that compute them, if possible."""
    for module in modules:
        weight = getattr(module, "weight", None)
        if hasattr(module, "queue") and isinstance(weight, nn.Parameter) and weight.requires_grad and _is_large(weight):
            module.queue = module.queue or WeightGradientQueue()  # type: ignore[assignment]
            module.queue.add_product = add_product  # type: ignore[union-attr]


def _is_large(weight: torch.Tensor) -> bool:
    """Returns True if adding a weight's gradient by its product pays off."""
    return weight.numel() >= (FEWEST_ADDED_CPU if weight.device.type == "cpu" else FEWEST_ADDED_GPU)


def gradient_or_none(
    queue: WeightGradientQueue | None,
    weight: nn.Parameter,
    x: torch.Tensor,
    gradient: torch.Tensor,
    float8: Float8 | None,
) -> torch.Tensor | None:
    """The gradient of the weight of a product, or None if it has been added to its sum.

    Shapes: weight `[o, i]`, x `[..., i]`, gradient `[..., o]`.
    """
    if queue is not None and queue.add_product is not None and float8 is None and _is_large(weight):
        columns, rows = gradient.reshape(-1, gradient.shape[-1]).t(), x.reshape(-1, x.shape[-1])
        if queue.add_product(weight, columns, rows):
            return None
    return weight_gradient(x, gradient, weight.dtype, float8)


def now_or_later(
    queue: WeightGradientQueue | None, parameters: Sequence[nn.Parameter | None], compute: Callable[[], Gradients]
) -> Gradients:
    """The gradients of parameters, or None for each if an open queue adds them to `.grad` later."""
    if queue is None or not queue.is_open:
        return compute()

    @torch.no_grad()
    def later() -> None:
        for parameter, value in zip(parameters, compute(), strict=True):
            if parameter is not None and value is not None:
                parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)

    queue.add(later)
    return (None,) * len(parameters)
