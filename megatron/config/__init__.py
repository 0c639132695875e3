"""Configuration: a frozen dataclass per section, the flags made from its fields, and the rules between sections.

Imports neither torch nor numpy, reads no environment variable and opens no socket; `parse` sees flags and files only.
"""

from megatron.config.files.flag_files import FlagFilesConfig
from megatron.config.flags.blends import WeightedGroup, WeightedPath
from megatron.config.flags.command_line import parse_flags
from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.program import NO_PROGRAM, Program
from megatron.config.flags.section import ConfigSection
from megatron.config.machine import Machine, TokenizerFacts
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import LossConfig
from megatron.config.objective.masking import MaskingConfig
from megatron.config.parse import parse
from megatron.config.resolve import resolve, resolve_epochs
from megatron.config.resume import check_resume
from megatron.config.run_config import RunConfig, RunRequest
from megatron.config.sections.checkpoints import LoadingConfig, SavingConfig
from megatron.config.sections.computation import KernelConfig, PrecisionConfig, RecomputeConfig
from megatron.config.sections.data import DataConfig, DocumentConfig, RandomConfig
from megatron.config.sections.evaluation import EvaluationConfig
from megatron.config.sections.model import ModelConfig, ModelRequest
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig, ParallelRequest
from megatron.config.sections.planning import PlanningConfig
from megatron.config.sections.reporting import ReportConfig, WatchingConfig
from megatron.config.sections.safety import SafetyConfig, SafetyRequest, StoppingConfig

__all__ = [
    "NO_PROGRAM",
    "ConfigSection",
    "DataConfig",
    "DocumentConfig",
    "EvaluationConfig",
    "FinetuningConfig",
    "FlagFilesConfig",
    "KernelConfig",
    "LoadingConfig",
    "LossConfig",
    "Machine",
    "MaskingConfig",
    "ModelConfig",
    "ModelRequest",
    "OptimConfig",
    "OptimRequest",
    "ParallelConfig",
    "ParallelRequest",
    "PathUse",
    "PlanningConfig",
    "PrecisionConfig",
    "Program",
    "RandomConfig",
    "RecomputeConfig",
    "ReportConfig",
    "RunConfig",
    "RunRequest",
    "SafetyConfig",
    "SafetyRequest",
    "SavingConfig",
    "StoppingConfig",
    "TokenizerFacts",
    "WatchingConfig",
    "WeightedGroup",
    "WeightedPath",
    "check_resume",
    "flag",
    "parse",
    "parse_flags",
    "resolve",
    "resolve_epochs",
]
