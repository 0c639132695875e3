"""Losses and gradients of the head in chunks equal those of the whole logits in float64, which are never held."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.softcap import softcapped
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor import collectives, head_loss
from megatron.parallel.tensor.head_loss import FactoredLogits, LossTerms, _chunk_rows_on_gpu, _chunks, head_losses
from tests.helpers.layouts import Layout
from tests.helpers.machines.launches import recorded
from tests.helpers.ranks import run_ranks

VOCABULARY, PADDED, FACTOR = 21, 32, 0.37
CASES = [
    (LossTerms(), None),
    (LossTerms(label_smoothing=0.1), 3.0),
    (LossTerms(z_loss_coeff=0.01), None),
    (LossTerms(0.1, 0.01), 3.0),
]


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(3, 8, 8, generator=generator), torch.randn(PADDED, 8, generator=generator)
    labels, weights = (torch.rand(3, 8, generator=generator) for _ in range(2))
    weights[0, 2:5] = weights[2] = 0.0
    return hidden.to(dtype), weight.to(dtype), (labels * VOCABULARY).long(), weights


def _expected(dtype: torch.dtype, terms: LossTerms, softcap: float | None) -> list[torch.Tensor]:
    """The losses of tokens that count, what is minimized, and the gradients of hidden states and weight."""
    hidden, weight, labels, weights = _inputs(dtype)
    hidden, weight = (part.double().requires_grad_() for part in (hidden, weight))
    logits = F.linear(hidden, weight)[..., :VOCABULARY]
    logits = (logits if softcap is None else softcapped(logits, softcap)).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(3, 8) * (weights > 0)
    smooth = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=terms.label_smoothing)
    minimized = smooth + terms.z_loss_coeff * logits.logsumexp(-1).square()
    total = (minimized.view(3, 8) * weights).sum()
    (total * FACTOR).backward()
    return [losses.detach(), total.detach(), hidden.grad, weight.grad]


def _found(
    axis: Axis,
    dtype: torch.dtype,
    terms: LossTerms,
    softcap: float | None,
    factor: float | None = FACTOR,
    chunk_rows: int | None = 4,
    splits_sequence: bool = False,
) -> list[torch.Tensor]:
    hidden, weight, labels, weights = _inputs(dtype)
    width = PADDED // axis.size
    local = hidden.chunk(axis.size, dim=1)[axis.rank].clone().requires_grad_() if splits_sequence else None
    source = hidden.requires_grad_() if local is None else local
    weight = weight[axis.rank * width :][:width].clone().requires_grad_()
    logits = FactoredLogits(hidden, weight, softcap, source)
    scale = None if factor is None else torch.tensor(factor)
    settings = {"factor": scale, "chunk_rows": chunk_rows}
    losses, gradients = head_losses(logits, labels, weights, axis, VOCABULARY, terms, **settings)
    assert gradients is not None
    assert not any(part.requires_grad for part in losses if part is not None)
    minimized = losses.cross_entropy
    if losses.uniform is not None:
        minimized = torch.lerp(minimized, losses.uniform, terms.label_smoothing)
    minimized = minimized + terms.z_loss_coeff * losses.log_normalizer.square()
    total = gradients.attached_to((minimized * weights).sum())
    (total * FACTOR).backward()
    return [losses.cross_entropy, total.detach(), source.grad, weight.grad]


def _check(found: list[torch.Tensor], dtype: torch.dtype, terms: LossTerms, softcap: float | None) -> None:
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3
    for value, true in zip(found, _expected(dtype, terms, softcap), strict=True):
        torch.testing.assert_close(value.double(), true, rtol=tolerance, atol=tolerance * true.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_process(dtype: torch.dtype) -> None:
    for terms, softcap in CASES:
        for chunk_rows in (1, 4, None):
            found = _found(Axis.single("tp"), dtype, terms, softcap, chunk_rows=chunk_rows)
            _check(found, dtype, terms, softcap)
            assert found[2].dtype == found[3].dtype == dtype
            assert not found[3][VOCABULARY:].any()


PRODUCT, WAIT = "add_product_", "wait_for"
ORDERS = {  # of the messages and the last two products, for hidden states and weight
    (True, False): [PRODUCT, "all_reduce", PRODUCT, WAIT],
    (True, True): [PRODUCT, "reduce_scatter_tensor", PRODUCT, WAIT],
    (False, False): [PRODUCT, "all_reduce", WAIT, PRODUCT, WAIT],
}


def _on_rank(rank: int) -> list[tuple[list[list[torch.Tensor]], list[str]]]:
    axis, results = open_mesh(Layout(2)).tp, []
    for overlaps, splits in ORDERS:
        axis, events = dataclasses.replace(axis, overlaps=overlaps), list[str]()
        found = [_found(axis, torch.float32, *case, splits_sequence=splits) for case in CASES]
        messages = [(dist, name) for name in ("all_reduce", "reduce_scatter_tensor")]
        with recorded(events, (head_loss, PRODUCT), *messages, (collectives, WAIT)):
            _found(axis, torch.float32, *CASES[0], splits_sequence=splits)
        results.append((found, events))
    return results


def test_a_vocabulary_that_two_ranks_share() -> None:
    first_rank, second_rank = run_ranks(_on_rank, 2)
    for (_, splits), order, (parts, events), (others, _) in zip(
        ORDERS, ORDERS.values(), first_rank, second_rank, strict=True
    ):
        assert events[-len(order) :] == order
        for case, first, second in zip(CASES, parts, others, strict=True):
            for one, other in zip(first[: 2 if splits else 3], second[: 2 if splits else 3], strict=True):
                assert torch.equal(one, other)
            of_hidden = torch.cat([first[2], second[2]], dim=1) if splits else first[2]
            _check([*first[:2], of_hidden, torch.cat([first[3], second[3]])], torch.float32, *case)


def test_the_factor_changes_no_gradient() -> None:
    axis = Axis.single("tp")
    for factor in (None, 2.0):
        _check(_found(axis, torch.float32, *CASES[3], factor=factor), torch.float32, *CASES[3])
    # In float16 gradients as small as these are rounded to 0, unless they are multiplied by the loss scale at once.
    hidden, weight, labels, weights = (part if part.dtype == torch.int64 else part * 1e-3 for part in _inputs())
    hidden, weight = hidden.half().requires_grad_(), weight.half().requires_grad_()
    for factor, is_lost in ((2.0**14, False), (None, True)):
        logits = FactoredLogits(hidden, weight)
        scale = None if factor is None else torch.tensor(factor)
        losses, gradients = head_losses(logits, labels, weights * 1e-3, axis, VOCABULARY, LossTerms(), factor=scale)
        assert gradients is not None
        (gradients.attached_to(losses.cross_entropy.sum()) * 2.0**14).backward()
        assert (hidden.grad.count_nonzero() == 0) == is_lost
        hidden.grad = weight.grad = None


def test_only_what_is_asked_for_is_computed() -> None:
    hidden, weight, labels, weights = _inputs()
    axis, terms = Axis.single("tp"), LossTerms()
    for trains_hidden, trains_weight in ((True, False), (False, True), (False, False)):
        own, table = hidden.clone().requires_grad_(trains_hidden), weight.clone().requires_grad_(trains_weight)
        losses, gradients = head_losses(FactoredLogits(own, table), labels, weights, axis, VOCABULARY, terms)
        if gradients is None:
            assert not trains_hidden and not trains_weight
            continue
        gradients.attached_to((losses.cross_entropy * weights).sum()).backward()
        assert (own.grad is not None, table.grad is not None) == (trains_hidden, trains_weight)
    with torch.no_grad():
        logits = FactoredLogits(own.requires_grad_(), table.requires_grad_())
        untrained = head_losses(logits, labels, weights, axis, VOCABULARY, terms)
    assert untrained.gradients is None
    assert torch.equal(untrained.tokens.cross_entropy, losses.cross_entropy)
    empty = head_losses(logits, labels, torch.zeros(3, 8), axis, VOCABULARY, terms).gradients
    assert empty is not None and not empty.of_hidden.any() and not empty.of_weight.any()
    gradients = head_losses(logits, labels, weights, axis, VOCABULARY, terms).gradients
    value = gradients.attached_to(torch.zeros(()))
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_logits_of_some_tokens() -> None:
    hidden, weight, _, _ = _inputs()
    rows = torch.tensor([20, 3])
    for softcap in (None, 2.0):
        whole = F.linear(hidden, weight).flatten(0, 1)[rows]
        expected = whole if softcap is None else softcapped(whole, softcap)
        torch.testing.assert_close(FactoredLogits(hidden, weight, softcap).at(rows), expected)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_more_logits_are_held_than_a_chunk_has() -> None:
    hidden, weight = torch.randn(4, 32, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    labels, weights = torch.zeros(4, 32, dtype=torch.int64), torch.ones(4, 32)
    terms = LossTerms(0.1, 0.1)
    with _Largest() as noted:
        losses, gradients = head_losses(
            FactoredLogits(hidden, weight, 5.0), labels, weights, Axis.single("tp"), 1000, terms, chunk_rows=16
        )
        gradients.attached_to(losses.cross_entropy.sum()).backward()
    assert noted.numel == 16 * 1000


@pytest.mark.parametrize(("columns", "rows"), [(32000, 8192), (50304, 8192), (128256, 4096), (1 << 20, 2048)])
def test_chunks_on_a_gpu_are_whole_tiles_of_a_gibibyte_at_most(columns: int, rows: int) -> None:
    assert _chunk_rows_on_gpu(columns) == rows
    assert rows == 2048 or 2 * rows * columns <= 1 << 30
    for count in (1, 8192, 12000, 16384, 20001):
        chunks = _chunks(count, rows)
        assert len(chunks) == -(-count // rows)
        assert [(chunk.start, chunk.stop) for chunk in chunks] == list(
            zip(
                [0, *(chunk.stop for chunk in chunks[:-1])],
                [*(chunk.stop for chunk in chunks[:-1]), count],
                strict=True,
            )
        )
        assert all(chunk.stop % 256 == 0 for chunk in chunks[:-1])
