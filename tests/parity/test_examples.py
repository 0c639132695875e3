"""Packed examples train like the same examples in rows of their own, in every layout, and do not see each other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron.config import DataConfig, RunConfig
from megatron.data.build import build_split_datasets
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.loader import Batch, MicroBatches
from megatron.data.sources.source import DataRequest
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from megatron.train.objectives import batch_options, build_objective, step_settings
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.networks import build_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.vocabulary import write_vocabulary
from tests.parity.layouts import layout_config, layout_name
from tests.parity.reference import Recipe

Curve = list[tuple[float, float]]

LENGTH, EXAMPLES, STEPS = 48, 24, 3
RECIPE = Recipe(num_layers=2, vocab_size=400, sequence_length=LENGTH, steps=STEPS, learning_rate=2.0e-3)
TARGETS, PACK = "--loss-on-targets-only", "--pack-examples"
SAMPLES = ["--loss-mean", "samples"]
POSITIONS = {
    "learned": [],
    "rotary": ["--position-embedding-type", "rotary"],
    "alibi": ["--position-embedding-type", "alibi"],
}
LABELS = {"targets": [TARGETS], "all": []}
LAYOUTS = [((2, 1, 1), 0), ((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 2), 3)]


@dataclasses.dataclass(frozen=True)
class Files:
    """What every rank reads."""

    path: str
    choice: TokenizerChoice

    def rows(self, config: RunConfig, build_indices: bool) -> tuple[Any, Tokenizer]:
        """All rows of the examples, and the tokenizer."""
        tokenizer = build_tokenizer(self.choice)
        data = DataConfig(seq_length=LENGTH, data_path=(self.path,), split="1,0,0")
        options = ExampleOptions.of(config.finetuning, config.loss, data, config.optim)
        datasets, plan = build_split_datasets(
            DataRequest(
                data, LENGTH, 1234, (1, 0, 0), build_indices=build_indices, tokenizer=tokenizer, examples=options
            )
        )
        assert plan.train is not None
        return datasets.train, tokenizer

    def batches(self, config: RunConfig, mesh: ParallelMesh, build_indices: bool = False) -> list[Batch]:
        """This rank's part of one global batch of all rows, filled up with empty ones."""
        rows, tokenizer = self.rows(config, build_indices)
        found = MicroBatches(
            rows,
            first_sample=0,
            global_batch_size=-(-len(rows) // 4) * 4,
            micro_batch_size=2,
            dp_rank=mesh.batch.rank,
            dp_size=mesh.batch.size,
            stop_sample=len(rows),
            options=batch_options(config, tokenizer),
        )
        return list(found)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("examples")
    drawn = np.random.default_rng(4)
    words = ["for", "in", "self", "return", "random", "the", "of", "a"]

    def text(most: int) -> str:
        return " ".join(drawn.choice(words, int(drawn.integers(1, most))))

    records = [{"prompt": text(6), "answer": text(12)} for _ in range(EXAMPLES)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = Files(str(folder / "chat.jsonl"), write_vocabulary(folder, 400))
    for flags in ([], [PACK]):  # the indices, before ranks read them at the same time
        found.rows(layout_config(RECIPE, (1, 1, 1), 0, flags), build_indices=True)
    return found


def gradients(files: Files, flags: list[str]) -> tuple[int, float, float, dict[str, torch.Tensor]]:
    """Rows, loss and counted tokens of all examples, and the gradient of every parameter."""
    config, mesh = layout_config(RECIPE, (1, 1, 1), 0, flags), ParallelMesh.single()
    model, objective, settings = build_gpt(config.model), build_objective(config, mesh), step_settings(config)
    loss, tokens, rows = torch.zeros([]), 0.0, 0
    for batch in files.batches(config, mesh):
        segments = None if batch.segment_ids is None else torch.from_numpy(batch.segment_ids)
        context = settings.context(torch.from_numpy(batch.sample_ids), segments)
        targets = {name: torch.from_numpy(values) for name, values in objective.targets(batch).items()}
        result = objective(model(torch.from_numpy(batch.tokens), context), targets)
        loss, tokens = loss + result.loss_sum, tokens + float(result.token_count)
        rows += int((batch.loss_mask.sum(axis=1) > 0).sum())
    (loss / tokens).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return rows, loss.item() / tokens, tokens, found


def seen_as_one_text(files: Files) -> float:
    """The loss of packed rows whose examples see each other."""
    config, mesh = layout_config(RECIPE, (1, 1, 1), 0, [TARGETS, PACK]), ParallelMesh.single()
    model, objective = build_gpt(config.model), build_objective(config, mesh)
    settings = step_settings(layout_config(RECIPE, (1, 1, 1), 0, []))
    total = tokens = 0.0
    for batch in files.batches(config, mesh):
        targets = {name: torch.from_numpy(values) for name, values in objective.targets(batch).items()}
        context = settings.context(torch.from_numpy(batch.sample_ids))
        result = objective(model(torch.from_numpy(batch.tokens), context), targets)
        total, tokens = total + result.loss_sum.item(), tokens + float(result.token_count)
    return total / tokens


def train_files(
    rank: int, files: Files, layout: tuple[int, int, int], stage: int, variants: dict[str, list[str]]
) -> dict[str, Curve]:
    """(loss, gradient norm) of every step, each on all examples."""
    curves, mesh = {}, None
    for name, flags in variants.items():
        config = layout_config(RECIPE, layout, stage, flags)
        mesh = mesh or open_mesh(config.parallel)
        batches = files.batches(config, mesh)
        engine = build_engine(config, mesh)
        results = [engine.train_batch(list(batches), RECIPE.learning_rate) for _ in range(STEPS)]
        curves[name] = [(result.loss, result.gradient_norm) for result in results]
    return curves


class Compared(NamedTuple):
    """Examples in rows of their own and the same ones packed: rows, losses, counted tokens, gradients.

    Args:
        difference: the largest difference of a gradient, relative to the largest one of its parameter.
    """

    rows: tuple[int, int]
    losses: tuple[float, float]
    tokens: tuple[float, float]
    parameters: int
    difference: float


def compare(files: Files, flags: list[str]) -> Compared:
    """Compares the two for one network and choice of labels."""
    rows, loss, tokens, alone = gradients(files, flags)
    packed_rows, packed_loss, packed_tokens, packed = gradients(files, [*flags, PACK])
    assert alone.keys() == packed.keys()
    ratios = [float((packed[name] - one).abs().max() / one.abs().max()) for name, one in alone.items()]
    return Compared((rows, packed_rows), (loss, packed_loss), (tokens, packed_tokens), len(alone), max(ratios))


def measure(rank: int, files: Files) -> tuple[dict[str, Compared], float, dict[str, Curve]]:
    """Everything that one process measures."""
    compared = {
        f"{positions}, {labels}": compare(files, [*POSITIONS[positions], *flags])
        for positions in POSITIONS
        for labels, flags in LABELS.items()
    }
    variants = {"alone": [TARGETS], "packed": [TARGETS, PACK]}
    variants |= {"alone, samples": [TARGETS, *SAMPLES], "packed, samples": [TARGETS, PACK, *SAMPLES]}
    return compared, seen_as_one_text(files), train_files(rank, files, (1, 1, 1), 0, variants)


@pytest.fixture(scope="module")
def one_process(files: Files) -> tuple[dict[str, Compared], float, dict[str, Curve]]:
    return run_ranks(measure, 1, files)[0]


def test_packed_losses_and_gradients_are_those_of_single_rows(one_process) -> None:
    compared, one_text, _ = one_process
    assert len(compared) == 6
    for name, found in compared.items():
        assert found.rows[0] == EXAMPLES and found.rows[1] < EXAMPLES / 2, name
        assert found.tokens[0] == found.tokens[1], name
        assert found.losses[1] == pytest.approx(found.losses[0], rel=1e-6), name
        assert found.parameters > 10 and found.difference < 2e-5, name
    separate = compared["learned, targets"].losses[0]
    assert abs(one_text - separate) > 1e-4 * separate, "examples that see each other must give another loss"


def check(found: Curve, expected: Curve) -> None:
    for (loss, norm), (true_loss, true_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-5)
        assert norm == pytest.approx(true_norm, rel=1e-4)


def test_training_on_packed_rows_is_training_on_single_rows(one_process) -> None:
    curves = one_process[2]
    check(curves["packed"], curves["alone"])
    assert curves["packed"][-1][0] < curves["packed"][0][0]


def test_every_packed_example_counts_the_same_with_loss_mean_samples(one_process) -> None:
    curves = one_process[2]
    check(curves["packed, samples"], curves["alone, samples"])
    assert abs(curves["alone, samples"][0][1] / curves["alone"][0][1] - 1) > 1e-3, "other gradients than of all tokens"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "stage"), LAYOUTS, ids=[f"{layout_name(one)}-zero{stage}" for one, stage in LAYOUTS]
)
def test_layouts_train_on_packed_rows_alike(files: Files, one_process, layout, stage) -> None:
    world_size = layout[0] * layout[1] * layout[2]
    variants = {"packed": [TARGETS, PACK], "packed, samples": [TARGETS, PACK, *SAMPLES]}
    for curves in run_ranks(train_files, world_size, files, layout, stage, variants):
        for name in variants:
            check(curves[name], one_process[2][name])
