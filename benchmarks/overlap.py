"""Time that data-parallel messages add to a step, with and without overlap, compared with the planner's formula.

    python benchmarks/overlap.py

The engine's accumulators run a step of layers that sleep instead of computing, in the backward pass twice as long as in
the forward pass, and of messages that take as long as on a link of some bandwidth, one after another. All ranks are
alike, so one process shows the step of each of them. One JSON line a figure: how much longer a step is than without
messages, in percent of the messages.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import print_figure
from benchmarks.pipeline_idle import SleepingLayer
from megatron.config import ConfigSection, flag, parse_flags
from megatron.engine.buckets import averaging, weight_gathers
from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import in_buckets
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.buckets.weight_gathers import WeightGathers
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.gradient_sum import FlatGradients
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.gradients.partition_gradients import PartitionGradients
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage
from trident.plan.step_time import exposed_seconds


@dataclass(frozen=True)
class OverlapFlags(ConfigSection):
    """Flags of this program."""

    ranks: int = flag(4, "data-parallel ranks", at_least=2)
    layers: int = flag(16, "layers", at_least=1)
    buckets: int = flag(8, "buckets", at_least=1)
    micro_batches: int = flag(2, "micro-batches of a step", at_least=1)
    milliseconds: float = flag(160.0, "a forward pass")
    sending: float = flag(0.5, "seconds of sending all gradients once, for each second of a backward pass")
    steps: int = flag(3, "steps measured", at_least=1)


class Link:
    """A link that carries one message after another.

    Args:
        seconds: time that an element takes.

    Attributes:
        sent: seconds of all messages.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._free_at, self.sent = seconds, 0.0, 0.0

    def start(self, tensor: torch.Tensor, axis: Axis) -> PendingMessage:
        """Starts a message; the tensor stays as it is."""
        duration = self._seconds * tensor.numel()
        self._free_at, self.sent = max(time.perf_counter(), self._free_at) + duration, self.sent + duration
        arrives_at, work = self._free_at, mock.Mock()
        work.wait = lambda: time.sleep(max(0.0, arrives_at - time.perf_counter()))
        return PendingMessage(tensor, work, axis)

    def start_part(self, tensor: torch.Tensor, axis: Axis) -> PendingMessage:
        """As `start`, for a message of which this rank receives its part."""
        self.start(tensor, axis)
        pending, part = self.start(tensor[:0], axis), tensor.chunk(axis.size)[axis.rank]
        return PendingMessage(part, pending._work, axis)


@contextlib.contextmanager
def carrying(link: Link) -> Iterator[None]:
    """Replaces the messages of gradients and weights by those of a link."""
    with (
        mock.patch.object(averaging, "start_reduce_scatter_sum", link.start_part),
        mock.patch.object(weight_gathers, "start_all_gather", link.start),
    ):
        yield


class Run:
    """The step of a data-parallel rank."""

    def __init__(self, flags: OverlapFlags, stage: int, *, overlaps: bool) -> None:
        names = [f"layers.{index}" for index in range(flags.layers)]
        network = [LayerSpec(name, LayerKind.BLOCK, LayerCost(1), SleepingLayer) for name in names]
        self.stack, self._micro_batches = LayerStack(network), flags.micro_batches
        self.layers = [layer for layer in self.stack.modules() if isinstance(layer, SleepingLayer)]
        parameters = list(self.stack.parameters())
        self.elements = sum(parameter.numel() for parameter in parameters)
        axis = Axis("gradient", 0, flags.ranks, tuple(range(flags.ranks)))
        groups, flats = [], []
        for members in in_buckets(parameters, self.elements // flags.buckets):
            flat = torch.cat([parameter.detach().view(-1) for parameter in members])
            for parameter, part in zip(members, flat.split([each.numel() for each in members]), strict=True):
                parameter.data = part.view_as(parameter)
            flats.append(flat)
            groups.append(FlatGroup.of(members, flat))
        order = {id(parameter): index for index, parameter in enumerate(parameters)}
        how: Any = (groups, lambda _: False, Averaging(axis, torch.float32))
        sums: FlatGradients
        if stage == 1:
            sums = MainGradients([torch.zeros_like(flat) for flat in flats], *how, order=order, overlaps=overlaps)
        else:
            parts = [torch.zeros(len(flat) // axis.size) for flat in flats]
            sums = PartitionGradients(parts, *how, order, overlaps=overlaps)
        self._sums = sums
        clipping = Clipping(0.0, Axis.single("model"), torch.device("cpu"))
        self._gradients = GradientOwner(sums, clipping, parameters, overlaps=overlaps)
        self._gradients.send_in_backward()
        self._gathers = WeightGathers(flats, [axis] * len(flats), groups, order, overlaps=overlaps)
        self.stack.before_layer = self._gathers.wait
        self.buckets = len(groups)

    def step(self) -> None:
        """Runs the passes of a step, and starts to gather the weights."""
        hidden, context = torch.zeros(1, 2, 4, requires_grad=True), SimpleNamespace()
        for number in range(1, self._micro_batches + 1):
            if number == self._micro_batches:
                self._gradients.begin_last()
            self.stack(hidden, context).sum().backward()
            self._gradients.accumulate()
        self._gradients.reduce()
        self._sums.clear()
        self._gathers.start()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures ZeRO 1 and 2 and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(OverlapFlags, words, prog="overlap.py", description=__doc__ or "")
    torch.set_num_threads(1)
    for stage in (1, 2):
        for overlaps in (False, True):
            name = f"zero{stage}_{'overlapped' if overlaps else 'blocking'}"
            exposed, formula = measure(flags, stage, overlaps=overlaps)
            print_figure("overlap", name, 100 * exposed, "% of the messages", planned=round(100 * formula, 1))
    return 0


def measure(flags: OverlapFlags, stage: int, *, overlaps: bool) -> tuple[float, float]:
    """The share of the messages that a step waits for, measured and as planned."""
    forward = flags.milliseconds / 1e3
    backward = 2 * forward
    run = Run(flags, stage, overlaps=overlaps)
    for layer in run.layers:
        layer.seconds = forward / flags.layers
    alone, _ = _timed(run, Link(0.0), flags.steps)
    gradients = backward * flags.sending
    seconds, sent = _timed(run, Link(gradients / run.elements), flags.steps)
    if not overlaps:
        return (seconds - alone) / sent, 1.0
    passes = flags.micro_batches if stage == 2 else 1
    exposed = passes * exposed_seconds(gradients, backward, run.buckets)
    exposed += exposed_seconds(gradients, forward, run.buckets)  # weights have as many elements
    return (seconds - alone) / sent, exposed / (gradients * (passes + 1))


def _timed(run: Run, link: Link, steps: int) -> tuple[float, float]:
    """Seconds of steps, and of their messages, after one that warms up."""
    with carrying(link):
        run.step()
        sent, started_at = link.sent, time.perf_counter()
        for _ in range(steps):
            run.step()
        return time.perf_counter() - started_at, link.sent - sent


if __name__ == "__main__":
    sys.exit(main())
