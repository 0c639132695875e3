"""A contract with the installed DeepSpeed: each private name that is relied upon is there and does what is expected."""

from __future__ import annotations

import ast
import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.utils import PIPE_REPLICATED, is_model_parallel_parameter

from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.deepspeed_internals.base_view import SCALER_COUNTERS, OptimizerView
from megatron.engine.deepspeed_internals.optimizer_views import (
    AccumulatedView,
    DirectView,
    PartitionedView,
    SubGroupView,
)
from megatron.engine.deepspeed_internals.parameters import is_whole, mark_parameter, partition_of, whole_numel
from megatron.engine.deepspeed_internals.pipeline_stage import BuiltStage
from megatron.engine.deepspeed_internals.set_up import replaced_backend, skip_shared_memory_build
from megatron.engine.engine import Engine
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.state import owned_pieces
from megatron.engine.tensor_parts import tensors_in
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import BF16, RECIPE, stand_in_engine, step_figures, train
from tests.helpers.architecture.deepspeed_names import PRIVATE_NAMES, used_names
from tests.helpers.architecture.tables import DEEPSPEED_DOOR
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches

# ZeRO stage, flags, the view that must be chosen, and whether each rank holds all reduced gradients
RUNS: tuple[tuple[int, list[str], type[OptimizerView], bool], ...] = (
    (0, [], DirectView, True),
    (1, [], PartitionedView, False),
    (1, BF16, AccumulatedView, False),
    (2, [], PartitionedView, False),
    (2, BF16, PartitionedView, False),
    (3, [], SubGroupView, False),
    (3, BF16, SubGroupView, False),
)
DOOR = Path(__file__).parents[3] / DEEPSPEED_DOOR
NEW_VALUE = 0.5  # exact in bf16


