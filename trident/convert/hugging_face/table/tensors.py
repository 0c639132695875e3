"""Rules between tensors of a Hugging Face model and ours: permutations of elements, used in both directions.

A rule names one of our tensors and its parts. A part is a block of our logical tensor (all of it, the query rows, the
gate, one expert), with its dimensions permuted and merged to the stored shape. Several parts may be stacked in one
tensor of theirs. Names contain `{layer}`, and `{expert}` if each expert has its own tensor. Rules for tensors that the
network does not have are skipped: a table lists biases, norms and heads of only some models of the family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.errors import ConversionError

OUR_LAYER = "decoder.layers.{layer}."


@dataclass(frozen=True)
class DimensionRange:
    """A range of one of our dimensions, with the conventions of `slice`."""

    dimension: int
    start: int
    stop: int | None = None


@dataclass(frozen=True)
class MappedPart:
    """A block of our tensor in one of theirs.

    Args:
        theirs: name of their tensor.
        blocks: the block of ours; all of each dimension without an entry.
        order: our dimensions in their order; unchanged if empty.
        columns: number of last dimensions (in their order) merged into their last dimension; all others are merged into
            their first. 0 for a vector.
        unused_rows: rows of their tensor before it, written as zeros.
        is_stack: theirs is a stack of matrices along its first dimension; the dimensions up to the columns are merged
            into rows.
    """

    theirs: str
    blocks: tuple[DimensionRange, ...] = ()
    order: tuple[int, ...] = ()
    columns: int = 1
    unused_rows: int = 0
    is_stack: bool = False


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors and its parts; parts in the same tensor of theirs are consecutive.

    Args:
        is_state: not a parameter: an export does not change its element type.
    """

    ours: str
    parts: tuple[MappedPart, ...]
    is_state: bool = False


def matrix(ours: str, theirs: str) -> TensorMapping:
    """A matrix stored as [out, in] by both; all our logical dimensions but the last are merged."""
    return TensorMapping(ours, (MappedPart(theirs),))


def vector(ours: str, theirs: str, *, is_state: bool = False) -> TensorMapping:
    """A bias, the weight of a norm or a state; all our dimensions are merged."""
    return TensorMapping(ours, (MappedPart(theirs, columns=0),), is_state)


def norm(ours: str, theirs: str) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a norm."""
    return vector(f"{ours}.weight", f"{theirs}.weight"), vector(f"{ours}.bias", f"{theirs}.bias")


def linear(ours: str, theirs: str, order: tuple[int, ...] = ()) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a linear layer; with order (1, 0) the weight is stored as [in, out]."""
    return _linear(ours, ((theirs, ()),), order)


_QUERIES, _KEYS, _VALUES = DimensionRange(1, 0, -2), DimensionRange(1, -2, -1), DimensionRange(1, -1)


def separate_query_key_value(ours: str, query: str, key: str, value: str) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a fused projection [groups, queries + 2, d, h], stored as three.

    With the same name three times: one tensor with all queries, then all keys, then all values.
    """
    return _linear(ours, ((query, (_QUERIES,)), (key, (_KEYS,)), (value, (_VALUES,))))


def gate_and_up(ours: str, gate: str, up: str) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a gated layer [2, f, h], stored as two matrices.

    With the same name twice: one tensor with the gate first.
    """
    return _linear(ours, ((gate, (DimensionRange(0, 0, 1),)), (up, (DimensionRange(0, 1),))))


