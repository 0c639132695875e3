"""Opens a checkpoint of any layout for inference: network, tokenizer and configuration.

On a CPU its weights are packed for the few rows of text generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import LoadedCheckpoint, folder_of_step, load_newest, newest_record
from megatron.checkpoint.record import Record
from megatron.config import LoadingConfig, PrecisionConfig, RunConfig
from megatron.config.program_flags import with_overrides
from megatron.config.sections.parallel import without_training
from megatron.engine.pipeline.chunks import stage_bounds
from megatron.errors import CheckpointError, ConfigError
from megatron.host_memory import available_memory_bytes
from megatron.kernels.products import packed
from megatron.model.blocks.attention_forms.latent import LatentProjection
from megatron.model.blocks.embedding import OutputHead
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import filling_weights
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import EVENLY
from megatron.parallel.shard_spec import annotate, shard_spec_of
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer

_SPARE = 4  # copies of the head that must fit into free memory before one is made
_MEBIBYTE = 1 << 20
_NOTABLE_BYTES = 64 << 20  # less is not reported


@dataclass(frozen=True)
class LoadedModel:
    """A network in evaluation mode with its tokenizer and configuration.

    Attributes:
        config: the configuration of the run that saved the checkpoint, with the given flags and this mesh's layout;
            experts drop no tokens.
        model: the layers of this rank's pipeline stage; `Forward` runs all stages.
        path: the checkpoint that was loaded.
        step: its training step.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    model: LayerStack
    path: Path
    step: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens that may be generated: the tokenizer's, even if the network has more."""
        return min(self.config.model.vocab_size, self.tokenizer.vocab_size)

    @property
    def sees_prompts(self) -> bool:
        """True if the tokens of a prompt attend to each other in both directions, as prefixes in training."""
        return self.config.loss.has_prefixes

    @property
    def positions(self) -> int:
        """Most tokens of a text, prompt included (--max-position-embeddings)."""
        return self.config.model.max_position_embeddings

    @property
    def eod_id(self) -> int | None:
        """The end-of-document token; None if the tokenizer has none."""
        try:
            return self.tokenizer.eod_id
        except ConfigError:
            return None


def open_checkpoint(load: str, given: Mapping[str, Any], mesh: ParallelMesh) -> LoadedModel:
    """Builds a checkpoint's network on this mesh and loads its weights; collective over the mesh.

    Args:
        load: folder of checkpoints, whose newest valid one is used, or one checkpoint (--load).
        given: trainer flags given to the tool, by "section.field" (`parse_over`).

    Raises:
        CheckpointError: no usable checkpoint, or one trained with another tokenizer.
        ConfigError: a flag contradicts the checkpoint, files of the tokenizer are missing, more pipeline
            stages than blocks, or the network is an encoder.
    """
    step = LoadingConfig(
        load=load, ckpt_step=given.get("loading.ckpt_step"), load_tag=given.get("loading.load_tag")
    ).load_step
    source = Path(load) if step is None else folder_of_step(Path(load), step)
    newest = newest_record(source, mesh)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint in {load} (--load {load}). Give the --save folder of a run.")
    record = Record.from_json(newest.record, newest.path)
    config = RunConfig.from_json(record.config)
    layout = without_training(config.parallel, mesh.tp.size, mesh.pp.size)
    config = with_overrides(replace(config, parallel=layout), given)
    if config.model.bidirectional:
        raise ConfigError(
            f"the checkpoint {newest.path} holds an encoder (--bidirectional, --objective {config.loss.objective}), "
            "which predicts masked tokens and cannot generate text or score continuations. Evaluate it with "
            "pretrain_bert.py --eval-only, or give a GPT checkpoint."
        )
    tokenizer = _tokenizer(config, given, newest.path)
    check_same_tokenizer(f"the checkpoint {newest.path} was trained", record.tokenizer, tokenizer, CheckpointError)
    padded = config.parallel.padded_vocab_size(config.model.vocab_size)
    # A text must not depend on the others of a batch, so experts drop no tokens.
    model_config = replace(config.model, padded_vocab_size=padded, disable_moe_token_dropping=True)
    config = replace(config, model=model_config)
    network = network_layers(config.model, mesh)
    # The head computes few positions, so it does not count.
    bounds = stage_bounds(network, Placement.loop(mesh.pp.size, 1), EVENLY)
    model = LayerStack(network[bounds[mesh.pp.rank] : bounds[mesh.pp.rank + 1]])
    loaded = load_weights(model, source, mesh, known=newest)
    model = model.eval().to(_dtype(config.precision, mesh))
    pack_weights(model)
    return LoadedModel(config, mesh, tokenizer, model, loaded.path, record.progress.step)


