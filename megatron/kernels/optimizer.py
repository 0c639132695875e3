"""AdamW: torch's, the compiled one of csrc, or bitsandbytes' with 8-bit moments. `moment` gives their states the same
names, so that a run saved with one can resume with another.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation

Groups = Iterable[dict[str, Any]]

# Keys of each moment in bitsandbytes' state: codes, scale of each block of 256, and value of each code.
_PACKED: Mapping[str, tuple[str, str, str]] = types.MappingProxyType(
    {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}
)
_BLOCK = 256

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


class _GroupUpdate(NamedTuple):
    """The updated parameters of a group, and their copies in half precision, if any.

    There is one gradient per parameter, or one per consecutive part of a single flat parameter.
    """

    group: dict[str, Any]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    copies: list[torch.Tensor]


# The attribute that holds the original of a function that must not be compiled, after its first call.
_UNCOMPILED = "__dynamo_disable"


def build_adamw(
    groups: Groups, *, lr: float, betas: tuple[float, float], implementation: Implementation = Implementation.TORCH
) -> torch.optim.Optimizer:
    """Builds AdamW over parameter groups, each with its `eps` and `weight_decay`."""
    if implementation is Implementation.CSRC:
        return AdamW(groups, lr=lr, betas=betas)
    return FusedAdamW(groups, lr=lr, betas=betas)


def eager(kind: type[_Kind]) -> type[_Kind]:
    """A subclass whose step does not import torch's compiler, which takes as long as importing torch.

    torch's functions that must not be compiled import the compiler to mark themselves.
    """
    step: Any = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})


def keep_compiler_unloaded() -> None:
    """Keeps the methods of optimizers from importing the compiler; idempotent.

    No compiled program of this project calls them. Without effect on versions of torch that lack the mark.

    Source: PyTorch `torch/_compile.py`, `_disable_dynamo`.
    """
    for method in vars(torch.optim.Optimizer).values():
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == torch._compile.__file__:
            inner = method.__wrapped__
            if not hasattr(inner, _UNCOMPILED):
                setattr(inner, _UNCOMPILED, inner)


def build_eight_bit_adamw(groups: Groups, *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Builds bitsandbytes' AdamW, whose moments are 8-bit codes in blocks with a scale.

    Tensors of fewer than 4096 values, and groups with `keeps_float32`, have moments in float32.

    Raises:
        ConfigError: bitsandbytes is not installed.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization", 2022.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise ConfigError(
            "--use-bnb-optimizer requires the package bitsandbytes, which is not installed. Install it with: pip "
            "install bitsandbytes"
        ) from None
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW(groups, lr=lr, betas=betas, optim_bits=8)
    optimizer.register_step_pre_hook(lambda *_: _pack_moments(optimizer))
    return optimizer


def moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A moment in the parameter's dtype, as in checkpoints; zero if it does not exist yet.

    It may be written to: an 8-bit moment is unpacked here, and packed again before the next update.
    """
    state = optimizer.state[parameter]
    packed = _PACKED.get(name, ("",))[0]
    if packed in state and state[packed].dtype == parameter.dtype:
        moment: torch.Tensor = state[packed]
        return moment
    if state.get(name) is None:
        state[name] = _unpacked(state, name) if packed in state else torch.zeros_like(parameter)
    moment = state[name]
    return moment


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """True if `update` can be skipped by a flag on the device; other optimizers declare it by `can_skip`."""
    is_fused_adamw = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return is_fused_adamw or getattr(optimizer, "can_skip", False)


def unless_skipped(skip: torch.Tensor | None, number: float, otherwise: float) -> float | torch.Tensor:
    """`number`; with `skip` a tensor on the device, which is `otherwise` if the update is skipped."""
    return number if skip is None else torch.where(skip == 0, number, otherwise).to(torch.float32)


