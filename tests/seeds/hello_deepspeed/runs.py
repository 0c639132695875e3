"""Runs of HelloDeepSpeed's two programs on a few rhyming lines, and the same training in plain PyTorch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.hello_deepspeed import train_bert, train_bert_ds
from megatron.checkpoint import read_record, read_tensors
from megatron.engine.engine import Engine
from megatron.parallel.shard_spec import shard_spec_of
from tests.parity.plain_bert import MaskedText, encode, predict
from tests.parity.reference import Recipe

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 1, 32, 2, 16, 8
TINY = (
    f"--num_layers {LAYERS} --h_dim {WIDTH} --num_heads {HEADS} --ff_dim 64 --max_seq_length {LENGTH} "
    f"--batch_size {BATCH} --log_every 1"
).split()
LEARNING_RATE = 2.0e-3
_COLORS = ["red", "blue", "green", "white", "black"]
_THINGS = ["house", "garden", "window", "door", "table", "chair"]


@dataclass(frozen=True)
class Alone:
    """Runs in one process.

    Attributes:
        long: experiment of 200 iterations.
        five: experiment of five iterations, continued to ten.
        ten: experiment of ten iterations.
        five_steps: the checkpoints of `five` before it was continued.
        output: what the long run printed.
    """

    long: Path
    five: Path
    ten: Path
    five_steps: tuple[int, ...]
    output: str


@dataclass(frozen=True)
class Rank:
    """One of two ranks of train_bert_ds.py.

    Attributes:
        samples: numbers of the samples of each step.
        losses: loss of each step.
        texts: the batch of each step.
        initial: the weights before the first step, without padding of the vocabulary.
    """

    samples: list[list[int]]
    losses: list[float]
    texts: list[MaskedText]
    initial: dict[str, torch.Tensor]


def write_text(path: Path) -> None:
    """Writes lines whose words can be told from their neighbours."""
    lines = [
        f"the {first} {thing} stands near the {second} {thing} and every {thing} is {first} or {second}"
        for thing in _THINGS
        for first in _COLORS
        for second in _COLORS
    ]
    path.write_text("\n".join(lines) + "\n")


def experiments(folder: Path) -> list[Path]:
    """The experiment folders in a folder, in the order of their start."""
    return sorted(folder.glob("bert_pretrain.*"))


def steps(experiment: Path) -> tuple[int, ...]:
    """The steps of an experiment's checkpoints."""
    return tuple(int(path.name.removeprefix("iter_")) for path in sorted((experiment / "checkpoints").glob("iter_*")))


def newest(experiment: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The record of an experiment's newest checkpoint, and its weights and moments by name."""
    path = max((experiment / "checkpoints").glob("iter_*"))
    kinds: tuple[Any, ...] = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {f"{name} {kind}": values.clone() for kind in kinds for name, values in read_tensors(path, None, kind)}
    return read_record(path), tensors


def run_alone(rank: int, folder: str) -> tuple[tuple[int, ...], str]:
    """Trains in one process: 200 iterations; five, continued to ten; and ten."""
    text, place = Path(folder) / "text.txt", Path(folder)
    begin = [*TINY, "--dataset", str(text), "--lr", str(LEARNING_RATE), "--checkpoint_dir"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train_bert.main([*begin, str(place / "long"), "--num_iterations", "200"]) == 0
    output = printed.getvalue()
    short = ["--checkpoint_every", "2", "--num_iterations"]
    assert train_bert.main([*begin, str(place / "short"), *short, "5"]) == 0
    (five,) = experiments(place / "short")
    found = steps(five)
    more = ["--load_checkpoint_dir", str(five), "--num_iterations", "10", "--lr", str(LEARNING_RATE)]
    assert train_bert.main(more) == 0
    assert train_bert.main([*begin, str(place / "ten"), *short, "10"]) == 0
    return found, output


def run_beside(rank: int, folder: str, words: Sequence[str]) -> Rank:
    """Trains train_bert_ds.py as one rank, and notes what it trains on."""
    noted = Rank([], [], [], {})
    train_batch = Engine.train_batch

    def note(engine: Engine, batches: Any, *more: Any, **named: Any) -> Any:
        if not noted.initial:
            noted.initial.update(_weights(engine))
        result = train_batch(engine, batches, *more, **named)
        (batch,) = batches
        noted.samples.append(batch.sample_ids.tolist())
        noted.texts.append(_text(batch))
        noted.losses.append(result.loss)
        return result

    Engine.train_batch = note  # type: ignore[method-assign]
    assert train_bert_ds.main([*TINY, "--checkpoint_dir", folder, *words]) == 0
    return noted


def train_plainly(ranks: Sequence[Rank], learning_rate: float) -> list[float]:
    """The losses of the same steps in plain PyTorch, in one process: no DeepSpeed, and none of the product's layers."""
    recipe = Recipe(num_layers=LAYERS, hidden_size=WIDTH, heads=HEADS, sequence_length=LENGTH)
    weights = {name: value.clone().requires_grad_() for name, value in ranks[0].initial.items()}
    unused = {
        f"output_layer.{name}.{kind}": torch.zeros(*shape)
        for name, width in (("pooler.dense", WIDTH), ("binary_head", 2))
        for kind, shape in (("weight", (width, WIDTH)), ("bias", (width,)))
    }
    optimizer, losses = torch.optim.Adam(weights.values(), lr=learning_rate), []
    for parts in zip(*(rank.texts for rank in ranks), strict=True):
        text = MaskedText(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        hidden = encode(weights, text, recipe, post=True)
        logits, _ = predict({**weights, **unused}, hidden, recipe)
        each = F.cross_entropy(logits.transpose(1, 2), text.labels, reduction="none") * text.mask
        loss = each.sum() / text.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _text(batch: Any) -> MaskedText:
    """A batch of the trainer as the plain network takes it."""
    tokens, labels, mask, segments = map(
        torch.from_numpy, (batch.tokens, batch.labels, batch.loss_mask, batch.segment_ids)
    )
    nothing = torch.zeros(len(tokens), dtype=torch.int64)
    return MaskedText(tokens, labels, mask, torch.zeros_like(tokens), segments, nothing[:, None], nothing)


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        parameter.global_name: parameter.detach()  # type: ignore[attr-defined]
        .view(-1)[: shard_spec_of(parameter).box_numel]
        .view(-1, *parameter.shape[1:])
        .clone()
        for parameter in engine.parameters()
    }
