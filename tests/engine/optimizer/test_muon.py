"""Muon's update: against torch's own, against a singular value decomposition, and the matrices it takes apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron.config.sections.optimizers import OptimizerFields
from megatron.engine.optimizers.muon import HeldMatrix, Muon
from megatron.engine.optimizers.orthogonalization import orthogonalized
from megatron.engine.optimizers.whole_matrices import DividedMatrix, WholeMatrices
from megatron.kernels.optimizer import build_adamw, can_skip, update
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension, ShardSpec

ALONE = Axis.single("dp")


def muon_of(weight: nn.Parameter, optim: OptimizerFields, lr: float = 0.1, spec: ShardSpec | None = None) -> Muon:
    """Muon for one parameter in one process."""
    group = {"params": [weight], "weight_decay": 0.2, "is_orthogonal": True}
    optimizer = Muon([group], None, lr, optim)
    spec = spec or ShardSpec(tuple(Dimension("size", size) for size in weight.shape), is_matrix=True)
    optimizer.connect([HeldMatrix(DividedMatrix(spec, ALONE, ((0, weight.numel()),)), weight, 0)])
    return optimizer


def spectrum(kind: str, steps: int, least: float) -> torch.Tensor:
    """What becomes of the singular values from `least` to 1 of a matrix with norm 1, nearly."""
    values = torch.logspace(math.log10(least), 0, 24, dtype=torch.float64)
    values = values / values.norm()
    left, right = (torch.linalg.qr(torch.randn(size, 24, dtype=torch.float64))[0] for size in (40, 24))
    result = orthogonalized((left * values @ right.mT).unsqueeze(0), kind, steps, torch.float64)[0]
    return torch.diagonal(left.mT @ result @ right)


@pytest.mark.parametrize(
    ("kind", "steps", "low", "high"),
    [
        ("simple", 5, 0.6, 1.3),  # around 1 by design, not to it
        ("quintic", 5, 0.8, 1.2),
        ("polar_express", 8, 0.999, 1.001),
    ],
)
def test_singular_values_come_near_one(kind: str, steps: int, low: float, high: float) -> None:
    found = spectrum(kind, steps, least=0.05)
    assert low < found.min() and found.max() < high


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(1, 3, 5), "quintic", 5).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    ("scale", "extra", "theirs"), [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_those_of_torch(scale: str, extra: float, theirs: str, nesterov: bool) -> None:
    """Momentum is a mean here and in torch, and both compute in bfloat16."""
    own, known = (nn.Parameter(torch.linspace(-1, 1, 6 * 10).view(6, 10)) for _ in range(2))
    settings = OptimizerFields(
        muon_momentum=0.9,
        muon_nesterov=nesterov,
        muon_coefficient_type="simple",
        muon_scale_mode=scale,
        muon_extra_scale_factor=extra,
        muon_dtype="bfloat16",
    )
    ours = muon_of(own, settings)
    reference = torch.optim.Muon(
        [known], lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs
    )
    for step in range(4):
        own.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        known.grad = own.grad.clone()
        ours.step()
        reference.step()
    assert (own - known).abs().max() < 5e-3 * (known - torch.linspace(-1, 1, 60).view(6, 10)).abs().max()


def test_joined_matrices_are_orthogonalised_one_by_one() -> None:
    """Queries, key and value of two groups, and their rows lie among each other."""
    dimensions = (
        Dimension("groups", 2),
        Dimension("queries, key and value", 4, parts=(2, 1, 1)),
        Dimension("head size", 3),
        Dimension("input", 5),
    )
    weight = nn.Parameter(torch.zeros(24, 5))
    weight.grad = torch.randn(24, 5)
    gradient = weight.grad.clone().view(2, 4, 3, 5)
    settings = OptimizerFields(muon_momentum=0.0, muon_scale_mode="unit_rms_norm", muon_extra_scale_factor=1.0)
    muon_of(weight, settings, lr=1.0, spec=ShardSpec(dimensions, is_matrix=True)).step()
    update = -weight.detach().view(2, 4, 3, 5)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 4)):
        matrix = gradient[:, rows].reshape(1, -1, 5)
        known = orthogonalized(matrix, "quintic", 5)[0] * math.sqrt(matrix.shape[1] / 5)
        assert torch.allclose(update[:, rows].reshape(-1, 5), known, atol=1e-6)


def test_every_expert_is_a_matrix() -> None:
    spec = ShardSpec((Dimension("experts", 3, parts=(1,) * 3), Dimension("hidden", 4), Dimension("inner", 6)))
    matrix = DividedMatrix(spec, ALONE, ((0, 72),))
    assert [part.shape for part in matrix.matrices(torch.empty(3, 4, 6))] == [(4, 6)] * 3
    assert matrix.cost == 3 * 4 * 6 * 4


def test_a_rank_that_owns_no_matrix_sends_tensors_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no others, empty ones included."""
    tensor, replicas = Axis("tp", 0, 2, (0, 1)), Axis("gradient", 3, 4, (0, 2, 4, 6))
    spec = ShardSpec((Dimension("outputs", 8, tensor), Dimension("inputs", 4)), is_matrix=True)
    matrices = [DividedMatrix(spec, replicas, tuple((rank * 4, 4) for rank in range(4)))] * 2
    devices: list[str] = []
    monkeypatch.setattr(
        torch.distributed, "all_to_all_single", lambda *tensors, **_: devices.extend(t.device.type for t in tensors[:2])
    )
    owned: list[DividedMatrix] = []
    parts = [torch.zeros(4, device="meta") for _ in matrices]
    WholeMatrices(matrices).transform(parts, lambda mine, wholes: owned.extend(mine))
    assert owned == [] and devices == ["meta"] * 8


