"""Lists of tensors, AdamW, the losses of logits and initial values, on each device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, cross_entropy_, logit_gradient, logit_statistics
from megatron.kernels.initial_values import Distribution, WeightDraw, draw_
from megatron.kernels.native.library import Library
from megatron.kernels.optimizer import AdamW
from tests.kernels.devices.checks import DEVICES, TOLERANCES, check_close, contiguous, same_bits, scattered, shifted

CSRC = Implementation.CSRC
BETAS, RATE, EPS = (0.9, 0.95), 2.0**-8, 1e-8

on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


def _list(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Mixed sizes: empty, one element, odd, over several chunks; transposed, behind an offset, without dimensions."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(0,), (1,), (7, 11), (3, 43691), (64, 33)]
    values = [torch.randn(*size, generator=generator).to(device, dtype) for size in sizes]
    return [*values, values[2].t(), values[3].flatten()[5:70000], torch.tensor(-2.5, dtype=dtype, device=device)]


@on_each_device
@in_each_dtype
def test_lists_of_tensors(compiled: Library, dtype: torch.dtype, device: str) -> None:
    tensors = _list(dtype, device)
    exact = torch.stack([tensor.double().norm() for tensor in tensors]).cpu()
    results = [multi_tensor.norm(tensors, per_tensor=True, implementation=CSRC) for _ in range(2)]
    for first, second, expected in zip(*results, (exact.norm(), exact), strict=True):
        assert same_bits(first, second) and first.device.type == device
        assert ((first.cpu().double() - expected).abs() <= expected * 2.0**-23).all()
    nothing = multi_tensor.norm(tensors[:1], per_tensor=True, implementation=CSRC)
    assert float(nothing[0]) == 0.0 and nothing[1].tolist() == [0.0]
    totals = [torch.full_like(tensor, 0.1, dtype=torch.float32) for tensor in tensors]
    multi_tensor.add_(totals, tensors, implementation=CSRC)
    assert all(same_bits(total, 0.1 + tensor.float()) for total, tensor in zip(totals, tensors, strict=True))


def _weights(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(*size, generator=generator) for size in ((0,), (1,), (5, 7), (3, 43691), (3, 257))]
    values.append(torch.randn(7, 5, generator=generator).t())
    on_device = [value.to(device) for value in values]
    return [torch.nn.Parameter(shifted(v) if place == 4 else v) for place, v in enumerate(on_device)]


def _gradients(weights: list[torch.nn.Parameter], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return [torch.randn(w.shape, generator=generator).mul_(10.0 ** (step - 3)).to(w.device) for w in weights]


@on_each_device
def test_steps_of_adamw(compiled: Library, device: str) -> None:
    exact = [weight.detach().double() for weight in _weights("cpu")]
    first, second = ([torch.zeros_like(weight) for weight in exact] for _ in range(2))
    results = []
    for rate in (RATE, torch.tensor(RATE, device=device)):
        weights = _weights(device)
        optimizer = AdamW(weights, lr=rate, betas=BETAS, eps=EPS, weight_decay=0.1)
        copies = [torch.full_like(weight, 9.0, dtype=torch.bfloat16) for weight in weights]
        for step in range(1, 6):
            for weight, gradient in zip(weights, _gradients(weights, step), strict=True):
                weight.grad = gradient
            skips = step == 3
            if skips:
                weights[-1].grad.view(-1)[0] = math.inf
            optimizer.step(skip=torch.tensor(float(skips), device=device), copies=[copies], gradient_factor=0.5)
        results.append([weight.detach() for weight in weights])
        assert all(torch.equal(w.detach().bfloat16(), copy) for w, copy in zip(weights, copies, strict=True))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))
    for count, step in enumerate((1, 2, 4, 5), 1):
        for number, gradient in enumerate(_gradients(_weights("cpu"), step)):
            g = gradient.double() * 0.5
            first[number] = BETAS[0] * first[number] + (1 - BETAS[0]) * g
            second[number] = BETAS[1] * second[number] + (1 - BETAS[1]) * g * g
            mean, square = first[number] / (1 - BETAS[0] ** count), second[number] / (1 - BETAS[1] ** count)
            exact[number] = exact[number] * (1 - RATE * 0.1) - RATE * mean / (square.sqrt() + EPS)
    for found, expected in zip(results[0], exact, strict=True):
        check_close(found, expected, torch.float32, f"AdamW of {list(expected.shape)}")


def _losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    gradients: LossGradients,
    softcap: float | None,
    valid: int,
    **options: Any,
) -> list[torch.Tensor]:
    """The statistics of all rows, and the gradients of one loss and of all three."""
    settings: dict[str, Any] = {"softcap": softcap, **options}
    statistics = logit_statistics(logits, labels, valid, with_logit_sum=True, **settings)
    assert statistics.logit_sum is not None
    normalizer = statistics.total.log() + statistics.largest if valid else torch.zeros_like(statistics.largest)
    values = [normalizer, statistics.target, statistics.logit_sum]
    for minimized in (LossGradients(gradients.of_label), gradients):
        gradient = logit_gradient(logits, labels, normalizer, minimized, valid, 9000, **settings)
        assert not gradient[:, valid:].any()
        values.append(gradient)
        if logits.stride(-1) == 1:
            written = logits.clone()
            logit_gradient(written, labels, normalizer, minimized, valid, 9000, in_place=True, **settings)
            assert same_bits(written, gradient)
    return values


@on_each_device
@in_each_dtype
def test_losses_of_logits(compiled: Library, dtype: torch.dtype, device: str) -> None:
    for rows, columns, valid in ((1, 1, 1), (3, 16, 0), (5, 1037, 1030), (4, 9000, 8999), (0, 8, 8)):
        generator = torch.Generator().manual_seed(columns)
        logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
        labels = torch.randint(-1, columns + 1, (rows,), generator=generator)
        parts = torch.rand(3, rows, generator=generator)
        for softcap in (None, 3.0):
            exact = _losses(logits.double(), labels, LossGradients(*parts.double()), softcap, valid)
            for layout in (contiguous, scattered, shifted):
                given = layout(logits.to(device)), labels.to(device), LossGradients(*parts.to(device))
                first, second = (_losses(*given, softcap, valid, implementation=CSRC) for _ in range(2))
                assert all(same_bits(*pair) for pair in zip(first, second, strict=True))
                for number, (found, expected) in enumerate(zip(first, exact, strict=True)):
                    where = f"result {number} of {rows} x {columns}, softcap {softcap}, {layout.__name__}"
                    check_close(found, expected, torch.float32 if number < 3 else dtype, where)


@on_each_device
@in_each_dtype
def test_losses_and_gradients_of_logits_in_one_call(compiled: Library, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(9)
    for rows, columns, valid in ((3, 24, 21), (5, 32000, 32000), (3, 50304, 50257), (2, 57352, 57352), (2, 21, 20)):
        logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
        labels, weights = torch.randint(0, valid, (rows,), generator=generator), torch.rand(rows, generator=generator)
        wide = logits[:, :valid].double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
        (gradient,) = torch.autograd.grad((expected * weights).sum(), wide)
        written = logits.to(device)
        losses, normalizer = cross_entropy_(written, labels.to(device), weights.to(device), valid)
        torch.testing.assert_close(losses.double().cpu(), expected.detach(), rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(normalizer.double().cpu(), wide.detach().logsumexp(1), rtol=2e-6, atol=4e-6)
        error = max(torch.finfo(dtype).eps, 4e-6)
        torch.testing.assert_close(written[:, :valid].double().cpu(), gradient, rtol=error, atol=2e-7)
        assert not written[:, valid:].any()


@on_each_device
@pytest.mark.parametrize("distribution", Distribution)
def test_initial_values_are_the_bits_of_torch_on_the_cpu(
    compiled: Library, distribution: Distribution, device: str
) -> None:
    places = [((36, 21), (6, 7), (12, 7), 5, 60), ((4, 3, 6), (1, 0, 3), (2, 3, 3), 1, 17), ((9,), (2,), (5,), 1, 3)]
    places += [((2**33, 6), (2**33 - 3, 0), (2, 6), 0, 12), ((70, 1030), (0, 1), (70, 1029), 0, 70 * 1029)]
    for shape, start, box, first, count in places:
        draw = WeightDraw(shape, start, box, 0x9E3779B97F4A7C15, 0.02, distribution)
        for dtype in TOLERANCES:
            expected = draw_(torch.empty(count, dtype=dtype), draw, first)
            found = draw_(torch.empty(count + 1, dtype=dtype, device=device)[1:], draw, first, implementation=CSRC)
            assert same_bits(found.cpu(), expected)
