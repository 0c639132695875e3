"""Damages one value of one rank in the middle of a run: `python -m campaigns.run poison --cases 120`.

All ranks must agree on the end of the run, and no checkpoint may hold the damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from campaigns.campaign import Plan, Result
from megatron.engine.engine import Engine
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.state import moments, part_of
from megatron.errors import ExitCode
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train_here, write_tiny_corpus

STATE = ("weight", "master", "exp_avg", "exp_avg_sq")
TARGETS = ("loss", "gradient", "reduced gradient", *STATE)
VALUES = ("nan", "inf", "1e30", "flip")
STEPS, SAVE_INTERVAL = 8, 2

# name, ranks and flags of each layout
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp2-zero0": (2, {"tensor_model_parallel_size": 2, "zero_stage": 0}, ()),
    "tp2-zero1-bf16": (2, {"tensor_model_parallel_size": 2, "zero_stage": 1}, ("--bf16",)),
    "dp2-zero0": (2, {"zero_stage": 0}, ()),
    "dp2-zero1": (2, {"zero_stage": 1}, ()),
    "dp2-zero2-bf16": (2, {"zero_stage": 2}, ("--bf16",)),
    "dp2-zero3": (2, {"zero_stage": 3}, ()),
    "pp2-zero0": (2, {"pipeline_model_parallel_size": 2, "zero_stage": 0}, ()),
    "pp2-zero1-bf16": (2, {"pipeline_model_parallel_size": 2, "zero_stage": 1}, ("--bf16",)),
    "pp2dp2-zero1-bf16": (4, {"pipeline_model_parallel_size": 2, "zero_stage": 1}, ("--bf16",)),
    "tp2pp2-zero1": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1, "num_layers": 4},
        ("--pipeline-schedule", "interleaved-zb"),
    ),
    "tp2dp2-zero3": (4, {"tensor_model_parallel_size": 2, "zero_stage": 3}, ()),
}


@dataclass(frozen=True)
class Poison:
    """One damage.

    Attributes:
        step: the step, from 1, at which it happens; what is part of the state is damaged before it.
        parameter: which of the rank's parameters, as a part of all of them; or the name of one.
        element: which element, as a part of all of them.
        bit: which bit of it is flipped, where `value` is "flip".
    """

    rank: int
    step: int
    target: str
    value: str
    parameter: float | str = 0.0
    element: float = 0.0
    bit: int = 3

    def applied(self, values: torch.Tensor) -> None:
        """Damages a tensor in place."""
        if values.numel() == 0:
            return
        flat = values.detach().view(-1)
        place = int(self.element * flat.numel())
        if self.value == "flip":
            bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
            bits[place] ^= 1 << (self.bit % (8 * flat.element_size() - 1))
        else:
            flat[place] = float(self.value)


@dataclass(frozen=True)
class Ending:
    """The end of a poisoned run.

    Attributes:
        codes: exit code of each rank.
        text: the error of the first rank.
        bad_steps: steps that were counted as bad.
        checkpoints: by step, the number of values that are NaN, infinite or have an infinite square.
        state: everything in the last checkpoint.
        is_shared: whether other ranks held a copy of the damaged value.
    """

    codes: list[int]
    text: str
    bad_steps: int
    checkpoints: dict[int, int]
    state: dict[str, bytes]
    is_shared: bool

    @property
    def outcome(self) -> str:
        """One word for how the run dealt with it."""
        if self.codes[0]:
            return "ended"
        return "skipped" if self.bad_steps else "trained on"


def draw(generator: Random) -> tuple[str, Poison, list[str]]:
    """A random layout, poison and further flags."""
    name = generator.choice(sorted(LAYOUTS))
    poison = Poison(
        rank=generator.randrange(LAYOUTS[name][0]),
        step=generator.randrange(2, STEPS + 1),
        target=generator.choice(TARGETS),
        value=generator.choice(VALUES),
        parameter=generator.random(),
        element=generator.random(),
        bit=generator.randrange(31),
    )
    flags = ["--max-bad-steps", str(generator.choice((0, 2)))]
    if generator.random() < 0.5:
        flags += ["--no-async-save"]
    return name, poison, flags


def run_poisoned(
    corpus: TinyCorpus, folder: Path, layout: str, poison: Poison | None, more: Sequence[str] = ()
) -> Ending:
    """Trains a tiny run in a layout with a poison."""
    ranks, settings, flags = LAYOUTS[layout]
    line = corpus.flags(
        *flags, *more, folder=folder, save_interval=SAVE_INTERVAL, train_iters=STEPS, global_batch_size=8, **settings
    )
    results = run_ranks(_train, ranks, line, poison)
    loaded = {
        int(path.name.removeprefix("iter_")): _read(path) for path in sorted((folder / "checkpoints").glob("iter_*"))
    }
    newest = (
        json.loads((folder / "checkpoints" / f"iter_{max(loaded):07d}" / "manifest.json").read_text()) if loaded else {}
    )
    return Ending(
        codes=[code for code, _, _ in results],
        text=next((text for _, text, _ in results if text), ""),
        bad_steps=newest.get("record", {}).get("progress", {}).get("bad_steps", 0),
        checkpoints={step: sum(map(_wrong_values, tensors.values())) for step, tensors in loaded.items()},
        state={name: values.tobytes() for name, values in loaded[max(loaded)].items()} if loaded else {},
        is_shared=any(shared for _, _, shared in results),
    )


def _train(rank: int, flags: list[str], poison: Poison | None) -> tuple[int, str, bool]:
    """Exit code, error text and whether the damaged value had copies."""
    shared: list[bool] = []
    if poison is None or rank != poison.rank:
        return (*train_here(rank, flags), False)
    count = 0
    train_batch = Engine.train_batch

    def poisoned(engine: Engine, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        undo: Callable[[], None] = lambda: None  # noqa: E731
        if count == poison.step:
            undo = _damage(engine, poison, shared)
        try:
            return train_batch(engine, *arguments, **options)
        finally:
            undo()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_batch", poisoned)
        return (*train_here(rank, flags), any(shared))


def _damage(engine: Engine, poison: Poison, shared: list[bool]) -> Callable[[], None]:
    """Damages now or prepares the damage; returns what ends it after the step."""
    parameters = list(engine.module.parameters())
    if isinstance(poison.parameter, str):
        chosen = next(each for each in parameters if each.global_name == poison.parameter)
    else:
        chosen = parameters[int(poison.parameter * len(parameters))]
    if poison.target == "loss":
        loss = StepLoss.loss
        StepLoss.loss = lambda losses, *output, **options: _poisoned_loss(  # type: ignore[method-assign]
            losses, loss(losses, *output, **options), poison
        )
        return lambda: setattr(StepLoss, "loss", loss)
    if poison.target == "gradient":

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            damaged = gradient.clone()
            poison.applied(damaged)
            return damaged

        return chosen.register_hook(hook).remove
    if poison.target == "reduced gradient":
        place, name = engine.deepspeed.optimizer, "step"
        step = getattr(place, name)

        def damaged_step(*arguments: Any) -> Any:
            poison.applied(_reduced_gradient(engine, chosen))
            return step(*arguments)

        setattr(place, name, damaged_step)
        return lambda: setattr(place, name, step)
    values = _state(engine, chosen, poison.target)
    mesh, spec = engine.mesh, shard_spec_of(chosen)
    is_partitioned = engine.zero_stage == 3 or (engine.zero_stage > 0 and poison.target != "weight")
    shared.append((mesh.tp.size > 1 and not spec.split_axes) or (mesh.dp.size > 1 and not is_partitioned))
    poison.applied(values)
    return lambda: None


def _poisoned_loss(losses: StepLoss, loss: torch.Tensor, poison: Poison) -> torch.Tensor:
    factor = {"nan": math.nan, "inf": math.inf, "1e30": 1e30, "flip": 2.0}[poison.value]
    losses.totals.sums[0] *= factor
    return loss * factor


def _state(engine: Engine, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    if kind == "weight":
        return getattr(parameter, "ds_tensor", parameter).data
    part = part_of(engine, parameter)
    if part is None:
        return torch.empty(0)
    return part.values if kind == "master" else dict(moments(engine, part))[kind]  # type: ignore[index]


def _reduced_gradient(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's gradient after the reduction, before the norm is taken."""
    if engine.view.is_direct:
        return parameter.grad if parameter.grad is not None else torch.empty(0)
    return next(engine.view.reduced_gradients(), torch.empty(0))


