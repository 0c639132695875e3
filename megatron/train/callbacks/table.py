"""The callbacks that flags may ask for: those of companions are called first, then these, then those of a program."""

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

# Those that companions add: module and class by the flag's field. They are imported if the flag is given, by name,
# because the trainer works without its companions; and come first, so that garbage is collected after them.
COMPANION_CALLBACKS = {
    "eval_tasks": ("trident.evaluate.training.evaluation_tasks", "EvaluationTasks"),
    "sample_prompts": ("trident.evaluate.training.sample_prompts", "SamplePrompts"),
}


def make_callbacks(setup: CallbackSetup, more: Sequence[type[Callback]] = ()) -> CallbackList:
    """The callbacks that the flags ask for; collective over the mesh.

    Args:
        more: classes that a caller adds, called after the others.

    Raises:
        MegatronError: what a flag of a callback asks for is not there.
    """
    values, companions = setup.config.flat(), COMPANION_CALLBACKS.items()
    asked = [getattr(import_module(module), name) for flag, (module, name) in companions if values[flag] is not None]
    made = (each.of(setup) for each in (*asked, *CALLBACK_CLASSES, *more))
    return CallbackList(callback for callback in made if callback is not None)