def experts(theirs: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    """The router, and experts [E, 2, f, h] and [E, h, f], stored as three matrices per `{expert}`."""
    expert = theirs + ".experts.{expert}."
    halves = (
        MappedPart(f"{expert}{gate}.weight", (DimensionRange(1, 0, 1),)),
        MappedPart(f"{expert}{up}.weight", (DimensionRange(1, 1),)),
    )
    return (
        matrix(OUR_LAYER + "mlp.router.weight", f"{theirs}.gate.weight"),
        TensorMapping(OUR_LAYER + "mlp.experts.linear_fc1.weight", halves),
        matrix(OUR_LAYER + "mlp.experts.linear_fc2.weight", f"{expert}{down}.weight"),
    )


def stacked_experts(theirs: str) -> tuple[TensorMapping, ...]:
    """The router, and experts [E, 2, f, h] and [E, h, f], stored as [E, h, 2f] with interleaved columns of gate and up
    and [E, f, h], all with biases.
    """
    ours, their_experts = OUR_LAYER + "mlp.", f"{theirs}.experts."
    gate_and_up, down = MappedPart(f"{their_experts}gate_up_proj", (), (0, 3, 2, 1), 2, is_stack=True), "down_proj"
    return (
        *linear(ours + "router", f"{theirs}.router"),
        TensorMapping(ours + "experts.linear_fc1.weight", (gate_and_up,)),
        TensorMapping(
            ours + "experts.linear_fc1.bias", (MappedPart(f"{their_experts}gate_up_proj_bias", (), (0, 2, 1), 2),)
        ),
        TensorMapping(
            ours + "experts.linear_fc2.weight", (MappedPart(their_experts + down, (), (0, 2, 1), is_stack=True),)
        ),
        matrix(ours + "experts.linear_fc2.bias", f"{their_experts}{down}_bias"),
    )


def below(prefix: str, rules: Iterable[TensorMapping]) -> tuple[TensorMapping, ...]:
    """The rules of a submodel, with a name prefix."""
    return tuple(
        replace(rule, parts=tuple(replace(part, theirs=prefix + part.theirs) for part in rule.parts)) for rule in rules
    )


@dataclass(frozen=True)
class BoundPart:
    """A part for a concrete network.

    Attributes:
        start, stop: the box in our tensor.
        order: our dimensions in their order.
        columns, is_stack: as in `MappedPart`.
        first_row: its offset in their tensor's first dimension.
    """

    theirs: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    order: tuple[int, ...]
    columns: int
    first_row: int
    is_stack: bool = False

    @property
    def ordered_shape(self) -> tuple[int, ...]:
        """The shape of the box with dimensions in their order, before merging."""
        return tuple(self.stop[dimension] - self.start[dimension] for dimension in self.order)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row of their tensor: () for a vector, a matrix for a stack."""
        rows = (math.prod(self.ordered_shape[1 : -self.columns]),) if self.is_stack else ()
        return (*rows, math.prod(self.ordered_shape[-self.columns :])) if self.columns else ()

    @property
    def rows(self) -> int:
        ordered = self.ordered_shape
        return math.prod(ordered[: 1 if self.is_stack else len(ordered) - self.columns])


@dataclass(frozen=True)
class BoundTensor:
    """One of our tensors, with its logical shape and its parts."""

    ours: str
    shape: tuple[int, ...]
    parts: tuple[BoundPart, ...]
    is_state: bool = False


def bind(rules: Sequence[TensorMapping], shapes: Mapping[str, tuple[int, ...]]) -> list[BoundTensor]:
    """Binds the rules to a network, in the order of its tensors.

    Args:
        shapes: logical shapes of our tensors.

    Raises:
        ConversionError: the table has no rule or several for a tensor.
    """
    layer = re.escape("{layer}")
    patterns = [(re.compile(re.escape(rule.ours).replace(layer, "(?P<layer>[0-9]+)")), rule) for rule in rules]
    bound = []
    for name, shape in shapes.items():
        matches = [(match, rule) for pattern, rule in patterns if (match := pattern.fullmatch(name)) is not None]
        if len(matches) != 1:
            raise ConversionError(
                f"the network has the tensor {name} {list(shape)}, for which the family's table has "
                f"{'no rule' if not matches else f'{len(matches)} rules'}. The family cannot express this network; see "
                "docs/hugging_face.md for what each family has."
            )
        match, rule = matches[0]
        bound.append(BoundTensor(name, shape, tuple(_bound_parts(rule, shape, match.groupdict())), rule.is_state))
    return bound


def their_shapes(tensors: Iterable[BoundTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of their tensors, in the order of the table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            rows = part.first_row + part.rows
            shapes[part.theirs] = (max(rows, shapes.get(part.theirs, (0,))[0]), *part.row_shape)
    return shapes


def parts_by_tensor(tensors: Iterable[BoundTensor]) -> dict[str, list[tuple[BoundTensor, BoundPart]]]:
    """The parts in each of their tensors, from top to bottom."""
    by_tensor: dict[str, list[tuple[BoundTensor, BoundPart]]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            by_tensor.setdefault(part.theirs, []).append((tensor, part))
    return {name: sorted(parts, key=lambda entry: entry[1].first_row) for name, parts in by_tensor.items()}


def _linear(
    ours: str, parts: Sequence[tuple[str, tuple[DimensionRange, ...]]], order: tuple[int, ...] = ()
) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a linear layer, stored as these blocks under these names."""
    return (
        TensorMapping(f"{ours}.weight", tuple(MappedPart(f"{name}.weight", blocks, order) for name, blocks in parts)),
        TensorMapping(f"{ours}.bias", tuple(MappedPart(f"{name}.bias", blocks, columns=0) for name, blocks in parts)),
    )


def _bound_parts(rule: TensorMapping, shape: tuple[int, ...], numbers: Mapping[str, str]) -> Iterator[BoundPart]:
    experts = range(shape[0]) if any("{expert}" in part.theirs for part in rule.parts) else (None,)
    rows: dict[str, int] = {}
    for expert in experts:
        for part in rule.parts:
            start, stop = [0] * len(shape), list(shape)
            for block in part.blocks:
                size = shape[block.dimension]
                first, last, _ = slice(block.start, block.stop).indices(size)
                start[block.dimension], stop[block.dimension] = first, last
            name = part.theirs
            if expert is not None and "{expert}" in name:
                start[0], stop[0] = expert, expert + 1
                name = name.replace("{expert}", str(expert))
            for key, number in numbers.items():
                name = name.replace("{" + key + "}", number)
            order = part.order or tuple(range(len(shape)))
            first_row = rows.get(name, part.unused_rows)
            bound = BoundPart(name, tuple(start), tuple(stop), order, part.columns, first_row, part.is_stack)
            rows[name] = bound.first_row + bound.rows
            yield bound
