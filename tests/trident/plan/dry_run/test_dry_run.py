"""Dry runs of all ranks: simulated programs match, and every planted fault is named with its rank."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.config import NO_PROGRAM
from megatron.errors import ConfigError, ExitCode
from megatron.parallel.mesh import ParallelMesh, requested_axes, requested_experts
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.schedule_files import schedule_text
from pretrain_gpt import train
from tests.helpers.tiny_run import write_tiny_corpus
from tests.trident.plan.dry_run.networks import EXPERTS, NETWORK, TP2_PP2, dry_run_of
from trident.plan.command_line import checked_dry_run
from trident.plan.dry_run import simulation
from trident.plan.dry_run.programs import ProgramEntry, RankProgram
from trident.plan.dry_run.recording import RankMessage
from trident.plan.dry_run.shares import Pieces
from trident.plan.dry_run.simulation import DryRun, dry_run_lines

ROOT = Path(__file__).resolve().parents[4]
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "12", "--kv-lora-rank", "8", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "8", "--qk-layernorm", "--position-embedding-type", "rope"),
)
MULTI_TOKEN = ("--mtp-num-layers", "2", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights")
LAYOUTS = {
    "data": ((), 8),
    "tensor and pipeline": (TP2_PP2, 8),
    "sequence parallel, interleaved": (
        (*TP2_PP2, "--sequence-parallel", "--virtual-pipeline-model-parallel-size", "2"),
        8,
    ),
    "zbv": ((*TP2_PP2, "--pipeline-schedule", "zbv"), 8),
    "ring": (("--context-parallel-size", "4", "--tensor-model-parallel-size", "2", "--num-layers", "1"), 16),
    "ulysses": (("--ds-sequence-parallel-size", "2", "--pipeline-model-parallel-size", "2"), 8),
    "ZeRO 2": (("--tensor-model-parallel-size", "2", "--zero-stage", "2"), 8),
    "fp32": (("--no-bf16", "--zero-stage", "0", "--tensor-model-parallel-size", "2"), 8),
    "ramp-up": ((*TP2_PP2, "--rampup-batch-size", "8", "8", "24", "--train-samples", "288"), 8),
    "multi-token prediction": ((*TP2_PP2, "--sequence-parallel", *MULTI_TOKEN), 8),
    "experts": ((*EXPERTS, *TP2_PP2, "--sequence-parallel"), 16),
    "latents": ((*LATENT, *EXPERTS, *TP2_PP2, "--sequence-parallel"), 16),
    "experts and a ring": ((*EXPERTS, "--context-parallel-size", "2", "--zero-stage", "2", "--num-layers", "1"), 8),
    "whole experts": ((*EXPERTS, "--expert-tensor-parallel-size", "1", *TP2_PP2, "--sequence-parallel"), 16),
    "Muon": ((*TP2_PP2, "--optimizer", "muon", "--save", "x", "--save-interval", "3"), 8),
    "Muon, experts, ZeRO 2": ((*EXPERTS, *TP2_PP2, "--optimizer", "muon", "--zero-stage", "2"), 16),
    "Muon, fp32": (("--tensor-model-parallel-size", "2", "--optimizer", "muon", "--no-bf16", "--zero-stage", "0"), 8),
    "tensor 4": (("--tensor-model-parallel-size", "4", "--recompute-granularity", "full", "--num-layers", "2"), 8),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("flags", "size"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_programs_of_all_ranks_match(flags: tuple[str, ...], size: int) -> None:
    dry_run = dry_run_of(flags, size)
    assert list(dry_run.problems()) == []
    assert len(dry_run.programs) == (3 if "--rampup-batch-size" in flags else 1)
    sizes, experts = requested_axes(dry_run.config.parallel, size), requested_experts(dry_run.config.parallel)
    for rank in range(size):
        program, mesh = dry_run.programs[0].of(rank), ParallelMesh.at(sizes, rank, experts=experts)
        assert program.rank == rank
        assert program.groups["gradient"] == mesh.gradient.ranks
        assert program.groups["model"] == mesh.model.ranks
        assert program.groups["embedding"] == mesh.embedding.ranks
        assert program.groups["ep"] == mesh.ep.ranks
        assert program.groups["expert_gradient"] == mesh.expert_gradient.ranks
        assert all(rank in event.message.ranks for event in program.events)
        assert any(event.message.ranks == mesh.gradient.ranks for event in program.events)


@pytest.fixture(scope="module")
def sound() -> DryRun:
    """Two stages of two tensor-parallel ranks, four replicas of them."""
    return dry_run_of((*TP2_PP2, "--sequence-parallel"), 16)


Change = Callable[[list[ProgramEntry]], list[ProgramEntry]]


def with_program(sound: DryRun, deviating: RankProgram) -> list[str]:
    """The problems if one rank has another program."""
    return list(dataclasses.replace(sound, programs={0: sound.programs[0].with_deviating(deviating)}).problems())


def with_fault(sound: DryRun, rank: int, change: Change) -> list[str]:
    """The problems if one rank changes its messages."""
    program = sound.programs[0].of(rank)
    deviating = dataclasses.replace(program, events=tuple(change(list(program.events))))
    assert deviating.events != program.events
    return with_program(sound, deviating)


def positions(program: RankProgram, kind: str, part: str = "") -> list[int]:
    """The indices of messages of a kind in a program."""
    return [
        index
        for index, (message, named) in enumerate(program.events)
        if message.kind == kind and named.startswith(part)
    ]


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_a_rank_that_skips_a_collective_is_named(sound: DryRun, rank: int) -> None:
    index = positions(sound.programs[0].of(rank), "all-reduce", "norm")[0]
    found = with_fault(sound, rank, lambda events: events[:index] + events[index + 1 :])
    assert len(found) == 1
    assert found[0].startswith(f"step 0, rank {rank}, message {index + 1} (norm and loss): all-reduce of 2 float64")
    assert found[0].endswith(f"has all-reduce of 1 float64 (norm and loss, message {index})")


@pytest.mark.parametrize("rank", [2, 13])
def test_swapped_messages_are_named(sound: DryRun, rank: int) -> None:
    kind = "send" if rank < 8 else "receive"
    first, second = positions(sound.programs[0].of(rank), kind, "output")[:2]

    def swap(events: list[ProgramEntry]) -> list[ProgramEntry]:
        events[first], events[second] = events[second], events[first]
        return events

    found = with_fault(sound, rank, swap)
    assert len(found) == 1
    assert f"rank {rank}, message {first}" in found[0]
    assert "output of chunk 0, micro-batch 0" in found[0]
    assert "output of chunk 0, micro-batch 1" in found[0]


def swapped(index: int) -> Change:
    """Exchanges two consecutive messages."""
    return lambda events: [*events[:index], events[index + 1], events[index], *events[index + 2 :]]


def test_collectives_of_two_groups_in_another_order_are_named(sound: DryRun) -> None:
    events = sound.programs[0].of(5).events
    index = positions(sound.programs[0].of(5), "all-reduce", "norm")[-1]
    assert events[index].message.ranks != events[index + 1].message.ranks
    (found,) = with_fault(sound, 5, swapped(index))
    assert found.startswith(f"step 0, rank 5, message {index} (weights): all-gather of ")
    assert "where the other ranks of its class have all-reduce of " in found


@pytest.mark.parametrize("rank", [1, 18])
def test_ranks_that_would_wait_for_each_other_are_named(routed: DryRun, rank: int) -> None:
    """Two groups of which one rank and another are in both, in two orders."""
    events = routed.programs[0].of(rank).events
    index = next(
        index
        for index in positions(routed.programs[0].of(rank), "reduce-scatter", "gradients")
        if {*events[index].message.ranks} < {*events[index + 1].message.ranks}
        or {*events[index].message.ranks} > {*events[index + 1].message.ranks}
    )
    other = min({*events[index].message.ranks} & {*events[index + 1].message.ranks} - {rank})
    (found,) = with_fault(routed, rank, swapped(index))
    assert found.startswith(f"step 0, rank {rank}, message {index} (gradients): {events[index + 1].message}; rank ")
    assert f"; rank {other}, message {index} (gradients): {events[index].message}: each waits" in found
    assert found.endswith(f"the last for rank {rank}, which may hang the run")


def test_two_stages_that_receive_before_they_send_are_named(sound: DryRun) -> None:
    """The output of a micro-batch, begun after the gradient that is computed from it, on all ranks of a stage."""
    programs = sound.programs[0]
    simulated = dict(programs.simulated)
    for rank in (0, 1):
        program = simulated[rank]
        events = list(program.events)
        events.insert(positions(program, "receive")[-1], events.pop(positions(program, "send")[-1]))
        simulated[rank] = dataclasses.replace(program, events=tuple(events))
    (found,) = dataclasses.replace(sound, programs={0: dataclasses.replace(programs, simulated=simulated)}).problems()
    assert found.startswith("step 0, rank 0, message ")
    assert "receive of " in found and "; rank 8, message " in found
    assert found.endswith("the last for rank 0, which may hang the run")


def test_a_group_with_wrong_ranks_is_named(sound: DryRun) -> None:
    program = sound.programs[0].of(6)
    right, wrong = program.groups["tp"], (4, 5)
    assert right == (6, 7)
    events = [
        ProgramEntry(dataclasses.replace(message, ranks=wrong), part)
        if message.ranks == right
        else ProgramEntry(message, part)
        for message, part in program.events
    ]
    deviating = dataclasses.replace(program, events=tuple(events), groups={**program.groups, "tp": wrong})
    found = with_program(sound, deviating)
    assert found[0] == "step 0, rank 6: its group tp has ranks 4, 5, which the others do not have"
    assert any("rank 6, message " in sentence for sentence in found[1:])


def test_another_size_or_type_is_named(sound: DryRun) -> None:
    index = positions(sound.programs[0].of(3), "reduce-scatter", "gradients")[0]

    def change(events: list[ProgramEntry]) -> list[ProgramEntry]:
        message, part = events[index]
        events[index] = ProgramEntry(RankMessage(message.kind, message.ranks, message.elements, "bfloat16"), part)
        return events

    (found, *_) = with_fault(sound, 3, change)
    assert found.startswith(f"step 0, rank 3, message {index} (gradients): reduce-scatter of ")
    assert "bfloat16" in found and "float32" in found


def test_a_missing_part_of_a_tensor_is_named(sound: DryRun) -> None:
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    boxes = sound.pieces.boxes[name]
    assert [box.rank for box in boxes] == [8, 9]
    for box in boxes:
        left = [other for other in boxes if other is not box]
        pieces = Pieces(sound.pieces.shapes, {**sound.pieces.boxes, name: left})
        (found,) = dataclasses.replace(sound, pieces=pieces).problems()
        assert found.startswith(f"step 9, checkpoint: {name}: 2,048 of 4,096 elements are saved by no rank")
        assert found.endswith(f", of rank {box.rank}")


@pytest.fixture(scope="module")
def routed() -> DryRun:
    """Four experts over four ranks, on two stages of two tensor-parallel ranks, two replicas of each expert."""
    return dry_run_of((*EXPERTS, *TP2_PP2), 32)


def test_a_missing_expert_is_named(routed: DryRun) -> None:
    name = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    boxes = routed.pieces.boxes[name]
    assert [box.rank for box in boxes] == [*range(8)]
    for box in boxes:
        left = [other for other in boxes if other is not box]
        pieces = Pieces(routed.pieces.shapes, {**routed.pieces.boxes, name: left})
        (found,) = dataclasses.replace(routed, pieces=pieces).problems()
        assert found.startswith(f"step 9, checkpoint: {name}: 2,048 of 16,384 elements are saved by no rank")
        assert f"the shard from {list(box.start)}, of" in found


@pytest.mark.parametrize("rank", [1, 18])
def test_a_rank_that_sends_its_tokens_to_other_experts_is_named(routed: DryRun, rank: int) -> None:
    index = positions(routed.programs[0].of(rank), "all-to-all")[-1]

    def change(events: list[ProgramEntry]) -> list[ProgramEntry]:
        message, part = events[index]
        events[index] = ProgramEntry(dataclasses.replace(message, elements=message.elements // 2), part)
        return events

    found = with_fault(routed, rank, change)
    assert len(found) == 1
    assert found[0].startswith(f"step 0, rank {rank}, message {index} (")


@pytest.mark.parametrize("step", [0, 3, 8])
def test_two_ranks_that_read_one_sample_are_named(sound: DryRun, step: int) -> None:
    given = sound.steps[step]
    read = [given.of_replica(sound.config, replica) for replica in range(4)]
    assert sorted(np.concatenate(read).tolist()) == [*range(32 * step, 32 * step + 32)]
    wrong = read[2].copy()
    wrong[0] = read[1][0]
    found = list(dataclasses.replace(sound, deviating_samples={(step, 2): wrong}).problems())
    assert found == [
        f"step {step}, rank 4: reads sample {read[1][0]}, which rank 2 reads too",
        f"step {step}: no rank reads sample {read[2][0]}",
    ]


def test_an_epoch_of_a_token_file_is_covered(tmp_path: Path) -> None:
    prefix = write_tiny_corpus(tmp_path).prefix
    flags = ("--data-path", prefix, "--split", "1,0,0", "--train-iters", "10000", "--global-batch-size", "8")
    dry_run, tokens = dry_run_of(flags, 4), Path(f"{prefix}.bin").stat().st_size // 2
    last, epoch = dry_run.steps[-1], (tokens - 1) // 16
    assert 1 < len(dry_run.steps) < 10000
    assert not list(dry_run.problems())
    assert last.first < epoch <= last.first + last.size


def test_the_flag_simulates_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*NETWORK, *TP2_PP2, "--dry-run-ranks", "32"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "32 ranks: pp 2 x dp 8 x tp 2; 4 classes of ranks" in shown
    assert "samples: 288 in 9 steps" in shown
    assert "activations" in shown
    assert "the programs of all ranks match" in shown


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ((), 3),
        (("--optimizer", "lion"), 2),
        (("--optimizer", "lion", "--ema-decay", "0.9"), 3),
        (("--optimizer", "schedule-free", "--lr-decay-style", "constant"), 4),
    ],
)
def test_the_number_of_pieces_of_a_checkpoint(flags: tuple[str, ...], kinds: int) -> None:
    dry_run = dry_run_of(flags, 2)
    pieces = kinds * dry_run.programs[0].saved_pieces().total()
    assert any(f"a checkpoint has {pieces} pieces in 2 files" in line for line in dry_run_lines(dry_run, 1.0))


def test_mismatched_ranks_raise_an_error(sound: DryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sound.programs[0].of(5)
    deviating = sound.programs[0].with_deviating(dataclasses.replace(program, events=program.events[:-1]))
    monkeypatch.setattr(simulation, "simulate_run", lambda *_: dataclasses.replace(sound, programs={0: deviating}))
    with pytest.raises(ConfigError, match=r"step 0, rank 5 ends without the all-gather of .* \(weights\)"):
        simulation.print_dry_run(*checked_dry_run([*NETWORK, *TP2_PP2, "--dry-run-ranks", "16"], NO_PROGRAM))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--zero-stage", "3"), "--dry-run-ranks cannot be combined with --zero-stage 3"),
        (("--pipeline-model-parallel-size", "2", "--pipeline-engine", "deepspeed"), "Drop --pipeline-engine"),
        (("--num-experts", "3"), "16 tokens of a micro-batch on a rank x --moe-router-topk 2 are not a multiple"),
        (("--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size 3"),
        (("--plan-only",), "--plan-only cannot be combined with --dry-run-ranks"),
    ],
)
def test_unsupported_settings_are_refused(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        checked_dry_run([*NETWORK, *flags, "--dry-run-ranks", "8"], NO_PROGRAM)


@pytest.fixture(scope="module")
def schedule_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a file for 2 ranks and 8 micro-batches, which splits the backward pass of the last chunk's first one."""
    path = tmp_path_factory.mktemp("schedule") / "mine.csv"
    path.write_text(schedule_text(build_schedule("1f1b", 2, 1, 8)).replace("1B0", "1I0,1W0"))
    return "--pipeline-model-parallel-size", "2", "--pipeline-schedule", str(path)


