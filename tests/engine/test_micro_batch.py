"""What of a micro-batch reaches which stage."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.engine.micro_batch import DeviceBatch
from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.split import SequenceSplit

TOKENS = np.arange(8, dtype=np.int64).reshape(2, 4)
SEGMENTS = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
BATCH = Batch(TOKENS, TOKENS + 1, np.ones((2, 4), np.float32), np.array([5, 6]), SEGMENTS, np.array([1, 0]))
SCALES = torch.tensor([0.5, 0.25])


def moved(
    objective: LanguageModelObjective, settings: StepSettings, scales: torch.Tensor | None = SCALES, **wanted: bool
) -> DeviceBatch:
    return DeviceBatch.of(BATCH, objective, settings, SCALES.device, scales, **wanted)


def test_ranks_of_a_pipeline_take_what_they_use() -> None:
    objective, settings = LanguageModelObjective(Axis.single("tp"), 100), StepSettings(mask=MaskKind.DOCUMENTS)
    first = moved(objective, settings, None)
    assert (len(first.inputs), len(first.passed), first.targets) == (1, 2, ())
    assert torch.equal(first.passed[1], torch.from_numpy(SEGMENTS))
    last = moved(objective, settings, with_inputs=False)
    assert (last.inputs, len(last.passed), len(last.targets)) == ((), 2, 3)
    assert first.shape == last.shape == (2, 4)


def test_samples_that_cannot_be_divided_are_padded() -> None:
    split = SequenceSplit(Axis.single("cp"), Axis("sp", 1, 3, (0, 1, 2)), by_document=True)
    settings = StepSettings(mask=MaskKind.DOCUMENTS, split=split)
    batch = moved(LanguageModelObjective(Axis.single("tp"), 100), settings)
    assert batch.shape == (2, 2)  # the third and fourth of six places
    assert batch.inputs[0].tolist() == [[2, 3], [6, 7]]
    assert batch.passed[1].tolist() == [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2]]
    last = dataclasses.replace(split, ulysses=dataclasses.replace(split.ulysses, rank=2))
    batch = moved(LanguageModelObjective(Axis.single("tp"), 100), dataclasses.replace(settings, split=last))
    assert [part.tolist() for part in (*batch.inputs, *batch.targets[1:3])] == [[[0, 0], [0, 0]]] * 3