def _read(folder: Path) -> dict[str, np.ndarray]:
    """All values of a checkpoint, by file and tensor."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                assert entry["dtype"] == "F32"
                begin, end = entry["data_offsets"]
                found[f"{path.name}:{name}"] = np.frombuffer(content[8 + size + begin : 8 + size + end], np.float32)
    return found


def _wrong_values(values: np.ndarray) -> int:
    with np.errstate(over="ignore", invalid="ignore"):
        return int((~np.isfinite(values * values)).sum())


def problem_of(ending: Ending, poison: Poison, flags: Sequence[str]) -> str:
    """The problem after any damage; empty if none."""
    # a save in the background still copies when the next step begins
    is_saved = poison.step > SAVE_INTERVAL + ("--no-async-save" not in flags)
    if len(set(ending.codes)) != 1 or ending.codes[0] not in (ExitCode.DONE, ExitCode.NUMERICS):
        return f"exit codes {ending.codes}: {ending.text}"
    if any(ending.checkpoints.values()):
        return f"values in checkpoints that are not finite, by step: {ending.checkpoints}"
    if is_saved and SAVE_INTERVAL not in ending.checkpoints:
        return f"no checkpoint of step {SAVE_INTERVAL}, but of steps {sorted(ending.checkpoints)}"
    if ending.codes[0]:
        return "" if ending.text else "no error message"
    return "" if max(ending.checkpoints) == STEPS else f"the newest checkpoint is of step {max(ending.checkpoints)}"


def run_cases(plan: Plan) -> Iterator[Result]:
    """Poisons random values of random layouts, and compares runs that trained on with undamaged ones."""
    corpus = write_tiny_corpus(plan.folder)
    clean: dict[str, Ending] = {}
    for number in plan.numbers:
        layout, poison, flags = draw(plan.random(number))
        ending = run_poisoned(corpus, plan.folder / str(number), layout, poison, flags)
        problem, outcome = problem_of(ending, poison, flags), ending.outcome
        if outcome == "trained on":
            if layout not in clean:
                clean[layout] = run_poisoned(corpus, plan.folder / layout, layout, None)
            is_same = ending.state == clean[layout].state
            # a weight that ZeRO copies from its master again leaves nothing but its part in one gradient
            is_refreshed = poison.target == "weight" and "zero0" not in layout
            if not is_same and (poison.value in ("nan", "inf") or (ending.is_shared and not is_refreshed)):
                problem = problem or "the run trained on, and its last checkpoint differs from an undamaged run's"
            outcome += ", no trace" if is_same else ", changed"
        problem = problem and f"{layout} {poison} {flags}: {problem}"
        yield Result(number, f"{poison.target}: {poison.value}", outcome, problem)