def test_a_schedule_file_is_simulated(schedule_flags: tuple[str, ...]) -> None:
    ours, named = (
        dry_run_of(("--global-batch-size", "32", *flags), 8) for flags in (schedule_flags, schedule_flags[:2])
    )
    assert not list(ours.problems())
    first, last = ours.programs[0].of(0), ours.programs[0].of(4)
    assert len(first.events) == len(named.programs[0].of(0).events)
    assert len(last.events) == len(named.programs[0].of(4).events)
    index = positions(last, "receive", "output of chunk 0, micro-batch 3")[0]
    found = with_fault(ours, 5, lambda events: events[:index] + events[index + 1 :])
    assert any("rank 5" in each and "output of chunk 0, micro-batch 3" in each for each in found)


def test_a_file_for_other_micro_batches_is_refused(schedule_flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"mine\.csv is for 8 micro-batches \(a step has 16: --global-batch-size"):
        checked_dry_run([*NETWORK, *schedule_flags, "--global-batch-size", "64", "--dry-run-ranks", "8"], NO_PROGRAM)


@pytest.fixture(scope="module")
def with_matrices() -> DryRun:
    """Muon on two stages of two tensor-parallel ranks, four replicas of them."""
    return dry_run_of((*TP2_PP2, "--optimizer", "muon"), 16)


