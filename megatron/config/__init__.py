"""Configuration: a frozen dataclass per section, the flags made from its fields, and the rules between sections.

Imports neither torch nor numpy, reads no environment variable and opens no socket; `parse` sees flags and files only.
"""

from megatron.config.flags.blends import WeightedGroup, WeightedPath
from megatron.config.flags.command_line import parse_flags
from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import LossConfig
from megatron.config.objective.masking import MaskingConfig
from megatron.config.parse import parse
from megatron.config.resolve import Machine, TokenizerFacts, resolve, resolve_epochs
from megatron.config.resume import check_resume
from megatron.config.run import RunConfig, RunRequest
from megatron.config.sections.control import ControlConfig
from megatron.config.sections.data import DataConfig
from megatron.config.sections.documents import DocumentConfig
from megatron.config.sections.kernels import KernelConfig
from megatron.config.sections.model import ModelConfig, ModelRequest
from megatron.config.sections.optim import OptimConfig, OptimRequest
from megatron.config.sections.parallel import ParallelConfig, ParallelRequest
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.random import RandomConfig
from megatron.config.sections.recompute import RecomputeConfig
from megatron.config.sections.safety import SafetyConfig, SafetyRequest
from megatron.config.sections.saving import SavingConfig
from megatron.config.sections.watching import WatchingConfig

__all__ = [
    "ConfigSection",
    "ControlConfig",
    "DataConfig",
    "DocumentConfig",
    "FinetuningConfig",
    "KernelConfig",
    "LossConfig",
    "Machine",
    "MaskingConfig",
    "ModelConfig",
    "ModelRequest",
    "OptimConfig",
    "OptimRequest",
    "ParallelConfig",
    "ParallelRequest",
    "PrecisionConfig",
    "RandomConfig",
    "RecomputeConfig",
    "RunConfig",
    "RunRequest",
    "SafetyConfig",
    "SafetyRequest",
    "SavingConfig",
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
