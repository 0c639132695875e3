"""The sections of a run, requested or resolved, and the provenance of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.files.flag_files import FlagFilesConfig
from megatron.config.flags.program import NO_PROGRAM, Program
from megatron.config.flags.section import ConfigSection
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.objective.masking import MaskingConfig
from megatron.config.sections.checkpoints import LoadingConfig, SavingConfig
from megatron.config.sections.computation import AUTO, TORCH, KernelConfig, PrecisionConfig, RecomputeConfig
from megatron.config.sections.data import DataConfig, DocumentConfig, RandomConfig
from megatron.config.sections.evaluation import EvaluationConfig
from megatron.config.sections.model import ModelConfig, ModelRequest
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig, ParallelRequest
from megatron.config.sections.planning import PlanningConfig
from megatron.config.sections.reporting import ReportConfig, WatchingConfig
from megatron.config.sections.safety import SafetyConfig, SafetyRequest, StoppingConfig

GIVEN = "given"
FILE = "file"
PRESET = "preset"
DEFAULT = "default"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class RunSections:
    """All sections of a run, before rules between them are checked.

    Attributes:
        provenance: "section.field" -> given, file, preset, default or checkpoint.
        notices: sentences to show the user once.
        ignored: a sentence with the reason for each ignored flag.
        program: settings of the calling program; not saved.
    """

    model: ModelRequest
    precision: PrecisionConfig
    recompute: RecomputeConfig
    documents: DocumentConfig
    loss: LossConfig
    masking: MaskingConfig
    finetuning: FinetuningConfig
    distillation: DistillationConfig
    random: RandomConfig
    kernels: KernelConfig
    parallel: ParallelRequest
    optim: OptimRequest
    data: DataConfig
    files: FlagFilesConfig
    loading: LoadingConfig
    saving: SavingConfig
    evaluation: EvaluationConfig
    stopping: StoppingConfig
    safety: SafetyRequest
    report: ReportConfig
    watching: WatchingConfig
    planning: PlanningConfig
    provenance: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    ignored: tuple[str, ...] = field(default=(), compare=False)
    program: Program = field(default=NO_PROGRAM, compare=False)

    def was_given(self, section_field: str) -> bool:
        """Returns True if the user set "section.field", on the command line or in a file."""
        return self.provenance.get(section_field, DEFAULT) != DEFAULT

    @property
    def requested_kernels(self) -> Mapping[str, str]:
        """The requested implementation, or `auto`, by operation.

        `--no-bias-gelu-fusion` requests torch's activation, unless it only follows from layers without biases.
        """
        requested, model = dict(self.kernels.requested), self.model
        without_fusion = self.was_given("model.bias_gelu_fusion") and not model.bias_gelu_fusion
        if without_fusion and model.add_bias_linear and requested["activation"] == AUTO:
            requested["activation"] = TORCH
        return requested

    @property
    def head_share(self) -> float:
        """The fraction of tokens whose logits are computed."""
        return self.masking.mask_prob if self.loss.objective == MASKED else 1.0


@dataclass(frozen=True)
class ResolvedSections(RunSections):
    """The sections, resolved for a machine and a tokenizer."""

    model: ModelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    safety: SafetyConfig


@dataclass(frozen=True)
class ReadFlags(RunSections):
    """The sections as read, unchecked.

    Attributes:
        values: the values that were set, by "section.field", or "legacy.flag" for a flag without a field.
    """

    values: Mapping[str, Any] = field(default_factory=dict, compare=False)


def fields_of(section: type[ConfigSection]) -> tuple[dataclasses.Field[Any], ...]:
    """All fields of a section, including those without a flag."""
    return dataclasses.fields(section)  # type: ignore[arg-type]