@pytest.mark.parametrize("rank", [3, 12])
def test_a_rank_that_does_not_pass_on_its_matrices_is_named(with_matrices: DryRun, rank: int) -> None:
    events = with_matrices.programs[0].of(rank).events
    there, joined, *_, back = positions(with_matrices.programs[0].of(rank), "all-to-all", "matrices")
    assert len(events[there].message.ranks) == 4 and len(events[joined].message.ranks) == 2
    for index in (joined, back):
        found = with_fault(with_matrices, rank, lambda events, index=index: events[:index] + events[index + 1 :])
        assert re.match(rf"step 0, rank {rank}\b.*all-to-all of 12,288 float32 \(matrices", found[0])


def test_a_rank_that_brings_other_matrices_is_named(with_matrices: DryRun) -> None:
    index = positions(with_matrices.programs[0].of(6), "all-to-all", "matrices")[0]

    def change(events: list[ProgramEntry]) -> list[ProgramEntry]:
        message, part = events[index]
        events[index] = ProgramEntry(dataclasses.replace(message, elements=message.elements - 1024), part)
        return events

    (found,) = with_fault(with_matrices, 6, change)
    assert found.startswith(f"step 0, rank 6, message {index} (matrices): all-to-all of 11,264 float32 over ranks 0, 2")


def test_a_refusal_comes_before_torch_is_imported() -> None:
    words = [*NETWORK, "--zero-stage", "3", "--dry-run-ranks", "4"]
    program = (
        "import sys\nsys.modules['torch'] = None\n"
        "from megatron.errors import ConfigError\nfrom pretrain_gpt import train\n"
        f"try:\n    train({words!r})\nexcept ConfigError as problem:\n    print(problem)\n"
    )
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "--dry-run-ranks cannot be combined with --zero-stage 3" in finished.stdout, finished.stderr
