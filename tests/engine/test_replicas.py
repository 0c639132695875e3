"""Copies of values agree in every layout, and a flipped bit in any kind of copy is found and named."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch

from megatron.engine.engine import Engine
from megatron.engine.replicas import (
    CHUNK,
    Digester,
    Replica,
    _difference_to_first,
    _digests,
    _Shared,
    comparable,
    find_differences,
    replicas,
)
from megatron.engine.state import moments, part_of
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import BF16, CHUNKS, RECIPE, train
from tests.helpers.campaign_cases import DEFAULT_CASES
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

NORM, WORDS = "decoder.layers.0.input_layernorm.weight", "embedding.word_embeddings.weight"
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "12"]
RECOMPUTE = ["--checkpoint-activations"]

# (tp, pp, dp), then ZeRO stage and further flags of each run
LAYOUTS: dict[str, tuple[tuple[int, int, int], list[tuple[int, list[str]]]]] = {
    "tp2": ((2, 1, 1), [(0, []), (1, BF16), (3, RECOMPUTE), (1, EXPERTS)]),
    "dp2": ((1, 1, 2), [(0, []), (1, []), (2, BF16), (3, []), (3, BF16), (0, EXPERTS)]),
    "pp2": ((1, 2, 1), [(0, []), (1, BF16)]),
    "tp2pp2": ((2, 2, 1), [(0, RECOMPUTE), (1, EXPERTS)]),
    "pp2dp2": ((1, 2, 2), [(0, []), (1, CHUNKS), (1, BF16)]),
    "tp2dp2": ((2, 1, 2), [(0, []), (2, []), (3, BF16)]),
}
# Over three ranks the order in which gradients are added depends on where they lie in a message, and the two ends of a
# pipeline have different layers. Of these, the suite trains a few.
THREE_REPLICAS = (1, 2, 3)
RECIPE_OF_THREE = dataclasses.replace(RECIPE, micro_batch_size=1, global_batch_size=6, steps=3)
DEEPSPEED = ["--pipeline-engine", "deepspeed"]
RUNS_OF_THREE: list[tuple[int, list[str]]] = [
    (1, []),
    (1, [*BF16, *DEEPSPEED]),
    (2, BF16),
    (0, []),
    (1, BF16),
    (2, []),
    (0, DEEPSPEED),
    (1, DEEPSPEED),
    (1, [*CHUNKS, *BF16]),
    (0, ["--pipeline-schedule", "zbv", "--num-layers", "4"]),
    (1, [*BF16, "--freeze", "embedding.position_embeddings.weight"]),
]
FEW = 3


# layout, ZeRO stage, further flags; what is flipped: rank, kind, parameter, element; what must be said about it
FLIPS: list[tuple[tuple[int, int, int], int, list[str], list[tuple[int, str, str, int, str]]]] = [
    (
        (2, 1, 1), 1, BF16,
        [
            (1, "weight", NORM, 5, r"rank 0 holds (\w+), rank 1 holds (?!\1)\w+; 1 of 16 .* the first at 5: 1.* and "),
            (0, "master", NORM, 0, "1 of 16 elements differ between rank 0 and rank 1, the first at 0"),
            (1, "exp_avg_sq", NORM, 15, "1 of 16 elements differ"),
        ],
    ),
    (
        (1, 1, 2), 0, [],
        [
            (1, "weight", "decoder.layers.1.mlp.linear_fc1.weight", 37, "rank 1 holds .*, the first at 37"),
            (0, "exp_avg", WORDS, 1, "the first at 1: "),
        ],
    ),
    ((1, 1, 2), 2, [], [(1, "weight", WORDS, 9, "1 of 2432 elements")]),
    ((1, 1, 2), 3, [], [(0, "weight", NORM, 2, "1 of 16 elements")]),
    ((1, 2, 2), 1, BF16, [(0, "master", WORDS, 3, "ranks 0|rank 0"), (3, "weight", WORDS, 3, "")]),
    ((2, 1, 2), 0, [], [(3, "weight", NORM, 3, "rank 2 holds .* rank 3 holds|rank 1 holds .* rank 3 holds")]),
]  # fmt: skip


def differences(
    rank: int, layout: tuple[int, int, int], runs: list[tuple[int, list[str]]], recipe: Recipe = RECIPE
) -> list[Any]:
    """What differs after some steps of each run, and what was compared."""
    found, mesh = [], None
    for stage, flags in runs:
        config = layout_config(recipe, layout, stage, flags)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        train(engine, config, 0, recipe.steps, recipe)
        found.append((find_differences(engine), sorted({(a.name, r.kind) for a, r in replicas(engine)})))
    return found


def data_axes(flags: list[str]) -> list[str]:
    """The names of the axes over which data-parallel ranks hold copies."""
    return ["expert_gradient", "gradient"] if flags == EXPERTS else ["gradient"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_copies_agree(name: str) -> None:
    layout, runs = LAYOUTS[name]
    tp, pp, dp = layout
    for rank in run_ranks(differences, tp * pp * dp, layout, runs):
        for (found, compared), (stage, flags) in zip(rank, runs, strict=True):
            assert found == [], (stage, flags)
            assert compared == sorted(
                (axis, kind)
                for axis, size in (("tp", tp), *((name, dp) for name in data_axes(flags)), ("embedding", pp))
                for kind in kinds_of(axis, stage)
                if size > 1
            )


def test_the_ends_of_a_pipeline_with_three_replicas_agree(request: pytest.FixtureRequest) -> None:
    runs = RUNS_OF_THREE[:FEW] if request.config.getoption("--cases") <= DEFAULT_CASES else RUNS_OF_THREE
    for rank in run_ranks(differences, 6, THREE_REPLICAS, runs, RECIPE_OF_THREE):
        for (found, compared), run in zip(rank, runs, strict=True):
            assert found == [] and (("embedding", "weight") in compared or "zbv" in run[1]), run


def kinds_of(axis: str, stage: int) -> list[str]:
    """What the ranks of an axis hold copies of: ZeRO divides the optimizer's values among data-parallel ranks."""
    if stage == 0:
        return ["weight", "exp_avg", "exp_avg_sq"]
    return ["weight"] if axis == "gradient" else ["weight", "master", "exp_avg", "exp_avg_sq"]


