"""Gradients of micro-batches in flat buffers, beside sums of one parameter after another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.engine.gradients.main_gradients import MainGradients

SHAPES = ((3, 4), (5,), (2, 2, 2), (1,), (6,))
GROUPS = (SHAPES[:3], SHAPES[3:])
PADDING = 3


def made(counted: tuple[bool, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[MainGradients, list[torch.Tensor]]:
    """Main gradients of two groups, whose buffers begin with rubbish, and the buffers."""
    groups = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes] for shapes in GROUPS]
    sizes = [sum(parameter.numel() for parameter in group) for group in groups]
    buffers = [torch.cat([torch.full((size,), 7.0), torch.zeros(PADDING)]) for size in sizes]
    flags = dict(zip([id(parameter) for group in groups for parameter in group], counted, strict=True))
    return MainGradients(buffers, groups, lambda parameter: flags[id(parameter)]), buffers


def give(main: MainGradients, seed: int, missing: int | None = None) -> list[torch.Tensor]:
    """Sets gradients as a backward pass would, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in main.parameters]
    for number, (parameter, gradient) in enumerate(zip(main.parameters, gradients, strict=True)):
        parameter.grad = None if number == missing else gradient
    return gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_micro_batches_add_up_in_float32(dtype: torch.dtype) -> None:
    main, buffers = made((True,) * 5, dtype)
    for first in (0, 10):  # the second step begins a new sum
        expected = [torch.zeros(parameter.shape) for parameter in main.parameters]
        for seed in range(first, first + 3):
            for total, gradient in zip(expected, give(main, seed), strict=True):
                total += gradient.float()
            main.take()
        main.complete()
        assert all(torch.equal(*pair) for pair in zip(main.views, expected, strict=True))
        flat = [torch.cat([*map(torch.flatten, part), torch.zeros(PADDING)]) for part in (expected[:3], expected[3:])]
        assert all(torch.equal(*pair) for pair in zip(buffers, flat, strict=True))
        main.clear()
        main.release()
        assert all(parameter.grad is None for parameter in main.parameters)


def test_a_parameter_without_a_gradient_has_contributed_nothing() -> None:
    main, _ = made((True,) * 5)
    give(main, 1, missing=2)
    main.take()
    assert not main.views[2].any() and main.views[1].any()
    second = give(main, 2)
    main.take()
    assert torch.equal(main.views[2], second[2].float())
    kept = main.views[4].clone()
    give(main, 3, missing=4)
    main.take()
    assert torch.equal(main.views[4], kept)


def test_without_a_micro_batch_the_gradient_is_zero() -> None:
    main, buffers = made((True,) * 5)
    assert all(buffer.any() for buffer in buffers)
    main.complete()
    assert not any(buffer.any() for buffer in buffers)
    give(main, 1)
    main.take()  # zero is a sum as well
    assert buffers[0].any()


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
    main, _ = made(counted)
    give(main, 1)
    main.take()
    assert [part.numel() for part in main.counted] == sizes
    expected = [view.flatten() for view, is_counted in zip(main.views, counted, strict=True) if is_counted]
    assert sum(sizes) == 0 or torch.equal(torch.cat(main.counted), torch.cat(expected))
