"""Gradients of micro-batches in flat buffers, beside sums of one parameter after another."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megatron.engine.buckets import averaging
from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import MOST_IN_FLIGHT
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage
from tests.kernels.devices.adding_device import AddingDevice, adding_device

SHAPES = ((3, 4), (5,), (2, 2, 2), (1,), (6,))
GROUPS = (SHAPES[:3], SHAPES[3:])
PADDING = 3


class Made(NamedTuple):
    """Main gradients of two groups, whose buffers begin with rubbish; the buffers, and the parameters."""

    main: MainGradients
    buffers: list[torch.Tensor]
    parameters: list[nn.Parameter]

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sum for each parameter."""
        return [self.main.of(parameter) for parameter in self.parameters]


def made(
    counted: tuple[bool, ...],
    dtype: torch.dtype = torch.bfloat16,
    rank: int = 0,
    ranks: int = 1,
    *,
    takes_unflattened: bool = False,
) -> Made:
    """The gradients of one of several ranks."""
    groups, buffers = [], []
    for shapes in GROUPS:
        weights = torch.zeros(sum(map(math.prod, shapes)) + PADDING, dtype=dtype)
        parts = weights[:-PADDING].split([math.prod(shape) for shape in shapes])
        parameters = [nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)]
        groups.append(FlatGroup.of(reversed(parameters), weights))
        buffers.append(torch.cat([torch.full((len(weights) - PADDING,), 7.0), torch.zeros(PADDING)]))
    parameters = [parameter for group in groups for parameter in group.parameters]
    flags = dict(zip(map(id, parameters), counted, strict=True))
    averaging = Averaging(Axis("gradient", rank, ranks, tuple(range(ranks))), torch.float32)
    main = MainGradients(buffers, groups, lambda each: flags[id(each)], averaging, takes_unflattened=takes_unflattened)
    return Made(main, buffers, parameters)


