"""The CUDA kernel of AdamW, run on a CPU by the emulator, compared with float64."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator
from csrc.emulator.emulator import Buffer, Run

CHUNK = 1 << 16
BETAS, RATE, EPS, DECAY = (0.9, 0.95), 2.0**-8, 1e-8, 0.1
SETTINGS = (RATE, *BETAS, EPS, DECAY, 0.5)
HALF, BRAIN = torch.float16, torch.bfloat16
# elements, dtype of the gradient, dtype of the copy, shift behind a boundary, steps before
SMALL = [
    (35, torch.float32, None, 0, 0), (0, BRAIN, HALF, 0, 4), (64, BRAIN, BRAIN, 0, 2), (37, HALF, HALF, 1, 7),
    (1, torch.float32, BRAIN, 0, 0),
]  # fmt: skip
LARGE = [(CHUNK + 7, BRAIN, BRAIN, 0, 3), (5, HALF, None, 1, 0), (2 * CHUNK, torch.float32, None, 0, 1)]
Case = tuple[int, torch.dtype, torch.dtype | None, int, int]


class _Group:
    """The buffers of a list of tensors, and the table of a launch."""

    def __init__(self, run: Run, cases: list[Case]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.before, self.buffers, codes = [], [], []
        for count, gradient, copy, shift, steps in cases:
            weight, g, first = (torch.randn(count, generator=generator) for _ in range(3))
            second = torch.rand(count, generator=generator)
            values = [weight, g.to(gradient), first, second, torch.tensor([float(steps)])]
            self.before.append(values)
            own: list[Buffer | None] = [
                run.input(value, shift=shift) if kind == 1 else run.inout(value, shift=shift if kind < 4 else 0)
                for kind, value in enumerate(values)
            ]
            own.append(None if copy is None else run.inout(torch.full((count,), 9.0, dtype=copy)))
            self.buffers.append(own)
            for kind, buffer in enumerate(own):
                if buffer is not None:
                    buffer.describe(f"kind {kind} of tensor {len(self.buffers) - 1}")
            codes.append(sum(emulator.DTYPE_CODES[b.dtype] << (8 * k) for k, b in enumerate(own) if b is not None))
        counts = [case[0] for case in cases]
        firsts = [sum(-(-count // CHUNK) for count in counts[:number]) for number in range(len(counts) + 1)]
        addresses = [0 if own[kind] is None else own[kind].address for kind in range(6) for own in self.buffers]
        self.table = run.input(torch.tensor([*addresses, *counts, *firsts, *codes]))
        self.sizes = len(cases), firsts[-1]

    def check(self, factor: float) -> None:
        """Compares what is in the buffers with one step in float64."""
        for values, own in zip(self.before, self.buffers, strict=True):
            weight, gradient, first, second, steps = (value.double() for value in values)
            g, step = gradient * factor, float(steps) + 1
            first, second = BETAS[0] * first + (1 - BETAS[0]) * g, BETAS[1] * second + (1 - BETAS[1]) * g * g
            denominator = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
            weight = weight * (1 - RATE * DECAY) - RATE * first / (1 - BETAS[0] ** step) / denominator
            found = [buffer.tensor() if buffer is not None else None for buffer in own]
            for one, exact in zip((found[0], found[2], found[3]), (weight, first, second), strict=True):
                torch.testing.assert_close(one.double(), exact, rtol=1e-6, atol=1e-6)
            assert found[4] == step
            if found[5] is not None:
                assert torch.equal(found[5], found[0].to(found[5].dtype))


@pytest.mark.parametrize(("build", "order"), [("checked", "random"), ("plain", "reverse")])
def test_a_step(build: str, order: str) -> None:
    with emulator.launch("adamw", build, order) as run:
        group = _Group(run, SMALL if build == "checked" else LARGE)
        run.call("megatron_adamw_step", group.table, *group.sizes, *SETTINGS, None, None, None, None)
    group.check(0.5)


def test_what_is_read_on_the_device() -> None:
    with emulator.launch("adamw") as run:
        group = _Group(run, SMALL)
        rate, factor, go = (run.input(torch.tensor([value])) for value in (RATE, 0.25, 0.0))
        settings = (7.0, *SETTINGS[1:])  # the host's learning rate is not used
        run.call("megatron_adamw_step", group.table, *group.sizes, *settings, factor, rate, go, None)
    group.check(0.125)


def test_an_overflow_changes_nothing() -> None:
    with emulator.launch("adamw") as run:
        group = _Group(run, SMALL)
        skip = run.input(torch.tensor([1.0]))
        run.call("megatron_adamw_step", group.table, *group.sizes, *SETTINGS, None, None, skip, None)
    for values, own in zip(group.before, group.buffers, strict=True):
        assert all(torch.equal(buffer.tensor(), value) for value, buffer in zip(values, own[:5], strict=True))
        assert own[5] is None or (own[5].tensor() == 9).all()
