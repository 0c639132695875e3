"""Rules for tensors are permutations: every element of ours lies at one place of theirs, and none is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from megatron.errors import ConversionError
from tests.trident.convert.hugging_face.families.published import PUBLISHED
from trident.convert.hugging_face.registry import FAMILIES, family_of
from trident.convert.hugging_face.streaming import network_shapes
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import (
    BoundTensor,
    MappedPart,
    TensorMapping,
    bind,
    experts,
    gate_and_up,
    linear,
    matrix,
    parts_by_tensor,
    separate_query_key_value,
    their_shapes,
    vector,
)

GROUPED = torch.arange(2 * 5 * 3 * 4).view(2, 5, 3, 4)  # [groups, queries + 2, d, h]
GATED = torch.arange(2 * 6 * 4).view(2, 6, 4)
EXPERTS = torch.arange(3 * 2 * 6 * 4).view(3, 2, 6, 4)


def moved(tensors: list[BoundTensor], ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors, made of ours as the parts say."""
    theirs = {name: torch.full(shape, -1) for name, shape in their_shapes(tensors).items()}
    for tensor in tensors:
        for part in tensor.parts:
            box = tuple(slice(low, high) for low, high in zip(part.start, part.stop, strict=True))
            rows = ours[tensor.ours][box].permute(part.order).reshape(part.rows, *part.row_shape)
            target = theirs[part.theirs][part.first_row : part.first_row + part.rows]
            assert bool((target == -1).all()), "no place is filled twice"
            target.copy_(rows)
    return theirs


@pytest.mark.parametrize(
    ("rules", "ours", "expected"),
    [
        ((matrix("w", "t"),), GATED, {"t": GATED.view(12, 4)}),
        ((vector("w", "t"),), GATED, {"t": GATED.view(48)}),
        (linear("w", "t", (1, 0)), GATED[0], {"t.weight": GATED[0].T}),
        (
            separate_query_key_value("w", "q", "k", "v"),
            GROUPED,
            {
                "q.weight": GROUPED[:, :3].reshape(18, 4),
                "k.weight": GROUPED[:, 3].reshape(6, 4),
                "v.weight": GROUPED[:, 4].reshape(6, 4),
            },
        ),
        (
            separate_query_key_value("w", "t", "t", "t"),
            GROUPED,
            {
                "t.weight": torch.cat(
                    [GROUPED[:, :3].reshape(18, 4), GROUPED[:, 3].reshape(6, 4), GROUPED[:, 4].reshape(6, 4)]
                )
            },
        ),
        (gate_and_up("w", "g", "u"), GATED, {"g.weight": GATED[0], "u.weight": GATED[1]}),
        (gate_and_up("w", "t", "t"), GATED, {"t.weight": GATED.view(12, 4)}),
        (
            (replace(experts("m", "g", "u", "d")[1], ours="w"),),
            EXPERTS,
            {f"m.experts.{e}.{name}.weight": EXPERTS[e, half] for e in range(3) for half, name in enumerate("gu")},
        ),
        (
            (replace(experts("m", "g", "u", "d")[2], ours="w"),),
            EXPERTS[:, 0],
            {f"m.experts.{expert}.d.weight": EXPERTS[expert, 0] for expert in range(3)},
        ),
        (
            (TensorMapping("w", (MappedPart("t", unused_rows=2),)),),  # RoBERTa's positions
            GATED[0],
            {"t": torch.cat([torch.full((2, 4), -1), GATED[0]])},
        ),
        (
            (TensorMapping("w", (MappedPart("t", order=(3, 1, 0, 2), columns=3),)),),  # GPT-2
            GROUPED,
            {"t": GROUPED.permute(3, 1, 0, 2).reshape(4, 30)},
        ),
    ],
)
def test_each_kind_of_rule(
    rules: tuple[TensorMapping, ...], ours: torch.Tensor, expected: Mapping[str, torch.Tensor]
) -> None:
    name = "w.weight" if rules[0].ours.endswith(".weight") else "w"
    found = moved(bind(rules, {name: tuple(ours.shape)}), {name: ours})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], values) for key, values in expected.items())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_table_moves_every_element_to_one_place(family: Family) -> None:
    """In a small network of each family no element of ours is lost; only unused rows of theirs stay empty."""
    (config, *_) = (config for config in PUBLISHED.values() if family_of(config) is family)
    shapes = {
        name: tuple(_small(size, place, len(shape), name) for place, size in enumerate(shape))
        for name, shape in network_shapes(family.read_config(config)).items()
        if ".layers." not in name or ".layers.0." in name
    }
    counted = 0
    ours = {}
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        ours[name] = torch.arange(counted, counted + numel).view(shape)
        counted += numel
    theirs = moved(bind(family.tensors, shapes), ours)
    values = torch.cat([tensor.flatten() for tensor in theirs.values()]).sort().values
    assert torch.equal(values[values >= 0], torch.arange(counted))
    empty = {name: int((rows < 0).all(-1).sum()) for name, rows in theirs.items() if (rows < 0).any()}
    assert empty == {
        part.theirs: part.unused_rows for rule in family.tensors for part in rule.parts if part.unused_rows
    }


def _small(size: int, place: int, dimensions: int, name: str) -> int:
    """A dimension cut to a few entries; the query rows of a group and the two halves of a gate keep their number."""
    keeps = ("linear_qkv" in name and place == 1) or size == 2
    return size if keeps else min(size, 3 + place)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((), r"the network has the tensor a.0.w \[2, 3\], for which the family's table has no rule"),
        ((matrix("a.{layer}.w", "t"), matrix("a.0.w", "u")), "the family's table has 2 rules"),
    ],
)
def test_a_tensor_needs_one_rule(rules: tuple[TensorMapping, ...], says: str) -> None:
    with pytest.raises(ConversionError, match=says):
        bind(rules, {"a.0.w": (2, 3)})


def test_rules_of_absent_tensors_are_skipped_and_layers_numbered() -> None:
    tensors = bind(
        (matrix("a.{layer}.w", "t.{layer}"), vector("a.{layer}.b", "b")), {"a.0.w": (2, 3), "a.11.w": (2, 3)}
    )
    assert their_shapes(tensors) == {"t.0": (2, 3), "t.11": (2, 3)}


def test_parts_of_one_tensor_come_from_top_to_bottom() -> None:
    tensors = bind(separate_query_key_value("w", "t", "t", "t"), {"w.weight": tuple(GROUPED.shape)})
    (parts,) = parts_by_tensor(tensors).values()
    assert [part.first_row for _, part in parts] == [0, 18, 24]
