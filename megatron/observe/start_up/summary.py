"""The summary of a run that rank 0 prints before the first step. config.json in the run folder has every value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron.observe.start_up.quantities import short_bytes, short_count

_WIDTH = 12
_SOURCES = 3
_RULE = "-" * 80
_GRID_ROWS = _GRID_BRACKETS = _GRID_RANKS = 4

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Size:
    """Parameters of the network.

    Attributes:
        parameters: all of them.
        without_embeddings: all but the embeddings' parameters.
        active: those that a token meets; with experts fewer than all.
        trained: those that are not frozen.
        shape: layers, widths and precision in words.
    """

    parameters: int
    without_embeddings: int
    active: int
    trained: int
    shape: str


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work.

    Attributes:
        stages: pipeline stages.
        replicas: data-parallel replicas.
        ranks_per_replica: ranks of one stage of one replica.
        zero_stage: the ZeRO stage.
        memory_bytes: the most that a rank holds of weights, gradients and optimizer; None if that is not known.
    """

    stages: int
    replicas: int
    ranks_per_replica: int
    zero_stage: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Length:
    """What the run trains.

    Attributes:
        first_step: steps that are complete.
        steps: steps at the end of the run.
        global_batch_size: samples of the next step.
        last_batch_size: samples of the last one; another number if the batch grows.
        micro_batch_size: samples of a micro-batch.
        sequence_length: tokens of a sample.
        tokens: tokens at the end of the run.
    """

    first_step: int
    steps: int
    global_batch_size: int
    last_batch_size: int
    micro_batch_size: int
    sequence_length: int
    tokens: int


@dataclass(frozen=True)
class SourceShare:
    """What the run takes from one source of its training data.

    Attributes:
        ratio: share of the samples.
        epochs: passes over the source by the end of the run.
    """

    name: str
    ratio: float
    epochs: float


@dataclass(frozen=True)
class StartSummary:
    """All that is shown.

    Attributes:
        start: where the weights come from.
        kernels: which operations have which implementation.
        places: what is written where: (label, text).
        ignored: flags that were given and have no effect.
    """

    size: Size
    layout: Layout
    length: Length
    shares: Sequence[SourceShare]
    start: str
    kernels: str
    places: Sequence[tuple[str, str]]
    ignored: Sequence[str] = ()

    def lines(self) -> list[str]:
        """At most 17 lines, rules included, and fewer where the ranks need less than four rows."""
        rows = [
            ("model", _size_text(self.size)),
            *_layout_rows(self.layout),
            *_length_rows(self.length, self.layout.replicas),
            *([("data", _shares_text(self.shares))] if self.shares else []),
            ("kernels", self.kernels),
            ("start", self.start),
            *self.places,
            *([("ignored", f"{', '.join(self.ignored)} (docs/reference/flags.md says why)")] if self.ignored else []),
        ]
        return [_RULE, *(f"{label:<{_WIDTH}} {text}" for label, text in rows), _RULE]


def _size_text(size: Size) -> str:
    embeddings = size.parameters - size.without_embeddings
    parts = [f"embeddings {short_count(embeddings)}, {embeddings / max(1, size.parameters):.0%}"]
    if size.active != size.parameters:
        parts.insert(0, f"{short_count(size.active)} active per token")
    if size.trained != size.parameters:
        parts.append(f"trained {short_count(size.trained)}")
    return f"{short_count(size.parameters)} parameters ({'; '.join(parts)}): {size.shape}"


def _layout_rows(layout: Layout) -> list[tuple[str, str]]:
    ranks = layout.stages * layout.replicas * layout.ranks_per_replica
    memory = ""
    if layout.memory_bytes is not None:
        memory = f"; {short_bytes(layout.memory_bytes)} a rank for weights, gradients and optimizer, plus activations"
    if ranks == 1:
        return [("layout", f"1 rank{memory}")]
    text = f"{ranks} ranks = {layout.stages} pp x {layout.replicas} dp x {layout.ranks_per_replica} tp"
    text += f", ZeRO stage {layout.zero_stage}{memory}"
    return [
        ("layout", text),
        *(("", row) for row in rank_grid(layout.stages, layout.replicas, layout.ranks_per_replica)),
    ]


def _length_rows(length: Length, replicas: int) -> list[tuple[str, str]]:
    if length.steps <= length.first_step:
        return []
    micro_batches = length.global_batch_size // (length.micro_batch_size * replicas)
    tokens = length.global_batch_size * length.sequence_length
    grows = f", growing to {length.last_batch_size:,} samples" * (length.last_batch_size != length.global_batch_size)
    return [
        (
            "step",
            f"{length.global_batch_size:,} samples x {length.sequence_length:,} = {short_count(tokens)} tokens, "
            f"{micro_batches:,} micro-batches of {length.micro_batch_size:,} per replica{grows}",
        ),
        ("length", f"{length.steps:,} steps, {short_count(length.tokens)} tokens"),
    ]


def _shares_text(shares: Sequence[SourceShare]) -> str:
    """The largest sources; the rest in one word."""
    largest = sorted(shares, key=lambda share: -share.ratio)[:_SOURCES]
    texts = [f"{share.name} {share.ratio:.1%} ({share.epochs:.2f} epochs)" for share in largest]
    if len(shares) > _SOURCES:
        rest = sum(share.ratio for share in shares) - sum(share.ratio for share in largest)
        texts.append(f"{len(shares) - _SOURCES} others {rest:.1%}")
    return ", ".join(texts)


def rank_grid(stages: int, replicas: int, ranks_per_replica: int) -> list[str]:
    """The ranks as a small drawing: a row for each pipeline stage, a bracket for each replica in it.

    Of a large run it has the first and the last of everything.

    Ranks are counted as the mesh does: along a replica's part of a stage first, then over replicas, then over stages.

    Args:
        ranks_per_replica: ranks that share the matrices or the positions of one stage of one replica.
    """
    rows = []
    for stage in _ends(range(stages), _GRID_ROWS):
        if stage is None:
            rows.append("  ...")
            continue
        first = stage * replicas * ranks_per_replica
        brackets = [
            "..." if replica is None else _bracket(first + replica * ranks_per_replica, ranks_per_replica)
            for replica in _ends(range(replicas), _GRID_BRACKETS)
        ]
        rows.append((f"stage {stage:<3} " if stages > 1 else "") + " ".join(brackets))
    return rows


def _bracket(first: int, count: int) -> str:
    ranks = range(first, first + count)
    return f"[{first}-{ranks[-1]}]" if count > _GRID_RANKS else f"[{' '.join(map(str, ranks))}]"


def _ends(items: Sequence[_Item], most: int) -> list[_Item | None]:
    """All items, or the first ones, None and the last one."""
    return list(items) if len(items) <= most else [*items[: most - 2], None, items[-1]]