def held_weights(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The weights of a parameter that this rank computes with, flat."""
    partition = partition_of(parameter)
    return parameter.data.view(-1) if partition is None else partition[: engine.view.slice_of(parameter).values.numel()]


def check_slices(engine: Engine) -> None:
    """Slices cover each parameter once per copy, show the weights, and are views into what the optimizer updates."""
    view, mesh = engine.view, engine.mesh
    trained = {id(parameter) for group in view.groups() for parameter in group}
    masters = {tensor.data_ptr() for tensor in view.masters()}
    for parameter in engine.parameters():
        part = view.slice_of(parameter)
        assert id(parameter) in trained
        length = 0 if part is None else part.values.numel()
        total = all_reduce_sum(torch.tensor([length]), mesh.gradient)
        assert int(total) == whole_numel(parameter) * (mesh.gradient.size if view.is_direct else 1)
        if part is not None:
            first = 0 if partition_of(parameter) is not None else part.first
            weights = held_weights(engine, parameter)[first : first + length]
            assert torch.equal(part.values.to(weights.dtype), weights)
            assert part.values.data_ptr() == part.flat.data_ptr() + part.offset * part.flat.element_size()
            assert part.flat.data_ptr() in masters


def check_gradients(engine: Engine, config: Any, each_holds_all: bool) -> float:
    """The norm is that of the reduced gradients, taken when the update begins."""
    squares: list[float] = []

    def measure(phase: str) -> None:
        if phase == "step":
            reduced = list(engine.view.reduced_gradients())
            assert {id(tensor) for tensor in reduced} <= {id(tensor) for tensor in engine.view.gradients()}
            squares.append(sum(float(tensor.double().square().sum()) for tensor in reduced))

    engine.on_phase = measure
    engine.train_batch(local_batches(RECIPE, config, engine.mesh, 0, True), RECIPE.learning_rate)
    square = torch.tensor([squares[-1]], dtype=torch.float64)
    if not each_holds_all:
        square = all_reduce_sum(square, engine.mesh.gradient)
    norm = float(engine.view.norm())
    assert norm > 0 and norm == pytest.approx(float(square) ** 0.5, rel=1e-4)
    return norm


def check_owned_gradients(engine: Engine) -> None:
    """DeepSpeed's hooks are gone, and what it would measure and clear is known here."""
    wrapper, view = engine.deepspeed.optimizer, engine.view
    trained = [parameter for group in view.groups() for parameter in group]
    assert all(parameter.grad is None for parameter in trained)  # though `zero_grad` does nothing
    assert all(len(parameter._post_accumulate_grad_hooks) == 1 for parameter in trained)  # ours
    assert engine.deepspeed.get_global_grad_norm() == wrapper._global_grad_norm == view.norm()
    assert not list(tensors_in([getattr(wrapper, "averaged_gradients", {}), getattr(wrapper, "ipg_buckets", {})]))
    if view.is_direct:
        return
    flats = wrapper.bf16_groups_flat if isinstance(view, AccumulatedView) else wrapper.bit16_groups_flat
    for parameter in trained:  # the weights lie in the flat tensors by whose order gradients are divided
        assert any(0 <= parameter.data_ptr() - flat.data_ptr() < flat.nbytes for flat in flats)
    ranks = engine.mesh.gradient.size
    parts = list(view.reduced_gradients())
    for part, master, flat in zip(parts, view.masters(), flats, strict=True):
        own = flat.view(ranks, -1)[engine.mesh.gradient.rank]
        assert part.shape == master.shape == own.shape and torch.equal(master.to(flat.dtype), own)
        assert (master.data_ptr() == own.data_ptr()) is (flat.dtype is torch.float32)  # which is updated in place
    fragments = [each._hp_mapping.hp_fragment for each in trained if getattr(each, "_hp_mapping", None) is not None]
    held = {each.untyped_storage().data_ptr() for each in (*flats, *view.masters())}
    assert {fragment.untyped_storage().data_ptr() for fragment in fragments} <= held  # no other copy is kept
    if isinstance(view, AccumulatedView):
        own = [
            each.narrow(0, engine.mesh.gradient.rank * len(part), len(part)).data_ptr()
            for each, part in zip(wrapper.fp32_groups_gradients_flat, parts, strict=True)
        ]
        assert own == [part.data_ptr() for part in parts]


def check_refreshing(engine: Engine) -> None:
    """What is written into slices is what the network computes with, after a refresh."""
    parts = [engine.view.slice_of(parameter) for parameter in engine.parameters()]
    for part in parts:
        if part is not None:
            part.values.fill_(NEW_VALUE)
    engine.view.refresh_weights()
    for parameter, part in zip(engine.parameters(), parts, strict=True):
        if part is not None or partition_of(parameter) is None:
            assert (held_weights(engine, parameter) == NEW_VALUE).all()
        if is_whole(parameter):
            assert (parameter.data == NEW_VALUE).all() and parameter.numel() == whole_numel(parameter)


def norms_of_views(rank: int) -> list[float]:
    """Checks the view of each ZeRO stage on one rank; the norms of its first step."""
    norms = []
    for stage, flags, view_class, each_holds_all in RUNS:
        config = layout_config(RECIPE, (1, 1, 2), stage, flags)
        engine = build_engine(config, open_mesh(config.parallel))
        assert type(engine.view) is view_class, (stage, flags)
        check_slices(engine)
        norms.append(check_gradients(engine, config, each_holds_all))
        if stage < 3:
            check_owned_gradients(engine)
        check_refreshing(engine)
        assert engine.view.loss_scale_state() == {} and engine.view.loss_scale() == 1.0
        if stage == 3:
            with deepspeed.zero.GatheredParameters(list(engine.parameters())):
                assert all(is_whole(parameter) for parameter in engine.parameters())
            assert not all(is_whole(parameter) for parameter in engine.parameters()) or not flags
    return norms


def test_each_view_shows_the_same_optimizer_on_two_ranks() -> None:
    first, second = run_ranks(norms_of_views, 2)
    assert first == second
    assert first == pytest.approx([first[0]] * len(first), rel=2e-2)  # bf16
    in_fp32 = [norm for norm, (_, flags, *_) in zip(first, RUNS, strict=True) if not flags]
    assert in_fp32 == pytest.approx([first[0]] * len(in_fp32), rel=1e-5)


def unused(rank: int) -> bool:
    """Whether a parameter without a gradient decays as the others do."""
    config = layout_config(RECIPE, (1, 1, 1), 0, [])
    engine = build_engine(config, open_mesh(config.parallel))
    parameter = next(each for each in engine.parameters() if each.dim() > 1)
    before = parameter.detach().clone()
    parameter.requires_grad_(False)
    train(engine, config, 0, 1)
    decay = 1 - RECIPE.learning_rate * RECIPE.weight_decay
    return bool(torch.allclose(parameter, before * decay, rtol=1e-6, atol=0))


def test_a_parameter_without_a_gradient_is_updated_too() -> None:
    assert run_ranks(unused, 1) == [True]


def accumulated(rank: int, flags: list[str]) -> list[torch.Tensor]:
    """The weights and moments after three steps of four micro-batches each."""
    config = layout_config(RECIPE, (1, 1, 1), 1, [*BF16, *flags])
    engine = build_engine(config, open_mesh(config.parallel))
    assert type(engine.view) is AccumulatedView
    train(engine, config, 0, 3)
    return [values.clone() for _, values in owned_pieces(engine)]


def test_hooks_may_accumulate_during_the_backward_pass(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"bf16": {"immediate_grad_update": True}}))
    (usual,), (immediate,) = (run_ranks(accumulated, 1, flags) for flags in ([], ["--deepspeed_config", str(path)]))
    assert all(torch.equal(*pair) for pair in zip(usual, immediate, strict=True))


def dynamic_scaler(**options: Any) -> DynamicLossScaler:
    """A loss scaler as DeepSpeed builds it in fp16."""
    fixed = {"min_scale": 1, "consecutive_hysteresis": False, "raise_error_at_min_scale": False, "dtype": torch.half}
    return DynamicLossScaler(**options, **fixed)


