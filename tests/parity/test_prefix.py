"""Prefix language models and packed pairs train in every layout like plain PyTorch with masks written out."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets
from megatron.data.datasets.changed_samples import prefix_length
from megatron.data.datasets.sample import Sample
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.loader import MicroBatches
from megatron.data.sources.source import DataRequest
from megatron.parallel.joining import open_mesh
from megatron.train.objectives import batch_options, samples_to_learn
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import initial_weights, layout_config, layout_name
from tests.parity.reference import Recipe, forward

EOD, SEED = 0, 1234
RECIPE = Recipe(num_layers=2, steps=2, learning_rate=2.0e-3)
TOKENIZER: Any = SimpleNamespace(eod_id=EOD)
TARGETS, WEIGHTS, DOCUMENTS = (
    "--loss-on-targets-only",
    "--reweight-loss-based-on-position-frequency",
    "--reset-attention-mask",
)
VARIANTS = {
    "prefix": ["--objective", "prefix"],
    "targets": ["--objective", "prefix", TARGETS],
    "weights": ["--objective", "prefix", WEIGHTS],
    "both": ["--objective", "prefix", TARGETS, WEIGHTS, "--eod-mask-loss"],
    "documents": ["--objective", "prefix", TARGETS, DOCUMENTS, "--reset-position-ids"],
    "pairs": ["--objective", "multitask"],
}


class Rows:
    """Samples with documents of 5 or 9 tokens, the last of them cut off."""

    prefix = "rows"

    def __len__(self) -> int:
        return 100

    def read(self, sample: int) -> Sample:
        tokens = np.random.RandomState(sample).randint(1, RECIPE.vocab_size, RECIPE.sequence_length + 1)
        tokens[4 + 4 * (sample % 2) :: 9] = EOD
        return Sample(tokens.astype(np.int64))


def write_small_pairs(folder: Path) -> tuple[str, list[tuple[list[int], list[int]]]]:
    """Pairs whose targets continue their inputs."""
    drawn, pairs = np.random.default_rng(1), []
    for _ in range(60):
        inputs, targets = (drawn.integers(1, RECIPE.vocab_size, int(drawn.integers(1, 6))).tolist() for _ in range(2))
        pairs.append((inputs, targets))
    prefix = str(folder / "pairs")
    for part, field in enumerate(("inputs", "targets")):
        with IndexedWriter(f"{prefix}_{field}_document", np.int32) as writer:
            for pair in pairs:
                writer.add_document([np.array(pair[part])])
    return prefix, pairs


def train_variants(rank: int, layout: tuple[int, int, int], stage: int, extra: list[str], prefix: str) -> Any:
    """(loss, gradient norm) of every step of every variant."""
    curves, mesh = {}, None
    for name, flags in VARIANTS.items():
        config = layout_config(RECIPE, layout, stage, [*flags, *extra])
        mesh = mesh or open_mesh(config.parallel)
        if name == "pairs":
            data = DataConfig(seq_length=RECIPE.sequence_length, data_path=(prefix,), split="1,0,0")
            dataset = build_split_datasets(
                DataRequest(data, RECIPE.sequence_length, SEED, (50, 0, 0), build_indices=False)
            )[0].train
        else:
            dataset = samples_to_learn(Rows(), config, TOKENIZER)  # type: ignore[arg-type]
        engine = build_engine(config, mesh)
        curves[name] = []
        for step in range(RECIPE.steps):
            batches = MicroBatches(
                dataset,
                first_sample=step * RECIPE.global_batch_size,
                global_batch_size=RECIPE.global_batch_size,
                micro_batch_size=config.optim.micro_batch_size,
                dp_rank=mesh.batch.rank,
                dp_size=mesh.batch.size,
                options=batch_options(config, TOKENIZER),
            )
            result = engine.train_batch(list(batches), RECIPE.learning_rate)
            curves[name].append((result.loss, result.gradient_norm))
    return curves


class Row(NamedTuple):
    """One sample, masks written out."""

    tokens: list[int]
    visible: list[list[bool]]
    counts: list[bool]
    positions: list[int]


def row_of_text(number: int, flags: list[str]) -> Row:
    """A sample of `Rows` with its prefix, or with one in each document."""
    tokens, length = Rows().read(number).tokens.tolist(), RECIPE.sequence_length
    document, position, documents, positions = 0, 0, [], []
    for token in tokens[:-1]:
        documents.append(document)
        positions.append(position)
        position += 1
        if token == EOD:
            document, position = document + 1, 0
    ends = {}
    if DOCUMENTS in flags:
        for which in range(documents[-1] + 1):
            members = [place for place in range(length) if documents[place] == which]
            longest = len(members) - (tokens[members[-1]] == EOD)
            ends[which] = members[0] + prefix_length(longest, SEED, number, which)
    else:
        documents, ends = [0] * length, {0: prefix_length(length, SEED, number, 0)}
    visible = [
        [documents[key] == documents[query] and (key <= query or key < ends[documents[query]]) for key in range(length)]
        for query in range(length)
    ]
    counts = [
        (TARGETS not in flags or place >= ends[documents[place]] - 1)
        and not ("--eod-mask-loss" in flags and tokens[place] == EOD)
        for place in range(length)
    ]
    return Row(tokens, visible, counts, positions if "--reset-position-ids" in flags else list(range(length)))


def row_of_pairs(tokens: list[int], pairs: list[tuple[list[int], list[int]]]) -> Row:
    """A row of packed pairs, taken apart again."""
    owner: list[int] = []
    is_input: list[bool] = []
    while len(owner) < len(tokens):
        rest = tokens[len(owner) :]
        fits = (number for number, (left, right) in enumerate(pairs) if rest[: len(left) + len(right)] == left + right)
        found = next(fits, None)
        if found is None:
            owner, is_input = owner + [-1] * len(rest), is_input + [False] * len(rest)
            break
        left, right = pairs[found]
        owner += [found] * (len(left) + len(right))
        is_input += [True] * len(left) + [False] * len(right)
    length = len(tokens) - 1
    visible = [
        [owner[key] == owner[query] and (key <= query or is_input[key]) for key in range(length)]
        for query in range(length)
    ]
    counts = [
        owner[place + 1] >= 0 and owner[place + 1] == owner[place] and not is_input[place + 1]
        for place in range(length)
    ]
    positions = [place - owner.index(owner[place]) for place in range(length)]
    return Row(tokens, visible, counts, positions)


def rows_of_step(name: str, step: int, prefix: str, pairs: list[tuple[list[int], list[int]]]) -> list[Row]:
    """The samples of a global batch."""
    numbers = range(step * RECIPE.global_batch_size, (step + 1) * RECIPE.global_batch_size)
    if name != "pairs":
        return [row_of_text(number, VARIANTS[name]) for number in numbers]
    data = DataConfig(seq_length=RECIPE.sequence_length, data_path=(prefix,), split="1,0,0")
    train = build_split_datasets(DataRequest(data, RECIPE.sequence_length, SEED, (50, 0, 0), build_indices=False))[
        0
    ].train
    assert train is not None
    return [row_of_pairs(train[number].tolist(), pairs) for number in numbers]


def mean_targets(row: Row) -> float:
    """The number of targets that prefixes of the documents of a sample leave on average.

    A prefix ends at each of m positions alike: all but the end-of-document token. The label of place p counts where the
    prefix ends at p + 1 or before.
    """
    ends = [place + 1 for place, token in enumerate(row.tokens[:-1]) if token == EOD]
    whole = [(end - begin, end - begin - 1) for begin, end in itertools.pairwise([0, *ends])]
    last = RECIPE.sequence_length - (ends[-1] if ends else 0)
    return sum(min((place + 1) / max(m, 1), 1.0) for n, m in [*whole, (last, last)] for place in range(n))


def plain_curve(name: str, prefix: str, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, float]]:
    """The same training in plain PyTorch: (mean loss of the counted tokens, gradient norm) of every step."""
    weights = {key: value.clone().requires_grad_() for key, value in initial_weights(RECIPE).items()}
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) is wanted] for wanted in (True, False))
    groups = [
        {"params": matrices, "weight_decay": RECIPE.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RECIPE.learning_rate)
    length, flags, curve = RECIPE.sequence_length, VARIANTS[name], []
    per_sample = (length + 2) / 3 if WEIGHTS in flags else (length + 1) / 2
    for step in range(RECIPE.steps):
        rows = rows_of_step(name, step, prefix, pairs)
        tokens, visible, counts, positions = (torch.tensor(part) for part in zip(*rows, strict=True))
        logits = forward(weights, tokens[:, :-1], RECIPE, visible, positions)
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * counts
        position_weights = torch.ones(length)
        if WEIGHTS in flags:
            position_weights = 2 * (length - torch.arange(length)) / (length + 1)
        divisor = {"pairs": counts.sum()}.get(name, len(rows) * (per_sample if TARGETS in flags else length))
        if DOCUMENTS in flags:
            divisor = sum(map(mean_targets, rows))
        optimizer.zero_grad()
        ((losses * position_weights).sum() / divisor).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), RECIPE.clip)
        optimizer.step()
        curve.append(((losses.sum() / counts.sum()).item(), norm.item()))
    return curve


@pytest.fixture(scope="module")
def small_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[list[int], list[int]]]]:
    return write_small_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def expected(small_pairs: Any) -> dict[str, list[tuple[float, float]]]:
    return {name: plain_curve(name, *small_pairs) for name in VARIANTS}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("layout", "stage", "extra"),
    [
        ((2, 1, 1), 0, []),
        ((1, 2, 1), 0, ["--micro-batch-size", "1"]),
        ((1, 1, 2), 1, ["--checkpoint-activations"]),
        ((1, 1, 2), 3, ["--micro-batch-size", "4"]),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, tuple) else None,
)
def test_a_layout_equals_plain_torch(
    layout: tuple[int, int, int], stage: int, extra: list[str], small_pairs: Any, expected: Any
) -> None:
    world = layout[0] * layout[1] * layout[2]
    for curves in run_ranks(train_variants, world, layout, stage, extra, small_pairs[0]):
        for name, curve in curves.items():
            for (loss, norm), (true_loss, true_norm) in zip(curve, expected[name], strict=True):
                assert loss == pytest.approx(true_loss, rel=1e-5), name
                assert norm == pytest.approx(true_norm, rel=1e-4), name
