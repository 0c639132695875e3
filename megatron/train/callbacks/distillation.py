"""Knowledge distillation from a teacher, loaded from a checkpoint of any layout and released after --kd-iters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron import log
from megatron.checkpoint import load_newest, newest_record
from megatron.checkpoint.record import Progress, Record
from megatron.config import ModelConfig, RunConfig
from megatron.config.architecture.positions import LEARNED
from megatron.config.rules.layout import heads_problems, widths_problems
from megatron.engine.engine import Engine
from megatron.engine.pipeline.chunks import Chunks
from megatron.errors import CheckpointError, ConfigError
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import Recompute
from megatron.model.networks import network_layers
from megatron.objective.distillation import DistillationObjective, Teacher
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.pieces import filling_weights
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run


class Distillation(Callback):
    """Adds the teacher to the objective until --kd-iters are trained."""

    def __init__(self, setup: CallbackSetup) -> None:
        self._setup = setup
        self._student: LanguageModelObjective | None = None

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        is_on = setup.config.distillation.is_on and not setup.config.evaluation.eval_only
        return cls(setup) if is_on else None

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        """Loads the teacher, unless the distillation is over; collective over the mesh.

        Raises:
            CheckpointError: there is no checkpoint of the teacher, or it was trained with another tokenizer.
            ConfigError: the teacher does not match the run, its layout or the flags that describe it.
        """
        options, student = self._setup.config.distillation, engine.objective
        if options.is_over(progress.step) or not isinstance(student, LanguageModelObjective):
            return
        teacher = open_teacher(self._setup.config, engine, self._setup.tokenizer)
        weights = (options.kd_alpha_ce, options.kd_beta_ce, options.kd_temp)
        engine.objective = DistillationObjective(student, teacher, *weights)
        self._student = student

    def before_step(self, run: Run) -> None:
        """Frees the teacher after its last step; training continues without it."""
        if self._student is not None and run.config.distillation.is_over(run.progress.step):
            log.info(f"distillation ends after iteration {run.progress.step}; training continues on the labels only")
            run.engine.objective, self._student = self._student, None


def open_teacher(config: RunConfig, engine: Engine, tokenizer: Tokenizer) -> Teacher | None:
    """Loads the teacher, split over tensor-parallel ranks and the chunks of the pipeline.

    With DeepSpeed's pipeline, ranks with the head have the whole teacher, and others None.

    Raises:
        CheckpointError, ConfigError: see `Distillation.restore`.
    """
    mesh = engine.mesh
    source = Path(str(config.distillation.load_teacher))
    newest = newest_record(source, mesh)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {source} (--load-teacher {source}). Use the folder of the teacher's checkpoints, or one "
            "of them."
        )
    record = Record.from_json(newest.record, newest.path)
    trained = f"the teacher {newest.path} was trained"
    check_same_tokenizer(trained, record.tokenizer, tokenizer, CheckpointError, ends_matter=False)
    model = RunConfig.from_json(record.config).model
    problems = list(teacher_problems(model, config, newest.path))
    if problems:
        raise ConfigError(problems)
    model = dataclasses.replace(model, padded_vocab_size=config.model.padded_vocab_size)
    teacher = teacher_of(model, engine)
    weights = list(teacher.network.stored_tensors())
    loaded = load_newest(source, lambda: filling_weights(weights), mesh, known=newest, announce=log.info)
    if loaded is None:
        raise CheckpointError(f"the checkpoint in {source} was removed while it was being loaded. Start again.")
    log.info(f"teacher: {loaded.path}, {model.num_layers} layers of width {model.hidden_size}")
    teacher.network.to(engine.steps.dtype)
    return teacher if weights or teacher.chunks is not None else None


def teacher_of(model: ModelConfig, engine: Engine) -> Teacher:
    """A teacher without loaded weights; without layers on ranks that do not compute it."""
    layers, chunks = network_layers(model, engine.mesh), None
    if engine.passes.placement is not None:
        divided = Chunks.of(layers, engine.passes.placement, engine.mesh.pp.rank, may_be_empty=True)
        layers, chunks = list(divided.specs), divided.layers
    elif not engine.chunks.has_last:
        layers = []
    steps = dataclasses.replace(
        engine.steps, recompute=Recompute.NONE, factored_logits=False, hidden_size=model.hidden_size
    )
    return Teacher(LayerStack(layers).eval().requires_grad_(False), steps, chunks)


def _shown(value: int | tuple[int, ...]) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def teacher_problems(model: ModelConfig, config: RunConfig, path: Path) -> Iterator[str]:
    """The reasons why a network cannot be the teacher of a run, one sentence each.

    Args:
        model: the architecture of the teacher.
        config: the configuration of the run.
        path: the teacher's checkpoint.
    """
    name = f"the teacher {path}"
    if model.bidirectional:
        yield f"{name} is an encoder, which does not predict next tokens. Use a GPT as --load-teacher."
    if model.vocab_size != config.model.vocab_size:
        yield (
            f"{name} has a vocabulary of {model.vocab_size}, this network of {config.model.vocab_size}: their "
            f"predictions cannot be compared. Train with --vocab-size {model.vocab_size}, or use another teacher."
        )
    for field, given in config.distillation.teacher_shape.items():
        actual = getattr(model, field)
        if actual != given:
            flag = f"--{field.replace('_', '-')}-teacher"
            yield (
                f"{flag} is {_shown(given)}, but {name} has {_shown(actual)}. Drop {flag}, or use the right checkpoint."
            )
    length = config.parallel.padded_length(config.data.seq_length, causal=not config.model.bidirectional)
    if model.position_embedding_type == LEARNED and model.max_position_embeddings < length:
        shown = f"--seq-length {config.data.seq_length}"
        shown += f", padded to {length}" if length > config.data.seq_length else ""
        yield (
            f"{name} has {model.max_position_embeddings} positions, less than {shown}. Use "
            f"--seq-length {model.max_position_embeddings}, or a teacher with more positions."
        )
    size = config.parallel.tensor_model_parallel_size
    heads = heads_problems(model.num_attention_heads, size * config.parallel.ulysses_size)
    for problem in (*heads, *widths_problems(model.widths, size)):
        yield f"{name} cannot be split like this run: {problem}"