def flipped(
    rank: int, layout: tuple[int, int, int], stage: int, flags: list[str], flips: list[Any]
) -> list[tuple[list[str], list[str]]]:
    """What is found with each bit flipped, and after it was flipped back."""
    config = layout_config(RECIPE, layout, stage, flags)
    engine = build_engine(config, open_mesh(config.parallel))
    train(engine, config, 0, 1)
    found = []
    for at_rank, kind, name, element, _ in flips:
        results = []
        for _ in range(2):
            if rank == at_rank:
                flip(held(engine, kind, name), element)
            results.append(find_differences(engine))
        found.append((results[0], results[1]))
    return found


def held(engine: Engine, kind: str, name: str) -> torch.Tensor:
    """This rank's values of a kind."""
    parameter = next(each for each in engine.module.parameters() if each.global_name == name)
    if kind == "weight":
        return parameter.data
    part = part_of(engine, parameter)
    assert part is not None
    return part.values if kind == "master" else dict(moments(engine, part))[kind]


def flip(values: torch.Tensor, element: int, bit: int = 3) -> None:
    """Flips one bit of a tensor."""
    bits = values.view(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[element] ^= 1 << bit


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "stage", "flags", "flips"), FLIPS)
def test_a_flipped_bit_is_found_and_named(
    layout: tuple[int, int, int], stage: int, flags: list[str], flips: list[Any]
) -> None:
    ranks = run_ranks(flipped, layout[0] * layout[1] * layout[2], layout, stage, flags, flips)
    assert all(rank == ranks[0] for rank in ranks)
    for (_, kind, name, _, said), (found, afterwards) in zip(flips, ranks[0], strict=True):
        assert found and all(text.startswith(f"{name} ({kind}): by digest, rank") for text in found), found
        assert re.search(said, found[0]), found
        assert afterwards == []


def test_a_digest_notices_every_bit_and_adds_up() -> None:
    digester = Digester()
    generator = torch.Generator().manual_seed(1)
    for dtype, bits in ((torch.float32, 31), (torch.bfloat16, 15)):
        values = torch.randn(CHUNK + 9, generator=generator).to(dtype)
        whole = int(digester.digest(values))
        seen = {int(comparable(torch.tensor(whole)))}
        flips = [(element, bit) for element in (0, 1, CHUNK - 1, CHUNK, CHUNK + 8) for bit in range(0, bits, 2)]
        for element, bit in flips:
            flip(values, element, bit)
            seen.add(int(comparable(digester.digest(values))))
            flip(values, element, bit)
        assert len(seen) == 1 + len(flips) and min(seen) >= 0
        bounds = (0, 7, CHUNK + 3, CHUNK + 9)
        parts = [digester.digest(values[first:last], first) for first, last in itertools.pairwise(bounds)]
        assert int(sum(parts)) == whole
        swapped = values[torch.tensor([1, 0, *range(2, len(values))])]
        assert int(digester.digest(swapped)) != whole


def test_an_offloaded_optimizer_is_compared_with_weights_of_another_device() -> None:
    device, host = torch.device("meta"), torch.device("cpu")  # torch refuses operands of both
    values = {
        "weight": torch.zeros(9, device=device),
        "master": torch.ones(9),
        "exp_avg": torch.zeros(0, device=device),
    }
    copies = _Shared(Axis.single("tp", 0), [Replica("norm", kind, each) for kind, each in values.items()])
    digester = Digester()
    assert [digester.digest(each).device for each in values.values()] == [device, host, device]
    digests = _digests(copies, digester, {}, device)
    assert digests.device == device and digests.shape == (3,)


def test_offloaded_copies_are_sent_from_the_device_of_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def broadcast(values: torch.Tensor, axis: Axis) -> torch.Tensor:
        sent.append(values.device.type)
        return torch.zeros(3)

    monkeypatch.setattr("megatron.engine.replicas.broadcast", broadcast)
    found = _difference_to_first(torch.tensor([0.0, 2.0, 0.0]), Axis.single("tp", 0), torch.device("meta"))
    assert sent == ["meta"] and found is not None and (found.elements, found.first) == (1, 1)