def give(made: Made, seed: int, missing: int | None = None) -> list[torch.Tensor]:
    """Has the gradients of a backward pass added, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in made.parameters]
    for number, (parameter, gradient) in enumerate(zip(made.parameters, gradients, strict=True)):
        parameter.grad = None if number == missing else gradient
    made.main.add(made.parameters)
    assert all(parameter.grad is None for parameter in made.parameters)
    return gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_micro_batches_add_up_in_float32(dtype: torch.dtype) -> None:
    own = made((True,) * 5, dtype)
    for first in (0, 10):  # the second step begins a new sum
        expected = [torch.zeros(parameter.shape) for parameter in own.parameters]
        for seed in range(first, first + 3):
            for total, gradient in zip(expected, give(own, seed), strict=True):
                total += gradient.float()
        own.main.reduce()
        assert all(torch.equal(*pair) for pair in zip(own.sums, expected, strict=True))
        flat = [torch.cat([*map(torch.flatten, part), torch.zeros(PADDING)]) for part in (expected[:3], expected[3:])]
        assert all(torch.equal(*pair) for pair in zip(own.main.parts, flat, strict=True))
        own.main.clear()


def test_a_parameter_without_a_gradient_has_contributed_nothing() -> None:
    own = made((True,) * 5)
    give(own, 1, missing=2)
    assert not own.sums[2].any() and own.sums[1].any()
    second = give(own, 2)
    assert torch.equal(own.sums[2], second[2].float())
    kept = own.sums[4].clone()
    give(own, 3, missing=4)
    assert torch.equal(own.sums[4], kept)


def test_without_a_micro_batch_the_gradient_is_zero() -> None:
    own = made((True,) * 5)
    assert all(buffer.any() for buffer in own.buffers)
    own.main.reduce()
    assert not any(buffer.any() for buffer in own.buffers)
    give(own, 1, missing=0)
    own.main.clear()
    give(own, 2, missing=0)
    own.main.reduce()
    assert not own.sums[0].any()


@pytest.mark.parametrize(
    ("counted", "sizes"),
    [
        ((True, True, True, True, True), [25, 7]),
        ((True, False, True, True, True), [12, 8, 7]),
        ((False, True, True, False, True), [13, 6]),
        ((False, False, False, True, False), [1]),
        ((False,) * 5, []),
    ],
)
def test_adjacent_counted_parts_are_joined(counted: tuple[bool, ...], sizes: list[int]) -> None:
    own = made(counted)
    give(own, 1)
    assert [part.numel() for part in own.main.counted] == sizes
    expected = [view.flatten() for view, is_counted in zip(own.sums, counted, strict=True) if is_counted]
    assert sum(sizes) == 0 or torch.equal(torch.cat(list(own.main.counted)), torch.cat(expected))


def test_no_products_are_added_where_gradients_are_watched_or_the_device_cannot() -> None:
    own = made((True,) * 5)
    assert own.main.product_adder(torch.bfloat16) is None and own.main.product_adder(torch.float32) is not None
    with adding_device(AddingDevice()):
        assert own.main.product_adder(torch.bfloat16) is not None
    own.main.before_add = list
    assert own.main.product_adder(torch.float32) is None


def test_gradients_of_the_only_pass_stay_where_they_are() -> None:
    own = made((True, False, True, True, True), takes_unflattened=True)
    add, rubbish = own.main.product_adder(torch.float32), [buffer.clone() for buffer in own.buffers]
    own.main.begin(1)
    assert add is not None and not add(own.parameters[0], torch.ones(3, 1), torch.ones(1, 4))
    gradients = give(own, 1, missing=2)
    own.main.reduce()
    assert all(torch.equal(*pair) for pair in zip(own.buffers, rubbish, strict=True))  # nothing is copied
    pieces = [piece for group in own.main.unflattened for piece in group]
    gradients[2].zero_()
    assert all(torch.equal(*pair) for pair in zip(pieces, gradients, strict=True))
    assert [part.shape for part in own.main.counted] == [SHAPES[0], SHAPES[3], SHAPES[4]]
    assert all(torch.equal(total, gradient.float()) for total, gradient in zip(own.sums, gradients, strict=True))
    assert not own.main.unflattened and [part.numel() for part in own.main.counted] == [12, 8, 7]  # copied for a reader


@pytest.mark.parametrize("reason", ["two passes", "a watcher", "sums over ranks", "figures of parameters"])
def test_gradients_are_copied_where_one_reads_their_sums(reason: str) -> None:
    own = made((True,) * 5, takes_unflattened=True)
    if reason == "a watcher":
        own.main.before_add = list
    elif reason == "sums over ranks":
        own.main.keep_whole(own.parameters[:1])
    elif reason == "figures of parameters":
        own.main.by_parameter()
    own.main.begin(2 if reason == "two passes" else 1)
    gradients = give(own, 1)
    own.main.reduce()
    assert not own.main.unflattened
    assert torch.equal(own.main.parts[1][:7], torch.cat([each.flatten() for each in gradients[3:]]).float())


@pytest.mark.parametrize(
    ("exchanged", "dtype", "most"),
    [
        (None, torch.float32, 5),
        (torch.bfloat16, torch.float32, MOST_IN_FLIGHT),
        (None, torch.bfloat16, MOST_IN_FLIGHT),
    ],
)
def test_few_copies_of_buckets_are_in_transit(
    monkeypatch: pytest.MonkeyPatch, exchanged: torch.dtype | None, dtype: torch.dtype, most: int
) -> None:
    counts: list[int] = []
    waiting: list[PendingMessage] = []
    work: Any = SimpleNamespace(wait=lambda: None)

    def start(tensor: torch.Tensor, axis: Axis) -> PendingMessage:
        waiting[:] = [message for message in waiting if not message.is_over]
        part = tensor if exchanged is not None else tensor.chunk(2)[0]
        waiting.append(PendingMessage(part, work, axis))
        counts.append(len(waiting))
        return waiting[-1]

    for name in ("start_exchange", "start_reduce_scatter_sum"):
        monkeypatch.setattr(averaging, name, start)
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(5)]
    groups = [FlatGroup((parameter,), (0,), 4) for parameter in parameters]
    how = averaging.Averaging(Axis("gradient", 0, 2, (0, 1)), dtype, exchanged_dtype=exchanged)
    main = MainGradients([torch.ones(4) for _ in groups], groups, lambda _: True, how)
    for parameter in reversed(parameters):
        parameter.grad = torch.ones(4)
        main.complete((parameter,))
    main.reduce()
    assert max(counts) == most and len(counts) == 5
    assert all(torch.equal(part, torch.full((2,), 1.0 if exchanged else 0.5)) for part in main.parts)