class _Scaled(DirectView):
    """A view of weights that are updated in place, under a loss scale."""

    refreshes = 0

    def refresh_weights(self) -> None:
        self.refreshes += 1


def test_an_overflow_halves_the_scale_and_changes_nothing_else() -> None:
    """fp16 by hand, since DeepSpeed refuses it on a CPU."""
    weight, mesh = torch.nn.Parameter(torch.zeros(2)), ParallelMesh.single()
    mark_parameter(weight, is_counted=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = dynamic_scaler(init_scale=1024.0, scale_window=1000, delayed_shift=1)
    wrapper = SimpleNamespace(loss_scaler=scaler)
    engine = stand_in_engine(optimizer, wrapper, is_fp16=True)
    view = _Scaled(engine, mesh, Clipping(1.0, mesh.model, mesh.device), Buckets(1), [weight])
    gate = UpdateGate(mesh, spike_deviations=None, allows_overflow=True)
    view.guard(gate)
    for gradient, overflows in ((math.inf, True), (512.0, False)):
        verdict = gate.begin(lambda: step_figures(1.0, view.norm()))
        (weight * torch.tensor([gradient, 0.0])).sum().backward()
        view.accumulate()
        view.reduce()
        wrapper.step()
        assert verdict.is_overflow is overflows and not verdict.is_bad and weight.grad is None
        assert float(view.loss_scale()) == 512.0 and view.refreshes == int(not overflows)
    assert view.norm() == 1.0 and weight.tolist() == pytest.approx([-1.0, 0.0], rel=1e-5)


def phases_of_a_pipeline(rank: int) -> set[str]:
    """The phases that one stage announced in a step."""
    config = layout_config(RECIPE, (1, 2, 1), 1, ["--pipeline-engine", "deepspeed"])
    engine = build_engine(config, open_mesh(config.parallel))
    phases: set[str] = set()
    engine.on_phase = phases.add
    untouched = dict(type(engine.deepspeed)._INSTRUCTION_MAP)
    engine.train_batch(local_batches(RECIPE, config, engine.mesh, 0, True), RECIPE.learning_rate)
    assert type(engine.deepspeed)._INSTRUCTION_MAP == untouched != engine.deepspeed._INSTRUCTION_MAP
    assert engine.deepspeed.grid is engine.module._grid
    return phases


def test_a_pipeline_engine_runs_a_built_stage_and_announces_its_instructions() -> None:
    assert run_ranks(phases_of_a_pipeline, 2) == [{"forward", "backward", "p2p", "step"}] * 2


def test_a_built_stage_sets_what_the_constructor_would() -> None:
    stage = BuiltStage(ParallelMesh.single(), loss=lambda: torch.zeros(()))
    own = set(vars(stage)) - set(vars(torch.nn.Module()))
    source = inspect.getsource(PipelineModule)
    assert own and [name for name in own if f"self.{name} = " not in source and f"self.{name}: " not in source] == []
    assert stage.get_additional_losses() is None


def test_the_names_of_the_contract_are_those_that_are_used() -> None:
    used = {name for path in DOOR.glob("*.py") for name in used_names(ast.parse(path.read_text()))}
    assert used == {each.name for each in PRIVATE_NAMES} and len(PRIVATE_NAMES) == len(used)


def test_the_installed_version_has_each_private_name() -> None:
    missing = [
        f"{each.owner} has no {each.name}; with it {each.promise}" for each in PRIVATE_NAMES if not each.is_kept()
    ]
    assert not missing, f"DeepSpeed {deepspeed.__version__}: {missing}"
    assert not any(each._replace(name=each.name + "_of_old").is_kept() for each in PRIVATE_NAMES)


def test_a_mark_decides_what_the_norm_counts() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    mark_parameter(parameter, is_counted=True, is_tied_copy=True)
    assert is_model_parallel_parameter(parameter) and getattr(parameter, PIPE_REPLICATED)
    mark_parameter(parameter, is_counted=False)
    assert not is_model_parallel_parameter(parameter) and not getattr(parameter, PIPE_REPLICATED)


def test_the_loss_scaler_has_the_counters_that_a_checkpoint_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: 1)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", alone)
    scaler = dynamic_scaler(init_scale=4.0, scale_window=1, delayed_shift=2)
    before = {name: getattr(scaler, name) for name in SCALER_COUNTERS}
    scaler.update_scale(True)
    scaler.update_scale(True)
    changed = {name for name in SCALER_COUNTERS if getattr(scaler, name) != before[name]}
    assert changed == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}


def test_messages_and_the_build_of_collectives_are_where_they_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    skip_shared_memory_build()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    for backend in (None, SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: 3)):
        monkeypatch.setattr(deepspeed.comm.comm, "cdb", backend)
        with replaced_backend(lambda own: SimpleNamespace(**{**vars(own), "get_rank": lambda group=None: 7})):
            assert backend is None or deepspeed.comm.get_rank() == 7
        assert deepspeed.comm.comm.cdb is backend
