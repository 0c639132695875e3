"""What the user asked for: one frozen dataclass per area, the flags made from them, and the rules between them.

Imports neither torch nor numpy, reads no environment variable and opens no socket; `parse` sees flags and files only.
"""

from megatron.config.control import ControlConfig
from megatron.config.data import DataConfig, WeightedGroup, WeightedPath
from megatron.config.model import ModelConfig
from megatron.config.optim import OptimConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse
from megatron.config.resolve import Machine, TokenizerFacts, resolve
from megatron.config.resume import check_resume
from megatron.config.run import RunConfig

__all__ = [
    "ControlConfig",
    "DataConfig",
    "Machine",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "TokenizerFacts",
    "WeightedGroup",
    "WeightedPath",
    "check_resume",
    "parse",
    "resolve",
]
