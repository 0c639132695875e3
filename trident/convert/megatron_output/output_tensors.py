"""The request of an export, shards of a checkpoint's tensors, and files of torch.

The only file that calls `torch.save`: these formats are pickles. It writes dictionaries of tensors, numbers and
strings, and the arguments of a run as `argparse.Namespace`, as other programs expect. It never reads a pickle.
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
    """Options of an export.

    Args:
        target: the folder to create.
        model: the architecture, with the vocabulary padded for these ranks.
        run: the configuration by field.
        naming: a naming scheme of `names`.
        with_moments: write the optimizer state, if the checkpoint and the format have it.
        keep_padding: write padding rows of the vocabulary that the format omits.
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
        """The row order; bigscience stores the gate in the second half of a gated matrix."""
        return StoredRowOrder(gate_last=self.naming == BIGSCIENCE)

    @property
    def described(self) -> dict[str, Any]:
        """The run's arguments and progress as other programs store them."""
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
class CheckpointTensors:
    """The tensors of a checkpoint that match a network."""

    checkpoint: OpenCheckpoint
    rules: Mapping[str, ShardingRule]
    stored: Mapping[str, CheckpointTensor]
    has_moments: bool

    @classmethod
    def of(cls, request: OutputRequest) -> CheckpointTensors:
        """The tensors to write.

        Raises:
            ConversionError: the formats do not support the network, it cannot be split like this, or the checkpoint
                has other tensors.
        """
        rules = tensor_rules(request.model)
        _check_split(request)
        stored = request.checkpoint.tensors()
        unmatched = sorted(set(stored) ^ set(rules))
        if unmatched:
            raise ConversionError(
                f"{request.checkpoint.folder} does not hold the tensors of its own network: {', '.join(unmatched[:5])}."
                " Use another checkpoint."
            )
        has_moments = request.run.get("optimizer") not in AVERAGING and all(
            kind in tensor.kinds for tensor in stored.values() for kind in MOMENTS
        )
        return cls(request.checkpoint, rules, stored, has_moments and request.with_moments)

    def part(
        self, name: str, kind: Kind, order: StoredRowOrder, rank: int = 0, ranks: int = 1, rows: int | None = None
    ) -> torch.Tensor:
        """Reads the shard of one tensor-parallel rank.

        Args:
            rows: size of the padded vocabulary; None for no padding.
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
    """Pickles a value into a new, synced file; creates its folder.

    Raises:
        StorageError: the file cannot be written.
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
            f"{stages}), which this layout requires. Use a divisor of {model.num_layers}."
        )
    if problems:
        raise ConversionError(" ".join(problems))