def _tokenizer(config: RunConfig, given: Mapping[str, Any], checkpoint: Path) -> Tokenizer:
    """The tokenizer of the checkpoint's configuration.

    Raises:
        ConfigError: its files are missing at the paths of the checkpoint or the flags.
    """
    choice = TokenizerChoice.of(config.data)
    try:
        return build_tokenizer(choice if "data.tokenizer_name_or_path" in given else choice.or_copy_next_to(checkpoint))
    except ConfigError as failure:
        recorded = [
            f"--{name.replace('_', '-')} {getattr(config.data, name)}"
            for name in ("vocab_file", "merge_file", "tokenizer_name_or_path")
            if getattr(config.data, name) and f"data.{name}" not in given
        ]
        if not recorded:
            raise
        raise ConfigError(
            f"{failure} Not given here but recorded in the checkpoint {checkpoint}: {', '.join(recorded)} (a relative "
            f"path is relative to the current folder, {Path.cwd()}). Give the files with --vocab-file and "
            f"--merge-file, or --tokenizer-name-or-path."
        ) from failure


def _dtype(precision: PrecisionConfig, mesh: ParallelMesh) -> torch.dtype:
    """The dtype of training; float32 instead of float16 on the CPU."""
    if precision.dtype_name == "float16" and mesh.device.type == "cpu":
        log.info("computing in float32: the CPU is slow in float16, the dtype of the checkpoint")
        return torch.float32
    dtype: torch.dtype = getattr(torch, precision.dtype_name)
    return dtype


def load_weights(
    model: LayerStack, directory: Path, mesh: ParallelMesh, known: LoadedCheckpoint | None = None
) -> LoadedCheckpoint:
    """Loads the newest valid checkpoint, whatever layout wrote it; collective over the mesh. Logs it to standard error,
    since standard output is for the program's results.

    Args:
        known: the result of `newest_record` for the directory.

    Raises:
        CheckpointError: no checkpoint, or one that does not fit the network.
    """
    loaded = load_newest(
        directory, lambda: filling_weights(model.stored_tensors()), mesh, known=known, announce=log.info
    )
    if loaded is None:
        raise CheckpointError(
            f"there is no checkpoint in {directory} (--load {directory}). Give the --save folder of a run."
        )
    return loaded


def pack_weights(model: nn.Module) -> None:
    """Packs the matrices of a network for inference; it cannot be trained, saved or exported afterwards.

    A packed matrix replaces the plain one. An output head that shares the word embedding keeps both, if memory allows.
    """
    modules = list(model.modules())
    owners = Counter(id(weight) for module in modules for weight in module.parameters(recurse=False))
    for module in modules:
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear, LatentProjection, OutputHead)):
            continue
        if isinstance(module, ColumnParallelLinear) and module.divides_weight:
            continue
        weight = module.weight
        if weight is None:
            continue
        if owners[id(weight)] == 1:
            packed_weight = packed(weight)
            if packed_weight is not None:
                module.weight = annotate(nn.Parameter(packed_weight, requires_grad=False), shard_spec_of(weight))
        elif isinstance(module, OutputHead):
            _pack_shared(module, weight)


def _pack_shared(head: OutputHead, weight: torch.Tensor) -> None:
    size_bytes = weight.numel() * weight.element_size()
    free = available_memory_bytes()
    if free is not None and free < _SPARE * size_bytes:
        return
    head.packed = packed(weight)
    if head.packed is not None and size_bytes >= _NOTABLE_BYTES:
        log.info(f"the output head is packed for generation: {size_bytes / _MEBIBYTE:.0f} MiB more than its weights")
