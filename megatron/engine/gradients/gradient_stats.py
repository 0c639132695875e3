"""Statistics of a step's gradients besides their global norm, measured on the device after reduction.

The gradient noise scale needs the squared norm of the gradient at two batch sizes: the global batch and a micro-batch.
It is measured on block matrices whose gradient on each rank covers all tokens of a micro-batch in every layout, which
excludes experts, routers and projections to latents.

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
    """The sum over this rank's micro-batches of the squared norm of their gradients.

    Args:
        parameters: the parameters to measure.
        implementation: of the norm.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], on_device: torch.device, implementation: Implementation
    ) -> None:
        self._measured = frozenset(map(id, parameters))
        self._implementation = implementation
        self._sum = torch.zeros((), dtype=torch.float64, device=on_device)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the gradients of a backward pass, before they are accumulated."""
        gradients = [each.grad for each in parameters if id(each) in self._measured and each.grad is not None]
        if gradients:
            self._sum += multi_tensor.square_sum(gradients, implementation=self._implementation)

    def take(self) -> torch.Tensor:
        """Returns the sum and resets it. Shapes: `[]` float64."""
        taken = self._sum.clone()
        self._sum.zero_()
        return taken


class NoiseEstimate(NamedTuple):
    """Unbiased estimates from one step; average them over steps before dividing them.

    Attributes:
        noise: the trace of the covariance of a single sample's gradient.
        signal: the squared norm of the gradient of all data.
    """

    noise: float
    signal: float

    @classmethod
    def of(cls, small: float, large: float, small_samples: int, large_samples: int) -> NoiseEstimate | None:
        """The estimate from the mean squared norms at two batch sizes; None if they are equal."""
        if small_samples >= large_samples:
            return None
        noise = (small - large) / (1.0 / small_samples - 1.0 / large_samples)
        signal = (large_samples * large - small_samples * small) / (large_samples - small_samples)
        return cls(noise, signal)


class GradientStats:
    """Measures the gradients of each step.

    Args:
        layers: global names of the layers of the whole network.
        measures: a subset of `NORMS`, `ZEROS` and `NOISE`.
        gradients: the accumulator of a step.
        matrices: the parameters whose noise is measured, among those that this rank counts in the norm.

    Attributes:
        layers: the argument.
        sizes: number of values of each measure, in order.
    """

    def __init__(
        self,
        layers: Sequence[str],
        measures: Collection[str],
        gradients: GradientSum,
        matrices: Iterable[nn.Parameter],
        mesh: ParallelMesh,
    ) -> None:
        self.layers = layers
        sizes = {NORMS: len(layers), ZEROS: 1, NOISE: 2}
        self.sizes: Mapping[str, int] = {kind: size for kind, size in sizes.items() if kind in measures}
        self._gradients, self._mesh = gradients, mesh
        measured = list(matrices)
        self._matrices = frozenset(map(id, measured))
        self._squares: MicroBatchSquares | None = None
        if NOISE in measures:
            self._squares = MicroBatchSquares(measured, mesh.device, mesh.kernels.optimizer)
            gradients.before_add = self._squares.add
        self._layer_indices: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def measure(self, micro_batches: int, scale: float | torch.Tensor) -> torch.Tensor:
        """Measures reduced, unclipped gradients without the loss scale: the norm of each layer, the number of zeros,
        and the mean squared norms of a micro-batch and of the global batch; collective over all ranks.

        Args:
            micro_batches: number of this rank's micro-batches in the step.
            scale: the loss scale in fp16, else 1.

        Shapes: result `[sum of sizes]` float64.
        """
        device = self._mesh.device
        counted = self._gradients.by_parameter()
        layers, is_matrix = self._indices_of([parameter for parameter, _ in counted])
        stats = {kind: torch.zeros(size, dtype=torch.float64, device=device) for kind, size in self.sizes.items()}
        if counted and (NORMS in stats or NOISE in stats):
            norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for _, part in counted])
            squares = norms.to(device).square() / scale**2
            if NORMS in stats:
                stats[NORMS].index_add_(0, layers, squares)
            if NOISE in stats:
                stats[NOISE][1] = squares.dot(is_matrix)
        if counted and ZEROS in stats:
            nonzeros = torch.stack([torch.count_nonzero(part) for _, part in counted]).sum()
            stats[ZEROS] += sum(part.numel() for _, part in counted) - nonzeros.to(device)
        if self._squares is not None:
            stats[NOISE][0] = self._squares.take() * (micro_batches / self._mesh.gradient.size) / scale**2
        sums = self._summed(torch.cat([*stats.values()]))
        if NORMS in stats:
            sums[: len(self.layers)].sqrt_()
        return sums

    def metrics(self, values: torch.Tensor, micro_batch_size: int, global_batch_size: int) -> Iterator[Metric]:
        """The metrics of a step, from the result of `measure` on the host. Shapes: values at least as long."""
        sizes = list(self.sizes.values())
        parts = {kind: part.tolist() for kind, part in zip(self.sizes, values[: sum(sizes)].split(sizes), strict=True)}
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
        """The sums over the ranks that count parts. Shapes: `[sum of sizes]`; micro-batch squares at -2."""
        if self._gradients.divided_over is not None:
            all_reduce_sum(sums, self._gradients.divided_over)
        elif NOISE in self.sizes and self._mesh.gradient.size > 1:
            sums[-2:-1] = all_reduce_sum(sums[-2:-1].clone(), self._mesh.gradient)
        return all_reduce_sum(sums, self._mesh.model)

    def _indices_of(self, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each parameter's layer, and 1 if noise is measured on it, else 0; every call passes the same parameters."""
        if self._layer_indices is None:
            indices = {name: index for index, name in enumerate(self.layers)}
            layers = [layer_of(each.global_name, indices) for each in parameters]  # type: ignore[attr-defined]
            are_matrices = [float(id(parameter) in self._matrices) for parameter in parameters]
            device = self._mesh.device
            self._layer_indices = (
                torch.tensor(layers, dtype=torch.int64, device=device),
                torch.tensor(are_matrices, dtype=torch.float64, device=device),
            )
        return self._layer_indices


def layer_of(name: str, layers: Mapping[str, int]) -> int:
    """The index of a parameter's layer: the one whose name is the longest prefix among `a.b.c`, `a.b` and `a`."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(layers[prefix] for prefix in prefixes if prefix in layers)
