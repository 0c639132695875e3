"""Faults in the code of some ranks: a dry run names each with its rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.checkpoint import saving
from megatron.engine.gradients.direct_gradients import DirectGradients
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import Axis
from tests.trident.plan.dry_run.networks import EXPERTS, TP2_PP2, dry_run_of

Send = Callable[..., object]


def _skips_an_all_reduce(send: Send, tensor: torch.Tensor, *given: object, **named: object) -> object:
    skips = dist.get_rank() == 5 and tensor.dtype is torch.float64
    return None if skips else send(tensor, *given, **named)


def _takes_the_maximum(send: Send, tensor: torch.Tensor, op: object = None, **named: object) -> object:
    return send(tensor, op=dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM, **named)


def _opens_another_group(send: Send, ranks: list[int], **named: object) -> object:
    me = dist.get_rank()
    is_wrong = me in (2, 4, 6) and named["group_desc"] == "dp"  # the same ranks as the gradient group
    return send([me, (me + 2) % 8] if is_wrong else ranks, **named)


def _sends_a_row_elsewhere(
    send: Send, arriving: torch.Tensor, rows: torch.Tensor, *splits: object, **named: object
) -> object:
    if dist.get_rank() == 0 and splits:
        even = len(rows) // 4
        splits = None, [even - 1, even + 1, even, even]
    return send(arriving, rows, *splits, **named)


def _adds_a_barrier_to_evaluations(send: Send, stack: LayerStack, *given: object) -> object:
    if dist.get_rank() == 7 and not stack.training:
        dist.barrier()
    return send(stack, *given)


def _keeps_its_size(send: Send, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    return tensor if axis.rank == 7 else send(tensor, axis)  # type: ignore[return-value]


def _adds_a_barrier_to_later_micro_batches(
    send: Send, sums: DirectGradients, parameters: Sequence[nn.Parameter]
) -> None:
    if hasattr(sums, "is_later") and dist.get_rank() == 7:
        dist.barrier()
    sums.is_later = True  # type: ignore[attr-defined]
    send(sums, parameters)


SAVED = ("--save", "x", "--save-interval", "3")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "flags", "size", "sentence"),
    [
        (dist, "all_reduce", _skips_an_all_reduce, TP2_PP2, 16, r"step 0, rank 5 .*all-reduce of 1 float64"),
        (
            dist,
            "all_reduce",
            _takes_the_maximum,
            TP2_PP2,
            8,
            r"step 0, rank 1, .* float64 \(max\) .*rank 0 has all-red",
        ),
        (
            dist,
            "new_group",
            _opens_another_group,
            TP2_PP2,
            16,
            r"step 0, rank 4, .* over ranks 4, 6: the other ranks of its group do not take part",
        ),
        (
            *(dist, "all_to_all_single", _sends_a_row_elsewhere, EXPERTS, 8),
            r"step 0, rank 0, .* sends 7 rows to rank 0, which receives 8",
        ),
        (
            LayerStack,
            "forward",
            _adds_a_barrier_to_evaluations,
            (),
            8,
            r"evaluation, rank 7, message 1 \(0F0\): barrier",
        ),
        (
            saving,
            "all_reduce_sum",
            _keeps_its_size,
            SAVED,
            8,
            r"save, rank 7, message 3 \(save\): all-reduce of 1 int64 \(max\) .*rank 0 has all-",
        ),
        (
            *(DirectGradients, "add", _adds_a_barrier_to_later_micro_batches, ("--no-bf16", "--zero-stage", "0"), 8),
            r"step 0, rank 7, message \d+ \(0B1\): barrier of ",
        ),
    ],
)
def test_a_fault_in_the_code_of_some_ranks_is_named(
    owner: object,
    name: str,
    fault: Send,
    flags: tuple[str, ...],
    size: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sends = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: fault(sends, *given, **named))
    problems = list(dry_run_of((*flags, "--num-layers", "2"), size).problems())
    assert any(re.match(sentence, each) for each in problems), problems[:3]
