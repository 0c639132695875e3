"""What is written, the checkpoint that it is read from, one part of a tensor at a time, and the files of torch.

The only file that calls `torch.save`: the formats written here are pickles by definition. It writes dictionaries of
tensors, numbers and texts, and the arguments of a run as `argparse.Namespace`, which is what the programs that read
them expect. Nothing here, nor anywhere else in this process, reads a pickle.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.catalogue import CheckpointTensor
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.checkpoint.snapshot import TORCH_TYPES
from megatron.config import ModelConfig
from megatron.config.rules.layout import heads_problems, widths_problems
from megatron.config.sections.optimizers import AVERAGING
from megatron.errors import ConversionError, StorageError
from megatron.files.replacing import write_new
from megatron.parallel.pieces import Kind, PieceKey
from trident.convert.megatron_format.arguments import stored_arguments
from trident.convert.megatron_format.names import BIGSCIENCE
from trident.convert.megatron_format.sharding_rules import CURRENT_VERSION, ShardingRule, StoredRowOrder, tensor_rules

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OutputRequest:
    """What to write.

    Args:
        target: the folder to make.
        model: the architecture, with the rows that the vocabulary has after padding for these ranks.
        run: our configuration by field.
        naming: one of `naming`'s.
        with_moments: write the optimizer state, where the checkpoint and the format have it.
        keep_padding: write the padding rows of the vocabulary where the format leaves them out.
    """

    checkpoint: OpenCheckpoint
    target: Path
    model: ModelConfig
    run: Mapping[str, Any]
    naming: str
    tensor_ranks: int = 1
    stages: int = 1
    with_moments: bool = True
    keep_padding: bool = False

    @property
    def order(self) -> StoredRowOrder:
        """The order of rows; bigscience keeps the gate in the second half of a gated matrix."""
        return StoredRowOrder(gate_last=self.naming == BIGSCIENCE)

    @property
    def described(self) -> dict[str, Any]:
        """What a file says of the run: arguments in the form in which the other programs store them, and progress."""
        progress, model = self.checkpoint.record.progress, self.model
        arguments = stored_arguments(
            model, self.run, progress, self.naming, tensor_ranks=self.tensor_ranks, stages=self.stages
        )
        return {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": CURRENT_VERSION,
            "iteration": progress.step,
            "tokens": progress.consumed_tokens,
            "checkpoint_info": {
                "padded_vocab_size": model.padded_vocab_size,
                "original_vocab_size": model.vocab_size,
            },
        }


@dataclass(frozen=True)
class OurTensors:
    """The tensors of a checkpoint, which are exactly the tensors of a network."""

    checkpoint: OpenCheckpoint
    rules: Mapping[str, ShardingRule]
    stored: Mapping[str, CheckpointTensor]
    has_moments: bool

    @classmethod
    def of(cls, request: OutputRequest) -> OurTensors:
        """The tensors to write.

        Raises:
            ConversionError: the formats do not know the network, it cannot be split like this, or the checkpoint holds
                other tensors.
        """
        rules = tensor_rules(request.model)
        _check_split(request)
        stored = request.checkpoint.tensors()
        left = sorted(set(stored) ^ set(rules))
        if left:
            raise ConversionError(
                f"{request.checkpoint.folder} does not hold the tensors of its own network: {', '.join(left[:5])}. Use "
                "another checkpoint."
            )
        has_moments = request.run.get("optimizer") not in AVERAGING and all(
            kind in tensor.kinds for tensor in stored.values() for kind in MOMENTS
        )
        return cls(request.checkpoint, rules, stored, has_moments and request.with_moments)

    def part(
        self, name: str, kind: Kind, order: StoredRowOrder, rank: int = 0, ranks: int = 1, rows: int | None = None
    ) -> torch.Tensor:
        """What one tensor-parallel rank stores of a tensor; only that is read.

        Args:
            rows: of the padded vocabulary over all ranks; None for no padding.
        """
        rule = self.rules[name]
        shape = list(rule.shape)
        start, stop = [0] * len(shape), list(shape)
        local_rows = None
        if rule.split is not None:
            size = rows if rule.rows == "vocabulary" and rows is not None else shape[rule.split]
            share = size // ranks
            start[rule.split] = min(rank * share, shape[rule.split])
            stop[rule.split] = min((rank + 1) * share, shape[rule.split])
            local_rows = share if rule.rows == "vocabulary" else None
        local = tuple(high - low for low, high in zip(start, stop, strict=True))
        stored = self.stored[name]
        dtype = TORCH_TYPES[stored.kinds[stored.weight_kind if kind == "weight" else kind]]
        values = torch.empty(local, dtype=dtype)
        if values.numel():
            key = PieceKey(name, kind, tuple(shape), tuple(start), tuple(stop), 0, math.prod(local))
            values = self.checkpoint.read([key])[0].view(local)
        return dataclasses.replace(rule, shape=local, split=None).cut(values, 0, 1, order, local_rows)


def write_object(path: Path, value: Any) -> None:
    """Pickles a value into a new file, in a folder that is made if it is missing, and waits until it is on the disk.

    Raises:
        StorageError: the file system refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, lambda file: torch.save(value, file))
    except (OSError, RuntimeError) as failure:  # torch's writer turns a full disk into a RuntimeError
        reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
        raise StorageError(f"cannot write {path}: {reason}. Free space there or name another folder.") from failure


def _check_split(request: OutputRequest) -> None:
    model, ranks, stages = request.model, request.tensor_ranks, request.stages
    problems = [*heads_problems(model.num_attention_heads, ranks), *widths_problems(model.widths, ranks)]
    for count, what in (
        (model.num_query_groups, "groups of keys and values (--num-query-groups)"),
        (model.padded_vocab_size, "rows of the padded vocabulary"),
    ):
        if count % ranks:
            size = f"--tensor-model-parallel-size {ranks}"
            problems.append(f"{count} {what} cannot be split over {size}. Use a divisor of them.")
    if model.num_layers % stages:
        problems.append(
            f"{model.num_layers} layers cannot be divided into {stages} equal stages (--pipeline-model-parallel-size "
            f"{stages}), which this layout needs. Use a divisor of {model.num_layers}."
        )
    if problems:
        raise ConversionError(" ".join(problems))
