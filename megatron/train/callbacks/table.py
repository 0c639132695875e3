"""The callbacks enabled by flags. Order of calls: callbacks of companions, these, callbacks of the program."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from megatron.train.callback import Callback, CallbackList, CallbackSetup
from megatron.train.callbacks.activity import ActivityReports
from megatron.train.callbacks.distillation import Distillation
from megatron.train.callbacks.garbage_collection import GarbageCollection
from megatron.train.callbacks.numerics import ReplicaCheck, SkippedBatches, SkippedRanges, Spikes
from megatron.train.callbacks.profiling import Profiling
from megatron.train.callbacks.retention import Retention
from megatron.train.callbacks.straggler_detection import StragglerDetection
from megatron.train.callbacks.watching import Watching

CALLBACK_CLASSES: tuple[type[Callback], ...] = (
    SkippedRanges,
    SkippedBatches,
    Distillation,
    Profiling,
    Spikes,
    ReplicaCheck,
    Watching,
    ActivityReports,
    StragglerDetection,
    Retention,
    GarbageCollection,
)

# Callbacks of companions: module and class by the flag's field, imported by name if the flag is given, since the
# trainer works without companions. They come first, so that garbage collection runs after them.
COMPANION_CALLBACKS = {
    "eval_tasks": ("trident.evaluate.training.evaluation_tasks", "EvaluationTasks"),
    "sample_prompts": ("trident.evaluate.training.sample_prompts", "SamplePrompts"),
}


def make_callbacks(setup: CallbackSetup, more: Sequence[type[Callback]] = ()) -> CallbackList:
    """Creates the callbacks enabled by the flags; collective over the mesh.

    Args:
        more: additional classes, called after the others.

    Raises:
        MegatronError: a flag of a callback is invalid.
    """
    values, companions = setup.config.flat(), COMPANION_CALLBACKS.items()
    enabled = [getattr(import_module(module), name) for flag, (module, name) in companions if values[flag] is not None]
    created = (each.of(setup) for each in (*enabled, *CALLBACK_CLASSES, *more))
    return CallbackList(callback for callback in created if callback is not None)