def gradients_unless_skipped(
    skip: torch.Tensor | None, gradients: Sequence[torch.Tensor], momenta: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients in the dtypes of their momenta; for a skipped update the momenta themselves, which their weighted mean
    leaves unchanged.
    """
    pairs = [(gradient.to(kept.dtype), kept) for gradient, kept in zip(gradients, momenta, strict=True)]
    return [gradient if skip is None else torch.where(skip == 0, gradient, kept) for gradient, kept in pairs]


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    *,
    gradient_factor: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    copies: Sequence[Sequence[torch.Tensor]] = (),
    unflattened: Sequence[Sequence[torch.Tensor]] = (),
) -> None:
    """Updates the parameters that have a gradient with any of the optimizers, without synchronizing.

    An override of `step` on the instance is ignored.

    Args:
        gradient_factor: factor of the gradients, applied in place unless the optimizer is compiled.
        skip: one float32; unless it is 0, no weight, moment or count changes. For optimizers that `can_skip`.
        copies: for each group and parameter, a tensor that receives the new weights.
        unflattened: for the compiled AdamW, see `FusedAdamW.step`.
    """
    step: Any = type(optimizer).step
    is_half = all(narrow.dtype is not torch.float32 for group in copies for narrow in group)
    factor = 1.0 if gradient_factor is None else gradient_factor
    if isinstance(optimizer, AdamW) and is_half:
        step(optimizer, gradient_factor=factor, skip=skip, copies=copies or None, unflattened=unflattened)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, FusedAdamW):
        step(optimizer, gradient_factor=factor, skip=skip)
    else:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradient_factor is not None and gradients:
            torch._foreach_mul_(gradients, gradient_factor)
        if skip is not None:
            optimizer.found_inf = skip  # type: ignore[attr-defined]  # as torch.amp.GradScaler does
        step(optimizer)
        if skip is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]
    if narrow := [each for group in copies for each in group]:
        torch._foreach_copy_(narrow, parameters)


class FusedAdamW(torch.optim.AdamW):
    """AdamW that calls torch's fused kernel directly with its lists.

    The step of `torch.optim.AdamW(fused=True)` first reads every option of every parameter and sorts all tensors by
    device and dtype, which takes as long as the update of a small network. State and options are the same. A step whose
    gradients overflowed changes nothing, not even its count; this is decided on the device, without synchronizing.

    Args:
        lr: a number, or a float32 tensor of one element on the parameters' device.
    """

    def __init__(self, params: Iterable[torch.Tensor] | Groups, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        gradient_factor: float | torch.Tensor = 1.0,
        skip: torch.Tensor | None = None,
        copies: Sequence[Sequence[torch.Tensor]] | None = None,
        unflattened: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        """Updates the parameters that have a gradient.

        Args:
            gradient_factor: factor of the gradients; a float32 tensor is read on the device.
            skip: one float32; unless it is 0, nothing changes.
            copies: for each group and parameter, a tensor in half precision that receives the new weights.
            unflattened: for each group with a single flat parameter, the gradients of its consecutive parts, in any of
                the dtypes, instead of its own gradient. For `AdamW`.
        """
        updates = []
        for number, group in enumerate(self.param_groups):
            if unflattened:
                narrow = [] if copies is None else list(copies[number])
                updates.append(_GroupUpdate(group, group["params"], list(unflattened[number]), narrow))
                continue
            indices = [index for index, parameter in enumerate(group["params"]) if parameter.grad is not None]
            if indices:
                narrow = [] if copies is None else [copies[number][index] for index in indices]
                updated = [group["params"][index] for index in indices]
                updates.append(_GroupUpdate(group, updated, [each.grad for each in updated], narrow))
        if updates:
            self._update(updates, gradient_factor, skip)

    def _update(
        self, updates: Sequence[_GroupUpdate], gradient_factor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        divisor, counted = None, None if skip is None else 1 - skip  # both are read on the device
        if isinstance(gradient_factor, torch.Tensor):
            divisor = gradient_factor.reciprocal()
        elif gradient_factor != 1.0:
            divisor = torch.full((), 1 / gradient_factor, device=updates[0][1][0].device)
        for group, parameters, gradients, copies in updates:
            averages, squares, counts = self._moments(parameters)
            torch._foreach_add_(counts, 1 if counted is None else [counted] * len(counts))
            torch._fused_adamw_(
                parameters,
                gradients,
                averages,
                squares,
                [],
                counts,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                grad_scale=divisor,
                found_inf=skip,
            )
            if copies:
                torch._foreach_copy_(copies, parameters)

    def _moments(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        """Both moments and the count of each parameter."""
        states = [self._state_of(parameter) for parameter in parameters]
        return tuple([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter; missing moments and counts are set to zero."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        step = state.get("step")
        if not torch.is_tensor(step) or step.device != parameter.device:  # from a checkpoint of an unfused optimizer
            number = 0.0 if step is None else float(step)
            state["step"] = torch.full((), number, dtype=torch.float32, device=parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class AdamW(FusedAdamW):
    """Compiled AdamW that updates a list of tensors in one launch, including their copies in half precision.

    Weights and moments are float32; gradients may be in half precision, and are not changed.

    Raises:
        ConfigError: a parameter is not float32.
    """

    def _update(
        self, updates: Sequence[_GroupUpdate], gradient_factor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        for group, parameters, gradients, copies in updates:
            on_device = [each if isinstance(each, torch.Tensor) else None for each in (group["lr"], gradient_factor)]
            *moments, counts = self._moments(parameters)
            count = counts[0]
            is_cut = len(gradients) != len(parameters) or gradients[0].shape != parameters[0].shape
            if is_cut:
                gradients = [gradient.view(-1) for gradient in gradients]
                sizes = [len(gradient) for gradient in gradients]
                parameters, copies, *moments = (_parts(each, sizes) for each in (parameters, copies, *moments))
                counts = list(count.repeat(len(sizes)).unbind())
            torch.ops.megatron.adamw_(
                parameters,
                [_alike(*pair) for pair in zip(gradients, parameters, strict=True)],
                *moments,
                counts,
                copies,
                0.0 if on_device[0] is not None else group["lr"],
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                1.0 if on_device[1] is not None else gradient_factor,
                *on_device,
                skip,
            )
            if is_cut:
                count.copy_(counts[0])

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"A weight of shape {list(parameter.shape)} is {str(parameter.dtype).removeprefix('torch.')}, and the "
                f"compiled AdamW updates float32 weights. Keep masters in float32, or use --kernels optimizer=torch."
            )
        return super()._state_of(parameter)


def count_updates(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, count: int) -> None:
    """Sets the number of updates in a parameter's state, which bias correction depends on."""
    step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
    if torch.is_tensor(step):
        step.fill_(float(count))
    elif step is not None:  # bitsandbytes
        optimizer.state[parameter]["step"] = count


def register() -> None:
    """Registers with torch that the compiled operation returns nothing; once, after the library is loaded."""
    torch.library.register_fake("megatron::adamw_", lambda *arguments: None)


@torch.no_grad()
def _pack_moments(optimizer: Any) -> None:
    """Converts the state of every parameter that will be updated to bitsandbytes' form."""
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            written = {name: state.pop(name) for name in _PACKED if name in state}
            if "state1" not in state:
                updates = int(state.pop("step", 0))
                optimizer.init_state(group, parameter, group_number, number)
                if group.get("keeps_float32"):
                    state.clear()
                    state.update({packed: torch.zeros_like(parameter) for packed, _, _ in _PACKED.values()})
                state["step"] = updates
            for name, values in written.items():
                if not torch.equal(values, _unpacked(state, name)):
                    _pack(state, name, values)


def _unpacked(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A moment in float32, in the shape of its codes."""
    packed, scale, meaning = _PACKED[name]
    codes = state[packed]
    if codes.dtype != torch.uint8:
        return codes
    values = state[meaning][codes.view(-1).int()]
    return values.mul_(state[scale].repeat_interleave(_BLOCK)[: len(values)]).view(codes.shape)


def _pack(state: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Writes a moment into the state, rounded to 8 bits.

    The negative codes end above -1. So a block whose largest value is negative is scaled to the last of them, and
    values that were unpacked before get the same codes again.
    """
    packed, scale, meaning = _PACKED[name]
    codes = state[packed]
    if codes.dtype != torch.uint8:
        codes.copy_(values)
        return
    known = state[meaning]
    flat = values.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    largest = blocks.amax(dim=1).clamp_(min=0) / known[-1]
    if known[0] < 0:
        largest = torch.maximum(largest, blocks.amin(dim=1) / known[0])
    between = (known[1:] + known[:-1]) / 2
    relative = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    codes.view(-1).copy_(torch.bucketize(relative, between).view(-1)[: len(flat)])
    state[scale].copy_(largest)


def _parts(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Splits the only tensor of a list, which is flat, into parts of these sizes; an empty list stays empty."""
    return [part for each in tensors for part in each.split([*sizes, len(each) - sum(sizes)])[: len(sizes)]]


def _alike(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's memory layout."""
    if gradient.stride() == parameter.stride():
        return gradient
    form = parameter.shape, parameter.stride()
    return torch.empty_strided(*form, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
