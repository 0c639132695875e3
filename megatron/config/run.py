"""The whole request: five areas, where each value came from, and the rules between areas."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.control import ControlConfig
from megatron.config.data import DataConfig
from megatron.config.flags import Area
from megatron.config.layout import heads_problems, stages_problems
from megatron.config.model import ModelConfig
from megatron.config.optim import OptimConfig
from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError

GIVEN = "given"
FILE = "file"
DEFAULT = "default"
CHECKPOINT = "checkpoint"

AREAS: Mapping[str, type[Area]] = types.MappingProxyType(
    {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "optim": OptimConfig,
        "data": DataConfig,
        "control": ControlConfig,
    }
)


@dataclass(frozen=True)
class RunConfig:
    """What was asked for; frozen, and the only configuration there is.

    `provenance` maps "area.field" to given, file, default or checkpoint. `notices` are sentences the user should see
    once, such as flags that were accepted and ignored.

    Raises:
        ConfigError: a rule between two areas is broken.
    """

    model: ModelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    data: DataConfig
    control: ControlConfig
    provenance: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        found = list(cross_problems(self.model, self.parallel))
        if found:
            raise ConfigError(found)

    def was_given(self, area_field: str) -> bool:
        """Whether "area.field" was set by the user, on the command line or in a file."""
        return self.provenance.get(area_field, DEFAULT) != DEFAULT

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values; `from_json` reads it back."""
        found: dict[str, Any] = {name: plain(dataclasses.asdict(getattr(self, name))) for name in AREAS}
        return {**found, "provenance": dict(self.provenance)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> RunConfig:
        """Reads what `to_json` wrote; entries that an older version did not have get their defaults.

        Raises:
            ConfigError: an entry is unknown, so the text was written by a newer version, or a value breaks a rule.
        """
        areas = {}
        for name, cls in AREAS.items():
            entries = saved.get(name, {})
            known = {one.name for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
            unknown = sorted(set(entries) - known)
            if unknown:
                raise ConfigError(
                    f"the saved configuration has {name}.{unknown[0]} = {entries[unknown[0]]!r}, which this version "
                    "does not know. It was written by a newer version; use that one."
                )
            areas[name] = cls(**{key: frozen(value) for key, value in entries.items()})
        return RunConfig(**areas, provenance=dict(saved.get("provenance", {})))  # type: ignore[arg-type]


def cross_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """One sentence for every broken rule between areas."""
    ranks, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    yield from heads_problems(model.num_attention_heads, ranks)
    if ranks > 0 and model.ffn_hidden_size and model.ffn_hidden_size % ranks:
        yield (
            f"--ffn-hidden-size {model.ffn_hidden_size} cannot be split over --tensor-model-parallel-size {ranks} "
            f"ranks. It must be a multiple of them; use --ffn-hidden-size {-(-model.ffn_hidden_size // ranks) * ranks}."
        )
    size = model.pad_vocab_size_to
    if size is not None and ranks > 0 and size % ranks:
        yield (
            f"--pad-vocab-size-to: {size} is not divisible by {ranks} (--tensor-model-parallel-size), so the word "
            f"embedding cannot be split evenly. Use --pad-vocab-size-to {-(-size // ranks) * ranks}."
        )
    yield from stages_problems(model.num_layers, stages)


def plain(value: Any) -> Any:
    """Tuples as lists, the way JSON gives them back."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """Lists as tuples, the way the areas hold them."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