def test_nothing_changes_before_it_is_known_where_matrices_are() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = Muon([{"params": [weight], "is_orthogonal": True}], None, 0.1, OptimizerFields())
    optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2)) and not optimizer.state


def test_a_matrix_without_a_gradient_stays_and_the_others_do_not() -> None:
    """It shares a bucket, and so the collectives, with one that has a gradient."""
    weights = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    spec = ShardSpec((Dimension("rows", 4), Dimension("columns", 6)), is_matrix=True)
    optimizer = Muon([{"params": weights, "weight_decay": 0.2, "is_orthogonal": True}], None, 0.1, OptimizerFields())
    optimizer.connect([HeldMatrix(DividedMatrix(spec, ALONE, ((0, 24),)), weight, 0) for weight in weights])
    weights[1].grad = torch.randn(4, 6)
    optimizer.step()
    alone = nn.Parameter(torch.ones(4, 6))
    alone.grad = weights[1].grad
    muon_of(alone, OptimizerFields()).step()
    assert torch.equal(weights[0], torch.ones(4, 6)) and weights[0] not in optimizer.state
    assert torch.equal(weights[1], alone) and not torch.equal(alone, torch.ones(4, 6))


def test_a_flag_keeps_a_step_from_changing_anything() -> None:
    """Neither the matrix nor what AdamW updates; the other steps are as without the flag, up to rounding."""
    spec = ShardSpec((Dimension("rows", 4), Dimension("columns", 6)), is_matrix=True)
    pairs, optimizers = [], []
    for _ in range(2):
        matrix, vector = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)), nn.Parameter(torch.ones(6))
        groups = [
            {"params": [matrix], "weight_decay": 0.2, "is_orthogonal": True},
            {"params": [vector], "weight_decay": 0.0, "eps": 1e-8},
        ]
        optimizer = Muon(groups, build_adamw(groups[1:], lr=0.1, betas=(0.9, 0.99)), 0.1, OptimizerFields())
        optimizer.connect([HeldMatrix(DividedMatrix(spec, ALONE, ((0, 24),)), matrix, 0)])
        pairs.append((matrix, vector))
        optimizers.append(optimizer)
    assert can_skip(optimizers[0])
    for is_dropped in (True, False, True, False):
        before = [weight.detach().clone() for weight in pairs[0]]
        for weight, twin in zip(*pairs, strict=True):
            gradient = torch.randn(weight.shape)
            weight.grad, twin.grad = gradient * math.nan if is_dropped else gradient.clone(), gradient
        update(optimizers[0], skip=torch.tensor(float(is_dropped)))
        if is_dropped:
            assert all(torch.equal(weight, known) for weight, known in zip(pairs[0], before, strict=True))
            continue
        update(optimizers[1])
        for weight, twin in zip(*pairs, strict=True):
            assert torch.allclose(weight, twin, rtol=0, atol=1e-7)
            for name, value in optimizers[1].state[twin].items():
                assert torch.equal(optimizers[0].state[weight][name], value), name


def test_the_flag_is_not_known_where_the_other_optimizer_does_not_know_it() -> None:
    vector = nn.Parameter(torch.ones(6))
    groups = [{"params": [vector]}]
    assert not can_skip(Muon(groups, torch.optim.AdamW(groups), 0.1, OptimizerFields()))
