"""This rank's part of the gradients beside the same part of their whole sum."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.gradients.partition_gradients import PartitionGradients
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

SHAPES = (((3, 4), (5,), (2, 2, 2), (1,)), ((6,), (2, 3)))
GAP = 3  # elements of padding after the second parameter of a group, as `parameter_alignment` leaves them
PASSES = 3


def groups_of(dtype: torch.dtype) -> list[FlatGroup]:
    """Two groups whose lengths two ranks can divide."""
    groups = []
    for shapes in SHAPES:
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros((sum(sizes) + GAP + 1) // 2 * 2, dtype=dtype)
        starts = [sum(sizes[:number]) + (GAP if number > 1 else 0) for number in range(len(sizes))]
        groups.append(
            FlatGroup.of(
                [
                    nn.Parameter(flat[start : start + size].view(shape))
                    for start, size, shape in zip(starts, sizes, shapes, strict=True)
                ],
                flat,
            )
        )
    return groups


def gradients_of(parameters: list[nn.Parameter], rank: int, step: int) -> list[torch.Tensor]:
    """What a backward pass leaves: small whole numbers, which no dtype rounds."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randint(-8, 8, each.shape, generator=generator).to(each.dtype) for each in parameters]


class _PutOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return None


def sums(rank: int) -> list[bool]:
    """With and without overlap, in and after backward: True if this rank's parts, and what it counts, are right."""
    axis = open_mesh(Layout()).gradient
    right = []
    for overlaps, early in itertools.product((False, True), repeat=2):
        groups = groups_of(torch.bfloat16)
        parameters = [each for group in groups for each in group.parameters]
        tied, uncounted = parameters[2], parameters[1]
        parts = [torch.zeros(group.length // 2) for group in groups]
        held = PartitionGradients(
            parts,
            groups,
            lambda each, not_this=uncounted: each is not not_this,
            Averaging(axis, torch.bfloat16),
            overlaps=overlaps,
        )
        held.keep_whole([tied])
        for each in parameters if early else ():
            each.register_post_accumulate_grad_hook(lambda each, held=held: held.complete([each]))
        whole = [torch.zeros(group.length) for group in groups]
        counted = [torch.zeros(group.length, dtype=torch.bool) for group in groups]
        for step in range(PASSES):
            missing = parameters[0] if step == 1 else None
            put_off = parameters[-1] if step == 2 else None  # whose hook torch calls before there is a gradient
            given = gradients_of(parameters, rank, step)
            used = [pair for pair in zip(parameters, given, strict=True) if pair[0] is not missing]
            sum((_PutOff.apply(each) if each is put_off else each * grad).sum() for each, grad in used).backward()
            if put_off is not None:
                held.add([each for each in parameters if each is not put_off])
                put_off.grad, used = given[-1], []
            # a bucket that is complete was sent, and its gradients are gone
            assert early or all(each.grad is not None for each, _ in used)
            assert not early or step != 0 or all(each.grad is None for each, _ in used if each is not tied)
            chunks = [parameters] if step == 0 else [parameters[3:], parameters[:3]]
            for chunk in chunks:
                held.add(chunk)
            assert all(each.grad is None for each in parameters)
            for number, group in enumerate(groups):
                for each, start in zip(group.parameters, group.starts, strict=True):
                    span = slice(start, start + each.numel())
                    counted[number][span] = each is not uncounted
                    for other in range(2) if each is not missing else ():
                        index = next(place for place, one in enumerate(parameters) if one is each)
                        whole[number][span] += gradients_of(parameters, other, step)[index].flatten().float() / 2
        assert held.of(tied).dtype is torch.float32 and len(held.buffers) == 3
        held.reduce()
        own = [slice(rank * len(part), (rank + 1) * len(part)) for part in parts]
        expected = [total[span] for total, span in zip(whole, own, strict=True)]
        in_norm = [total[span][mask[span]] for total, span, mask in zip(whole, own, counted, strict=True)]
        right.append(
            all(torch.equal(*pair) for pair in zip(held.parts, expected, strict=True))
            and torch.equal(torch.cat(list(held.counted)), torch.cat(in_norm))
        )
        held.clear()
        right.append(not any(part.any() for part in parts) and held.buffers == parts)
    return right


def whole_sum(rank: int) -> float:
    """What this rank has of the average of sums that bfloat16 cannot hold."""
    axis = open_mesh(Layout()).gradient
    weights = torch.zeros(2, dtype=torch.bfloat16)
    group = FlatGroup.of([nn.Parameter(weights)], weights)
    held = PartitionGradients([torch.zeros(1)], [group], lambda _: True, Averaging(axis, torch.bfloat16))
    held.keep_whole(group.parameters)
    for value in (256.0, 1.0):
        group.parameters[0].grad = torch.full_like(weights, value)
        held.add(group.parameters)
    held.reduce()
    return float(held.parts[0])


def test_sums_that_are_kept_whole_are_averaged_as_they_are() -> None:
    assert run_ranks(whole_sum, 2) == [257.0, 257.0]


def test_each_rank_adds_its_part_of_every_pass() -> None:
    assert run_ranks(sums, 2) == [[True, True] * 4] * 2


def test_what_was_not_kept_whole_cannot_be_asked_for() -> None:
    groups = groups_of(torch.float32)
    averaging = Averaging(Axis.single("gradient"), torch.float32)
    parts = [torch.zeros(group.length) for group in groups]
    held = PartitionGradients(parts, groups, lambda _: True, averaging)
    with pytest.raises(ValueError, match=r"\[3, 4\].*keep_whole"):
        held.of(groups[0].parameters[0])
