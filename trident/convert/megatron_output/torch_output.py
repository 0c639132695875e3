"""Writes Megatron-LM's `torch` layout: `iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt`.

A file contains all tensors of one rank, which are collected in memory-mapped files: only one tensor of one rank must
fit into memory.

Source: NVIDIA Megatron-LM `megatron/training/checkpointing.py`; bigscience Megatron-DeepSpeed
`megatron/checkpointing.py`, `megatron/optimizer/__init__.py` and `optimizer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.manifest import folder_name
from megatron.checkpoint.storage import DISK, cannot_write, write_text
from megatron.parallel.pieces import Kind
from trident.convert.hugging_face.importing import unfinished_folder
from trident.convert.megatron_format.arguments import scheduler_state
from trident.convert.megatron_format.names import CLASSIC, StagedTensor, stage_tensors
from trident.convert.megatron_output.output_tensors import MOMENTS, CheckpointTensors, OutputRequest, write_object

_POINTER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"


def write_torch_layout(request: OutputRequest) -> Path:
    """Creates a folder with a checkpoint and the file that points to it; returns the checkpoint's folder.

    Moments are written with classic names only: the numbering of Megatron Core's parameters depends on its version.

    Raises:
        ConversionError: the network cannot be expressed or divided like this, or the target exists.
        DamagedError: the checkpoint is damaged.
        StorageError: a file cannot be written.
    """
    tensors = CheckpointTensors.of(request)
    with_moments = tensors.has_moments and request.naming == CLASSIC
    if tensors.has_moments and not with_moments:
        log.info(f"--naming {request.naming}: weights only; --naming {CLASSIC} also writes the moments")
    progress = request.checkpoint.record.progress
    head, step = request.described, progress.step
    if with_moments:
        head["opt_param_scheduler"] = scheduler_state(request.run, progress, request.naming)
    name = folder_name(step) if step else _RELEASE  # other programs refuse iteration 0
    with unfinished_folder(request.target) as folder:
        for stage in range(request.stages):
            for rank in range(request.tensor_ranks):
                rank_name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if request.stages > 1 else "")
                mapped = _MappedTensors(folder / ".mapped")
                content = _RankContent(request, tensors, mapped, rank, stage)
                write_object(folder / name / rank_name / "model_optim_rng.pt", {**head, **content.build(with_moments)})
                del content
                mapped.close()
        write_text(folder / _POINTER, str(step) if step else _RELEASE)
    return request.target / name


@dataclass(frozen=True)
class _RankContent:
    """The network and the optimizer state of one tensor-parallel rank of one stage."""

    request: OutputRequest
    tensors: CheckpointTensors
    mapped: _MappedTensors
    rank: int
    stage: int

    def build(self, with_moments: bool) -> dict[str, Any]:
        listed = list(stage_tensors(self.request.model, self.request.naming, self.stage, self.request.stages))
        run = self.request.run if with_moments else {}
        # The dtype of half-precision weights that have fp32 masters; None for fp32 training.
        half = torch.bfloat16 if run.get("bf16") else torch.float16 if run.get("fp16") else None
        network: dict[str, Any] = {}
        shapes: list[tuple[int, ...]] = []
        for tensor in listed:
            value = self._read(tensor.ours, "weight", half)
            shapes.append(tuple(value.shape))
            module = network
            for key in tensor.path[:-1]:
                module = module.setdefault(key, {})
            module[tensor.path[-1]] = value
        if not with_moments:
            return {"model": network}
        matrices = [number for number, shape in enumerate(shapes) if len(shape) > 1]
        vectors = [number for number, shape in enumerate(shapes) if len(shape) == 1]
        return {"model": network, "optimizer": self._optimizer(listed, [matrices, vectors], half is not None)}

    def _optimizer(
        self, listed: Sequence[StagedTensor], groups: Sequence[Sequence[int]], is_half: bool
    ) -> dict[str, Any]:
        """Adam's state; torch's optimizers number tensors in the order of their groups."""
        run, updates = self.request.run, self.request.checkpoint.record.optimizer_updates
        state: dict[int, dict[str, torch.Tensor]] = {}
        described = []
        for members, share in zip(groups, (1.0, 0.0), strict=True):  # share: of the weight decay
            numbers = range(len(state), len(state) + len(members))
            for number, member in zip(numbers, members, strict=True):
                moments: dict[str, torch.Tensor] = {kind: self._read(listed[member].ours, kind) for kind in MOMENTS}
                state[number] = {"step": torch.tensor(float(updates)), **moments}
            described.append(
                {
                    "lr": run["lr"],
                    "weight_decay": run["weight_decay"] * share,
                    "wd_mult": share,
                    "lr_mult": 1.0,
                    "betas": (run["adam_beta1"], run["adam_beta2"]),
                    "eps": run["adam_eps"],
                    "step": updates,
                    "params": list(numbers),
                }
            )
        inner = {"state": state, "param_groups": described}
        if not is_half:
            return inner
        masters = [[self._read(listed[member].ours, "weight") for member in members] for members in groups]
        return {"optimizer": inner, "fp32_from_fp16_params": masters}

    def _read(self, ours: str, kind: Kind, dtype: torch.dtype | None = None) -> torch.Tensor:
        request = self.request
        rows = request.model.padded_vocab_size
        values = self.tensors.part(ours, kind, request.order, self.rank, request.tensor_ranks, rows)
        return self.mapped.copy_of(values, dtype or values.dtype)


class _MappedTensors:
    """Tensors in temporary memory-mapped files, so that the system can reclaim their memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def copy_of(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        path = self._folder / f"{self._count:06d}"
        self._count += 1
        numel = math.prod(values.shape)
        try:
            flat = torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
        except RuntimeError as failure:
            cause = OSError(str(failure).splitlines()[0])
            raise cannot_write(DISK, path, numel * dtype.itemsize, cause) from failure
        return flat.view(values.shape).copy_(values)

    def close(self) -> None:
        """Removes the files; existing tensors keep their values."""
        DISK.remove_tree(self._folder)
