"""Output head and cross-entropy, forward and backward: time and peak memory compared with unfused products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.timing import forget_memory, peak_bytes, seconds_per_call
from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import library
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.head_loss import FactoredLogits, LossTerms, head_losses

# Tokens, channels and vocabulary: the head of GPT 124M, of GPT 1.3B, and one with the vocabulary of Llama 3.
SIZES = ((16384, 768, 50304), (16384, 2048, 50304), (16384, 2048, 128256))
TIME, MEMORY = Target(at_most=1.05), Target(at_most=0.25)


def measure_head(context: Context) -> None:
    """Ours in chunks, the three matrix products alone, and torch's linear layer with its cross-entropy."""
    for tokens, channels, vocabulary in ((32, 16, 96),) if context.is_tiny else SIZES:
        _measure(context, tokens, channels, vocabulary)


def _measure(context: Context, tokens: int, channels: int, vocabulary: int) -> None:
    of = {"of": f"{tokens} tokens, width {channels}, vocabulary {vocabulary}"}
    torch.manual_seed(1)
    hidden = torch.randn(1, tokens, channels, dtype=torch.bfloat16, device=context.device).requires_grad_()
    weight = torch.randn(vocabulary, channels, dtype=torch.bfloat16, device=context.device).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens), device=context.device)
    compiled = library()
    has_code = compiled is not None and compiled.has("cross_entropy", context.device)
    implementation = Implementation.CSRC if has_code else Implementation.TORCH
    context.recorder.note("implementation of the cross-entropy", implementation.value, **of)
    calls = {
        "ours": lambda: _ours(hidden, weight, labels, implementation),
        "the three products alone": lambda: _products(hidden, weight),
        "torch linear and cross-entropy": lambda: _unfused(hidden, weight, labels),
    }
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for name, call in calls.items():
        try:
            times[name], peaks[name] = _measured(context, call)
        except torch.OutOfMemoryError as failure:
            context.recorder.note("failed", str(failure)[:200], **of, by=name)
            continue
        context.recorder.figure("time", times[name] * 1e3, "ms", **of, by=name)
        context.recorder.figure("peak memory above the inputs", peaks[name] / 2**20, "MiB", **of, by=name)
    _compare(context, times, peaks, of)


def _compare(context: Context, times: dict[str, float], peaks: dict[str, int], of: dict[str, str]) -> None:
    record = context.recorder.figure
    if "ours" not in times:
        return
    for name in times:
        if name != "ours":
            ratio = times["ours"] / times[name]
            record("time in times of the other", ratio, "", target=TIME if "linear" in name else None, **of, other=name)
    reference = "torch linear and cross-entropy"
    if peaks.get(reference):
        ratio = peaks["ours"] / peaks[reference]
        record("peak memory in times of the other", ratio, "", target=MEMORY, **of, other=reference)


def _measured(context: Context, call: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and its peak memory besides its inputs, in bytes."""
    call()
    forget_memory(context.device)
    before = peak_bytes(context.device)
    call()
    memory = peak_bytes(context.device) - before
    return seconds_per_call(call, context.device, repeats=2 if context.is_tiny else 10, warm_ups=1), memory


def _ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, implementation: Implementation) -> object:
    weights = torch.full(labels.shape, 1.0 / labels.numel(), device=labels.device)
    found = head_losses(
        FactoredLogits(hidden, weight),
        labels,
        weights,
        Axis.single("tp"),
        weight.shape[0],
        LossTerms(),
        implementation=implementation,
    )
    if found.gradients is None:
        raise RuntimeError("the head computed no gradients")
    loss = found.gradients.attached_to((found.tokens.cross_entropy * weights).sum())
    return torch.autograd.grad(loss, (hidden, weight))


def _products(hidden: torch.Tensor, weight: torch.Tensor) -> object:
    rows = hidden.detach().flatten(0, 1)
    logits = rows @ weight.detach().t()
    return logits @ weight.detach(), logits.t() @ rows


def _unfused(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> object:
    loss = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), labels.flatten())
    return torch.autograd.grad(loss, (hidden, weight))
