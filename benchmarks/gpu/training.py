"""Training steps of ours compared with plain PyTorch under torch.compile and with transformers, in turns."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.context import DECIDING, Context
from benchmarks.gpu.machine import ROOT, device_name, peak_of
from benchmarks.gpu.records import RESULTS, Target, read_records
from benchmarks.gpu.runs import request_of, training
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import forget_memory, peak_bytes, seconds_of_steps
from benchmarks.gpu.trace import record_classes
from benchmarks.plain_gpt import PlainGPT
from benchmarks.plain_llama import PlainLlama
from benchmarks.training_loop import TrainingLoop, TransformersNetwork
from megatron.config import Machine, RunConfig, RunRequest, TokenizerFacts, resolve
from megatron.data.loader import Batch
from megatron.errors import ConfigError, MegatronError

Step = Callable[[], object]
CONTENDERS = (*DECIDING, "transformers", "torch-kernels", "transformers-eager")
MOST_OF_A_PART = 0.6  # of its time for one contender
RATE = "tokens per second"
USUAL_LENGTH, TOKENS = 1024, 16384  # tokens of a sample and of a step
BEST_OF_OTHERS, UTILIZATION = Target(at_least=1.1), Target(at_least=0.5)
JUDGED_FOR_UTILIZATION = "1.3b"


@dataclass(frozen=True)
class Contender:
    """One of those compared: its name, and what builds its step."""

    name: str
    is_ours: bool
    build: Callable[[], contextlib.AbstractContextManager[Step]]


def measure_model(context: Context) -> None:
    """Tokens per second, share of the peak and memory of one network, for each contender in a process of its own.

    A contender that is stopped, runs out of memory or breaks the device leaves the others their turns.

    A part is named after its network, and after its sequence length where that is not 1,024 tokens: `1.3b-4096`.
    """
    name, _, given_length = context.part.partition("-")
    shape = SHAPES[name].tiny() if context.is_tiny else SHAPES[name]
    length = 16 if context.is_tiny else int(given_length or USUAL_LENGTH)
    if context.contender is None:
        run_in_turns(context, lambda: _compare(context, length))
        return
    micro_batch = 2 if context.is_tiny else TOKENS // length
    contender = contender_of(context, shape, length, micro_batch)
    sys.stdin.readline()  # the turn of this process: until then it has only imported
    measured(context, contender, shape, length, micro_batch, is_profiled=True)


def run_in_turns(context: Context, after_each: Callable[[], None]) -> None:
    """Runs the contenders one after another, each in a process that starts while the one before it is measured."""
    ends_at = time.monotonic() + context.seconds
    waiting = list(context.contenders)
    started = [_started(context, waiting.pop(0))] if waiting else []
    for contender in context.contenders:
        process = started.pop()
        if waiting:
            started.append(_started(context, waiting.pop(0)))
        limit = max(0.0, min(ends_at - time.monotonic(), MOST_OF_A_PART * context.seconds))
        try:
            process.communicate("go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            context.recorder.note("not measured", f"stopped after {limit:.0f} s", of=contender)
        else:
            if process.returncode:
                note = f"exit status {process.returncode}; see {context.part}.log"
                context.recorder.note("failed", note, of=contender)
        after_each()


def _started(context: Context, contender: str) -> subprocess.Popen[str]:
    """A process that measures a contender once it is given its turn."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--only-this", context.part, "--contender", contender]
    command += ["--output", str(context.output.resolve()), "--scale", context.scale, "--device", context.device.type]
    command += [] if context.kernels is None else ["--kernels", context.kernels]
    with (context.output / f"{context.part}.log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)


def contender_of(context: Context, shape: Shape, length: int, micro_batch: int) -> Contender:
    """The contender that this process is, one of `CONTENDERS`."""

    def ours(name: str, *flags: str) -> Contender:
        request = request_of(context, shape, length, micro_batch, *flags)
        return Contender(name, True, lambda: our_step(request))

    def peer(network: Callable[[], torch.nn.Module], name: str, *, is_compiled: bool) -> Contender:
        batch = _batch(micro_batch, length, shape.vocab)
        compiled = is_compiled and not context.is_tiny
        build = lambda: _peer_step(network(), config, context.device, batch, is_compiled=compiled)  # noqa: E731
        return Contender(f"{name}, torch.compile" if is_compiled else name, False, build)

    def plain() -> torch.nn.Module:
        return PlainGPT(config.model) if shape.groups is None else PlainLlama(config.model)

    def transformers() -> torch.nn.Module:
        return TransformersNetwork(config.model, "sdpa")

    config = _resolved(request_of(context, shape, length, micro_batch), context.device)
    match context.contender:
        case "graphs":
            return ours("ours, --cuda-graphs auto", "--cuda-graphs", "auto")
        case "plain":
            return peer(plain, "plain PyTorch", is_compiled=True)
        case "transformers":
            return peer(transformers, "transformers", is_compiled=True)
        case "torch-kernels":
            return ours("ours, --kernels torch", "--kernels", "torch")
        case "transformers-eager":
            return peer(transformers, "transformers", is_compiled=False)
        case "ours":
            return ours("ours")
        case _:
            raise ConfigError(f"There is no contender {context.contender}. Use {', '.join(CONTENDERS)}.")


@contextlib.contextmanager
def our_step(request: RunRequest) -> Iterator[Step]:
    """A step of pretrain_gpt.py."""
    with training(request) as (_, step):
        yield step


@contextlib.contextmanager
def _peer_step(
    network: torch.nn.Module, config: RunConfig, device: torch.device, batch: Batch, *, is_compiled: bool
) -> Iterator[Step]:
    loop = TrainingLoop(network, config.optim, torch.bfloat16, device=device, is_compiled=is_compiled)
    yield lambda: loop.step([batch], 3e-4)


def measured(
    context: Context, contender: Contender, shape: Shape, length: int, micro_batch: int, *, is_profiled: bool = False
) -> float | None:
    """Tokens per second; None if it failed, which is recorded.

    Args:
        shape: what counts for the share of the peak.
        is_profiled: whether two more steps show where the time goes.
    """
    warm_ups, steps = (1, 1) if context.is_tiny else (5, 15)
    device, of = context.device, {"of": contender.name, "length": length, "batch": micro_batch}
    forget_memory(device)
    try:
        with contender.build() as step:
            for _ in range(warm_ups):
                step()
            seconds = seconds_of_steps(step, device, steps)
            memory = peak_bytes(device)
            _record_rate(context, contender, shape, of, seconds, memory)
            if is_profiled:
                record_classes(context, step, of)
    except (RuntimeError, ImportError, MegatronError) as failure:
        context.recorder.note("failed", f"{type(failure).__name__}: {str(failure)[:300]}", **of)
        return None
    finally:
        torch.compiler.reset()
    return micro_batch * length / seconds


def _record_rate(
    context: Context, contender: Contender, shape: Shape, of: dict[str, Any], seconds: float, memory: int
) -> None:
    rate = of["batch"] * of["length"] / seconds
    context.recorder.figure(RATE, rate, "tokens/s", **of)
    context.recorder.figure("peak memory", memory / 2**30, "GiB", **of)
    peak = peak_of(device_name(context.device))
    if peak is not None:
        share = rate * shape.flops_per_token(of["length"]) / (peak.bf16_teraflops * 1e12)
        is_judged = contender.is_ours and context.part == JUDGED_FOR_UTILIZATION
        context.recorder.figure("MFU", share, "", target=UTILIZATION if is_judged else None, **of)


def _compare(context: Context, length: int) -> None:
    """Records the ratio as soon as it exists, and again with each further contender: a part may be stopped."""
    records = [record for record in read_records([context.output / RESULTS]) if record["part"] == context.part]
    rates = {record["details"]["of"]: record["value"] for record in records if record["figure"] == RATE}
    ours = [rate for name, rate in rates.items() if name.startswith("ours")]
    others = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
    if ours and others:
        name, best = max(others.items(), key=lambda item: item[1])
        details = {"length": length, "best": name, "compared": len(rates)}
        context.recorder.figure(
            "ours in times of the best of the others", max(ours) / best, "", target=BEST_OF_OTHERS, **details
        )


def measure_zero(context: Context) -> None:
    """Tokens per second and memory of every ZeRO stage, on one GPU: what the partitioned optimizers cost."""
    shape = SHAPES["355m"].tiny() if context.is_tiny else SHAPES["355m"]
    length, micro_batch = (16, 2) if context.is_tiny else (1024, TOKENS // 1024)
    for stage in (0, 3) if context.is_tiny else (0, 1, 2, 3):
        request = request_of(context, shape, length, micro_batch, "--zero-stage", str(stage))
        contender = Contender(f"ZeRO {stage}, {shape.name}", True, lambda request=request: our_step(request))
        measured(context, contender, shape, length, micro_batch)


def measure_float8(context: Context) -> None:
    """Tokens per second of the 1.3B network with products of 8 bits, in times of those in bf16.

    The share of the peak is of that in bf16. What is compiled comes first: scales and rounding are then fused with what
    lies around the products.
    """
    shape = SHAPES["1.3b"].tiny() if context.is_tiny else SHAPES["1.3b"]
    length, micro_batch = (16, 2) if context.is_tiny else (USUAL_LENGTH, TOKENS // USUAL_LENGTH)
    eight_bits = ["--fp8-format", "hybrid", *(["--fp8-emulation"] if context.device.type == "cpu" else [])]
    forms = {"fp8 tensorwise": eight_bits, "fp8 rowwise": [*eight_bits, "--fp8-recipe", "rowwise"]}
    ends_at, longest = time.monotonic() + context.seconds, 0.0
    for compiled in ([],) if context.is_tiny else (["--compile"], []):
        known = None
        for name, flags in {"bf16": [], **forms}.items():
            began_at, contender = time.monotonic(), " ".join([name, *compiled])
            if began_at + longest > ends_at:
                context.recorder.note("not measured", "out of time", of=contender)
                continue
            request = request_of(context, shape, length, micro_batch, *flags, *compiled)
            step = Contender(contender, True, lambda request=request: our_step(request))
            rate = measured(context, step, shape, length, micro_batch)
            longest = max(longest, time.monotonic() - began_at)
            if not flags:
                known = rate
            elif rate and known:
                context.recorder.figure("fp8 in times of bf16", rate / known, "", of=contender)


def _batch(samples: int, length: int, vocab: int) -> Batch:
    drawn = np.random.default_rng(3).integers(0, vocab, (samples, length + 1))
    tokens, labels = (np.ascontiguousarray(part) for part in (drawn[:, :-1], drawn[:, 1:]))
    return Batch(tokens, labels, np.ones(tokens.shape, np.float32), np.arange(samples), None)


def _resolved(request: RunRequest, device: torch.device) -> RunConfig:
    """The configuration that the others take sizes and optimizer from."""
    machine = Machine(device.type, 1, supports_fp16=True, supports_bf16=True)
    return resolve(request, machine, TokenizerFacts(257, 256, ""))
