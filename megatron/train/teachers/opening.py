"""Opens the teacher of a distillation, from a checkpoint of any layout, and says when the run goes on without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron import log
from megatron.checkpoint import load_newest, newest_record
from megatron.checkpoint.record import Record
from megatron.config import ModelConfig, RunConfig
from megatron.config.architecture.positions import LEARNED
from megatron.config.layout import heads_problems, widths_problems
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError, ConfigError
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import Recompute, StepSettings
from megatron.model.networks import network_layers
from megatron.objective.distillation import DistillationObjective, Teacher
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import filling_weights
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer


def begin_distillation(
    engine: Engine, config: RunConfig, tokenizer: Tokenizer, step: int
) -> LanguageModelObjective | None:
    """Adds the teacher that the flags name to the engine's objective; collective over the mesh.

    Args:
        step: of the progress at which training starts; the distillation may be over.

    Returns:
        the objective as it was, to go on with when the distillation ends; None if there is no teacher.

    Raises:
        CheckpointError: there is no checkpoint of the teacher, or it was trained with another tokenizer.
        ConfigError: the teacher does not fit the run, its layout or what the flags say of it.
    """
    how, student = config.distillation, engine.objective
    if config.control.eval_only or how.is_over(step) or not isinstance(student, LanguageModelObjective):
        return None
    teacher = open_teacher(config, engine.steps, engine.mesh, tokenizer)
    engine.objective = DistillationObjective(student, teacher, how.kd_alpha_ce, how.kd_beta_ce, how.kd_temp)
    return student


def open_teacher(config: RunConfig, steps: StepSettings, mesh: ParallelMesh, tokenizer: Tokenizer) -> Teacher | None:
    """The teacher, whole but for the split over the tensor-parallel ranks; None on all stages but the last.

    Raises:
        CheckpointError, ConfigError: as `begin_distillation`.
    """
    source = Path(str(config.distillation.load_teacher))
    found = newest_record(source, mesh)
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {source} (--load-teacher {source}). Give the folder to which the teacher's run "
            "saved its checkpoints, or one of them."
        )
    record = Record.from_json(found.record, found.path)
    check_same_tokenizer(f"the teacher {found.path} was trained", record.tokenizer, tokenizer, CheckpointError)
    model = RunConfig.from_json(record.config).model
    problems = list(teacher_problems(model, config, found.path))
    if problems:
        raise ConfigError(problems)
    model = dataclasses.replace(model, padded_vocab_size=config.model.padded_vocab_size)
    network = LayerStack(network_layers(model, mesh) if mesh.is_last_stage else [])
    loaded = load_newest(source, lambda: filling_weights(network.parameters()), mesh, known=found, announce=log.info)
    if loaded is None:
        raise CheckpointError(f"the checkpoint in {source} disappeared while it was being loaded. Start again.")
    log.info(f"teacher: {loaded.path}, {model.num_layers} layers of width {model.hidden_size}")
    if not mesh.is_last_stage:
        return None
    steps = dataclasses.replace(steps, recompute=Recompute.NONE, factored_logits=False)
    return Teacher(network.eval().requires_grad_(False).to(steps.dtype), steps)


def teacher_problems(model: ModelConfig, config: RunConfig, path: Path) -> Iterator[str]:
    """One sentence for everything that keeps a network from teaching another.

    Args:
        model: the architecture of the teacher, as its checkpoint has it.
        config: that of the run.
        path: of the checkpoint.
    """
    at = f"the teacher {path}"
    if model.bidirectional:
        yield f"{at} is an encoder, which predicts no next tokens. Give a GPT with --load-teacher."
    if model.vocab_size != config.model.vocab_size:
        yield (
            f"{at} has a vocabulary of {model.vocab_size} and this network one of {config.model.vocab_size}: their "
            f"predictions cannot be compared. Train with --vocab-size {model.vocab_size}, or take another teacher."
        )
    for field, given in config.distillation.teacher_shape.items():
        held = getattr(model, field)
        if held != given:
            name = f"--{field.replace('_', '-')}-teacher"
            yield f"{name} is {given}, and {at} has {held}. Drop {name}, or give the checkpoint that was meant."
    length = config.data.seq_length
    if model.position_embedding_type == LEARNED and model.max_position_embeddings < length:
        yield (
            f"{at} has {model.max_position_embeddings} positions, which is less than --seq-length {length}. Use "
            f"--seq-length {model.max_position_embeddings}, or a teacher with longer texts."
        )
    size = config.parallel.tensor_model_parallel_size
    for problem in (*heads_problems(model.num_attention_heads, size), *widths_problems(model.widths, size)):
        yield f"{at} cannot be split as this run is: {problem}"
