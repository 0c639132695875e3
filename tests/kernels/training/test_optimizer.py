"""AdamW compiled, compared with torch's and float64; skipping, checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import Library
from megatron.kernels.optimizer import AdamW, build_adamw, can_skip, count_updates, update

BETAS, RATE, EPS, DECAY = (0.9, 0.95), 2.0**-8, 1e-8, 0.1
SIZES = ((0,), (1,), (5, 7), (3, 12347))


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(*size, generator=generator) for size in SIZES]
    flat = torch.randn(2000, generator=generator)
    return [torch.nn.Parameter(value) for value in (*values, flat[3:1003], values[2].clone().t())]


def _gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    sizes = (*SIZES, (1000,), (7, 5))
    gradients = [(torch.randn(*size, generator=generator) * 10.0 ** (step - 2)).to(dtype) for size in sizes]
    gradients[-1] = gradients[-1].t().contiguous().t()
    return gradients


def _groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "weight_decay": 0.0, "eps": EPS},
        {"params": parameters[2:], "weight_decay": DECAY, "eps": EPS},
    ]


def _exact(dtype: torch.dtype, factor: float = 1.0, steps: int = 4) -> list[torch.Tensor]:
    """The weights after some steps of the algorithm, in float64."""
    parameters = [parameter.detach().double() for parameter in _parameters()]
    first, second = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step in range(1, steps + 1):
        for number, gradient in enumerate(_gradients(step, dtype)):
            g = gradient.double() * factor
            first[number] = BETAS[0] * first[number] + (1 - BETAS[0]) * g
            second[number] = BETAS[1] * second[number] + (1 - BETAS[1]) * g * g
            mean, square = first[number] / (1 - BETAS[0] ** step), second[number] / (1 - BETAS[1] ** step)
            parameters[number] = parameters[number] * (1 - RATE * (DECAY if number > 1 else 0.0))
            parameters[number] -= RATE * mean / (square.sqrt() + EPS)
    return parameters


def _train(optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: range, **options: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        for parameter, gradient in zip(parameters, _gradients(step, dtype), strict=True):
            if dtype == torch.float32:
                parameter.grad = gradient
            else:
                parameter.grad_dtype = None  # gradients in half precision of float32 weights
                parameter.grad = gradient
        optimizer.step(**options)


def _errors(parameters: list[torch.nn.Parameter], exact: list[torch.Tensor]) -> float:
    return max(
        float((p.detach().double() - e).abs().max()) for p, e in zip(parameters, exact, strict=True) if e.numel()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_and_copies_in_half_precision(compiled: Library, dtype: torch.dtype) -> None:
    ours = _parameters()
    optimizer = AdamW(_groups(ours), lr=RATE, betas=BETAS)
    copies = [torch.full_like(parameter, 9.0, dtype=dtype) for parameter in ours]
    factor = torch.tensor(0.125)
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no gradients of another dtype than the weight")
    _train(optimizer, dtype, range(1, 5), gradient_factor=factor, copies=[copies[:2], copies[2:]])
    assert _errors(ours, _exact(dtype, 0.125)) < 2e-6
    for parameter, copy in zip(ours, copies, strict=True):
        assert torch.equal(parameter.detach().to(dtype), copy)


def _half(parameters: list[torch.nn.Parameter]) -> list[list[torch.Tensor]]:
    copies = [torch.full_like(parameter, 9.0, dtype=torch.bfloat16) for parameter in parameters]
    return [copies[:2], copies[2:]]


@pytest.mark.parametrize("name", ["csrc", "torch", "sgd"])
def test_one_update_of_any_optimizer(compiled: Library, name: str) -> None:
    """Clipped gradients and copies in half precision are as if they had been made by hand."""
    results = []
    for by_hand in (False, True):
        parameters = _parameters()
        groups, copies, factor = _groups(parameters), _half(parameters), torch.tensor(0.375)
        if name == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD([{"params": each["params"]} for each in groups], lr=RATE)
        else:
            optimizer = build_adamw(groups, lr=RATE, betas=BETAS, implementation=Implementation(name))
        for step in (1, 2):
            for parameter, gradient in zip(parameters, _gradients(step, torch.float32), strict=True):
                parameter.grad = gradient * factor if by_hand else gradient
            if by_hand:
                optimizer.step()
            else:
                optimizer.step = None  # type: ignore[method-assign]  # its replacement is skipped
                update(optimizer, gradient_factor=factor, copies=copies)
        results.append((parameters, copies))
    (ours, copies), (expected, _) = results
    for one, other in zip(ours, expected, strict=True):  # torch's kernel divides by the reciprocal of the factor
        torch.testing.assert_close(one, other, rtol=0.0, atol=2e-7 if name == "torch" else 0.0)
    narrow = [copy for group in copies for copy in group]
    for copy, parameter in zip(narrow, ours, strict=True):
        assert torch.equal(copy, parameter.detach().bfloat16())


@pytest.mark.parametrize("implementation", [Implementation.CSRC, Implementation.TORCH])
def test_a_flag_keeps_an_update_from_changing_anything(compiled: Library, implementation: Implementation) -> None:
    ours, twins = _parameters(), _parameters()
    optimizer, twin = (
        build_adamw(_groups(some), lr=RATE, betas=BETAS, implementation=implementation) for some in (ours, twins)
    )
    assert can_skip(optimizer)
    for step, is_dropped in ((1, False), (2, True), (3, False)):
        for parameter, other, gradient in zip(ours, twins, _gradients(step, torch.float32), strict=True):
            parameter.grad, other.grad = gradient * math.nan if is_dropped else gradient, gradient.clone()
        copies = _half(ours)
        update(optimizer, gradient_factor=torch.tensor(1.0), skip=torch.tensor(float(is_dropped)), copies=copies)
        if not is_dropped:
            update(twin)
        for one, other in zip(ours, twins, strict=True):
            assert torch.equal(one, other)
            assert all(torch.equal(optimizer.state[one][key], value) for key, value in twin.state[other].items())
    assert getattr(optimizer, "found_inf", None) is None


def test_which_optimizers_know_the_flag() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert not can_skip(torch.optim.SGD(parameters, lr=RATE))
    assert not can_skip(torch.optim.AdamW(parameters, lr=RATE))


@pytest.mark.parametrize("order", [("csrc", "torch"), ("torch", "csrc"), ("plain", "csrc")])
def test_a_run_resumes_with_the_other_one(compiled: Library, order: tuple[str, str]) -> None:
    parameters = _parameters()
    optimizer: torch.optim.Optimizer | None = None
    for name, steps in zip(order, (range(1, 3), range(3, 5)), strict=True):
        groups = _groups(parameters)
        if name == "plain":
            following: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
        else:
            following = build_adamw(groups, lr=RATE, betas=BETAS, implementation=Implementation(name))
        if optimizer is not None:
            following.load_state_dict(optimizer.state_dict())
        optimizer = following
        _train(optimizer, torch.float32, steps)
        optimizer.zero_grad()
    assert optimizer is not None
    assert {*optimizer.state[parameters[2]]} == {"step", "exp_avg", "exp_avg_sq"}
    assert _errors(parameters, _exact(torch.float32)) < 2e-6
    count_updates(optimizer, parameters[2], 7)
    assert optimizer.state[parameters[2]]["step"] == 7


def test_what_is_refused(compiled: Library) -> None:
    narrow = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    narrow.grad = torch.zeros_like(narrow)
    with pytest.raises(ConfigError, match=r"shape \[3\] is bfloat16, and the compiled AdamW updates float32"):
        AdamW([narrow]).step()
    wide = torch.nn.Parameter(torch.zeros(3))
    wide.grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match="skip must be one float32 on cpu"):
        AdamW([wide]).step(skip=torch.zeros(2))
    lists = [[torch.randn(4)] for _ in range(4)]
    scalars = (1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, None, None, None)
    torch.library.opcheck(torch.ops.megatron.adamw_.default, (*lists, [torch.zeros(())], [], *scalars))
    with pytest.raises(RuntimeError, match="1 steps for 2 weights"):
        pairs = [[torch.randn(4), torch.randn(4)] for _ in range(4)]
        torch.ops.megatron.adamw_(*pairs, [torch.zeros(())], [], *scalars)
