"""The orthogonal factor of matrices by Newton-Schulz iterations, and the scale of an orthogonalized update.

Sources: the iteration and "simple": K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024;
"quintic": the coefficients of modded-nanogpt by F. Cesista and J. You; "polar_express": Amsel et al., "The Polar
Express", 2025 (arXiv 2505.16932), with its safety factor of 1.01. The names are Megatron-LM's.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Polynomial = tuple[float, float, float]  # a x + b x^3 + c x^5

_SMALLEST_NORM = 1e-7
_SAFETY = 1.01
_POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
COEFFICIENTS: Mapping[str, Sequence[Polynomial]] = types.MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
            (1.875, -1.25, 0.375),
        ),
    }
)

# Scale factors of an orthogonal [out, in] update. Sources: "spectral", which matches the root mean square of AdamW's
# updates up to a constant: Liu et al., "Muon is scalable for LLM training", 2025 (arXiv 2502.16982); the others:
# K. Jordan, as above, and Pethick et al., "Training deep learning models with norm-constrained LMOs", 2025 (arXiv
# 2502.07529).
SCALES: Mapping[str, Callable[[int, int], float]] = types.MappingProxyType(
    {
        "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
        "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
        "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    }
)


def polynomials(kind: str, steps: int) -> Iterator[Polynomial]:
    """The polynomial of each iteration; the last one of a kind is repeated."""
    coefficients = COEFFICIENTS[kind]
    return (coefficients[min(number, len(coefficients) - 1)] for number in range(steps))


def orthogonalized(matrices: torch.Tensor, kind: str, steps: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Orthogonalizes matrices: their singular values become close to 1.

    Shapes: `[n, r, c]` to the same, in the dtype of the input.

    Args:
        kind: one of `COEFFICIENTS`.
        dtype: of the computation.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).to(dtype)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for a, b, c in polynomials(kind, steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)
