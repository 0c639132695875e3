"""What a report asks of the gradients of a step besides their norm, measured on the device once they are reduced.

The noise scale needs the squared norm of a gradient at two batch sizes: the global batch, and the micro-batches that
make it up. It is measured on those matrices of blocks of which every rank has the whole gradient of its own samples,
whatever the layout: on no experts, routers and projections down to latents.

Source: McCandlish et al., "An empirical model of large-batch training", 2018 (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.gradients.gradient_sum import GradientSum
from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.objective.metric import Metric, Reduction, metrics_of
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum

NORMS, ZEROS, NOISE = "norms", "zeros", "noise"


class MicroBatchSquares:
    """The sum of the squared norms of the gradients of single micro-batches, on this rank.

    Args:
        parameters: those that count.
        implementation: of the norm.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], on_device: torch.device, implementation: Implementation
    ) -> None:
        self._chosen = frozenset(map(id, parameters))
        self._implementation = implementation
        self._sum = torch.zeros((), dtype=torch.float64, device=on_device)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds what a backward pass has left of some parameters, before anything is added to it."""
        gradients = [each.grad for each in parameters if id(each) in self._chosen and each.grad is not None]
        if gradients:
            self._sum += multi_tensor.square_sum(gradients, implementation=self._implementation)

    def take(self) -> torch.Tensor:
        """The sum since the last call. Shapes: `[]` float64."""
        taken = self._sum.clone()
        self._sum.zero_()
        return taken


class NoiseEstimate(NamedTuple):
    """Unbiased estimates of one step, to be averaged over steps before they are divided.

    Attributes:
        noise: the trace of the covariance of the gradient of a sample.
        signal: the squared norm of the gradient of all data.
    """

    noise: float
    signal: float

    @classmethod
    def of(cls, small: float, large: float, small_samples: int, large_samples: int) -> NoiseEstimate | None:
        """From the mean squared norm at two batch sizes; None if these are one."""
        if small_samples >= large_samples:
            return None
        noise = (small - large) / (1.0 / small_samples - 1.0 / large_samples)
        signal = (large_samples * large - small_samples * small) / (large_samples - small_samples)
        return cls(noise, signal)


class GradientStats:
    """Measures the gradients of each step.

    Args:
        layers: global names of the layers of the whole network.
        wanted: which of `NORMS`, `ZEROS` and `NOISE` are measured.
        gradients: of a step.
        matrices: the parameters on which the noise is measured, of those that this rank counts in the norm.

    Attributes:
        layers: as given.
        sizes: number of figures of each kind, in their order.
    """

    def __init__(
        self,
        layers: Sequence[str],
        wanted: Collection[str],
        gradients: GradientSum,
        matrices: Iterable[nn.Parameter],
        mesh: ParallelMesh,
    ) -> None:
        self.layers = layers
        sizes = {NORMS: len(layers), ZEROS: 1, NOISE: 2}
        self.sizes: Mapping[str, int] = {kind: size for kind, size in sizes.items() if kind in wanted}
        self._gradients, self._mesh = gradients, mesh
        chosen = list(matrices)
        self._matrices = frozenset(map(id, chosen))
        self._squares: MicroBatchSquares | None = None
        if NOISE in wanted:
            self._squares = MicroBatchSquares(chosen, mesh.device, mesh.kernels.optimizer)
            gradients.watcher = self._squares.add
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def measure(self, micro_batches: int, scale: float | torch.Tensor) -> torch.Tensor:
        """The figures of the step whose gradients are reduced and not yet clipped, without the loss scale: the norm of
        each layer, the number of zeros, and the mean squared norm of a micro-batch and that of the global batch;
        collective over all ranks.

        Args:
            micro_batches: how many of them this rank has trained on.
            scale: the loss scale in fp16, else 1.

        Shapes: result `[sum of sizes]` float64.
        """
        device = self._mesh.device
        counted = self._gradients.by_parameter()
        layers, is_matrix = self._places_of([parameter for parameter, _ in counted])
        figures = {kind: torch.zeros(size, dtype=torch.float64, device=device) for kind, size in self.sizes.items()}
        if counted and (NORMS in figures or NOISE in figures):
            norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for _, part in counted])
            squares = norms.to(device).square() / scale**2
            if NORMS in figures:
                figures[NORMS].index_add_(0, layers, squares)
            if NOISE in figures:
                figures[NOISE][1] = squares.dot(is_matrix)
        if counted and ZEROS in figures:
            others = torch.stack([torch.count_nonzero(part) for _, part in counted]).sum()
            figures[ZEROS] += sum(part.numel() for _, part in counted) - others.to(device)
        if self._squares is not None:
            figures[NOISE][0] = self._squares.take() * (micro_batches / self._mesh.gradient.size) / scale**2
        sums = self._summed(torch.cat([*figures.values()]))
        if NORMS in figures:
            sums[: len(self.layers)].sqrt_()
        return sums

    def metrics(self, figures: torch.Tensor, micro_batch_size: int, global_batch_size: int) -> Iterator[Metric]:
        """The metrics of a step, from what `measure` returned, on the host. Shapes: figures at least as long."""
        sizes = list(self.sizes.values())
        parts = {kind: part.tolist() for kind, part in zip(self.sizes, figures[: sum(sizes)].split(sizes), strict=True)}
        norms = dict(zip(self.layers, parts.get(NORMS, ()), strict=False))
        yield from metrics_of({f"gradient_norms/{layer}": norm for layer, norm in norms.items()}, Reduction.LAST)
        if ZEROS in parts and math.isfinite(parts[ZEROS][0]):
            yield Metric("gradient_zeros", round(parts[ZEROS][0]), reduction=Reduction.LAST)
        if NOISE in parts:
            small, large = parts[NOISE]
            estimate = NoiseEstimate.of(small, large, micro_batch_size, global_batch_size)
            names = {} if estimate is None else {"gradient_noise": estimate.noise, "gradient_signal": estimate.signal}
            yield from metrics_of(names, Reduction.MEAN)

    def _summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Over the ranks that count parts. Shapes: `[sum of sizes]`; squares of micro-batches are the last but one."""
        if self._gradients.divided_over is not None:
            all_reduce_sum(sums, self._gradients.divided_over)
        elif NOISE in self.sizes and self._mesh.gradient.size > 1:
            sums[-2:-1] = all_reduce_sum(sums[-2:-1].clone(), self._mesh.gradient)
        return all_reduce_sum(sums, self._mesh.model)

    def _places_of(self, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer of each parameter, and whether noise is measured on it; the same parameters at every call."""
        if self._places is None:
            places = {name: place for place, name in enumerate(self.layers)}
            layers = [layer_of(parameter.global_name, places) for parameter in parameters]  # type: ignore[attr-defined]
            are_matrices = [float(id(parameter) in self._matrices) for parameter in parameters]
            device = self._mesh.device
            self._places = (
                torch.tensor(layers, dtype=torch.int64, device=device),
                torch.tensor(are_matrices, dtype=torch.float64, device=device),
            )
        return self._places


def layer_of(name: str, places: Mapping[str, int]) -> int:
    """The place of the layer that has a parameter: of `a.b.c` that of `a.b.c`, `a.b` or `a`, the longest that there
    is.
    """
    words = name.split(".")
    prefixes = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(places[prefix] for prefix in prefixes if prefix in places)
