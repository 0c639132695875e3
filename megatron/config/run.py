"""The whole configuration: its sections, where each value came from, and the rules between sections."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.layout import heads_problems, stages_problems
from megatron.config.section import ConfigSection
from megatron.config.sections.control import ControlConfig
from megatron.config.sections.data import DataConfig
from megatron.config.sections.documents import DocumentConfig
from megatron.config.sections.kernels import KernelConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optim import OptimConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.random import RandomConfig
from megatron.config.sections.recompute import RecomputeConfig
from megatron.errors import ConfigError

GIVEN = "given"
FILE = "file"
DEFAULT = "default"
CHECKPOINT = "checkpoint"

# Every section by its name in `RunConfig`, in the order of `--help`.
SECTIONS: Mapping[str, type[ConfigSection]] = types.MappingProxyType(
    {
        "model": ModelConfig,
        "precision": PrecisionConfig,
        "recompute": RecomputeConfig,
        "documents": DocumentConfig,
        "random": RandomConfig,
        "kernels": KernelConfig,
        "parallel": ParallelConfig,
        "optim": OptimConfig,
        "data": DataConfig,
        "control": ControlConfig,
    }
)


@dataclass(frozen=True)
class RunConfig:
    """What was asked for; frozen, and the only configuration there is.

    `provenance` maps "section.field" to given, file, default or checkpoint. `notices` are sentences the user should see
    once, such as flags that were accepted and ignored.

    Raises:
        ConfigError: a rule between two sections is broken.
    """

    model: ModelConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    documents: DocumentConfig
    random: RandomConfig
    kernels: KernelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    data: DataConfig
    control: ControlConfig
    provenance: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        found = list(cross_problems(self.model, self.parallel, self.data))
        if found:
            raise ConfigError(found)

    def was_given(self, area_field: str) -> bool:
        """Whether "section.field" was set by the user, on the command line or in a file."""
        return self.provenance.get(area_field, DEFAULT) != DEFAULT

    def flat(self) -> dict[str, Any]:
        """Every value by the name of its field, for logs."""
        return {key: value for name in SECTIONS for key, value in dataclasses.asdict(getattr(self, name)).items()}

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values; `from_json` reads it back."""
        found: dict[str, Any] = {name: plain(dataclasses.asdict(getattr(self, name))) for name in SECTIONS}
        return {**found, "provenance": dict(self.provenance)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> RunConfig:
        """Reads what `to_json` wrote; entries that an older version did not have get their defaults.

        A field is found by its name, in whichever section it was saved: older versions had fewer sections.

        Raises:
            ConfigError: an entry is unknown, so the text was written by a newer version, or a value breaks a rule.
        """
        places = field_sections()
        values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for section, entries in saved_sections(saved):
            for name, value in entries.items():
                if name not in places:
                    raise ConfigError(
                        f"the saved configuration has {section}.{name} = {value!r}, which this version does not know. "
                        "It was written by a newer version; use that one."
                    )
                values[places[name]][name] = frozen(value)
        sections: dict[str, Any] = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
        provenance = {
            f"{places[name]}.{name}": source
            for name, source in ((key.partition(".")[2], source) for key, source in saved.get("provenance", {}).items())
            if name in places
        }
        return RunConfig(**sections, provenance=provenance)


def field_sections() -> dict[str, str]:
    """The section of every field, by the field's name; a name occurs in one section only."""
    return {field.name: name for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def saved_sections(saved: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections of a saved configuration, in whatever way its version divided the fields."""
    for name, entries in saved.items():
        if name != "provenance":
            yield name, entries


def cross_problems(model: ModelConfig, parallel: ParallelConfig, data: DataConfig) -> Iterator[str]:
    """One sentence for every broken rule between sections."""
    if model.max_position_embeddings < data.seq_length:
        yield (
            f"--max-position-embeddings {model.max_position_embeddings} is less than --seq-length {data.seq_length}. "
            f"Every position needs a row; use --max-position-embeddings {data.seq_length} or shorter samples."
        )
    ranks, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if model.num_attention_heads > 0 and ranks > 0:
        yield from heads_problems(model.num_attention_heads, ranks)
    if ranks > 0 and model.ffn_hidden_size and model.ffn_hidden_size % ranks:
        yield (
            f"--ffn-hidden-size {model.ffn_hidden_size} cannot be split over --tensor-model-parallel-size {ranks} "
            f"ranks. It must be a multiple of them; use --ffn-hidden-size {-(-model.ffn_hidden_size // ranks) * ranks}."
        )
    size = parallel.pad_vocab_size_to
    if size is not None and ranks > 0 and size % ranks:
        yield (
            f"--pad-vocab-size-to: {size} is not divisible by {ranks} (--tensor-model-parallel-size), so the word "
            f"embedding cannot be split evenly. Use --pad-vocab-size-to {-(-size // ranks) * ranks}."
        )
    if model.num_layers > 0:
        yield from stages_problems(model.num_layers, stages)


def plain(value: Any) -> Any:
    """Tuples as lists, the way JSON gives them back."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """Lists as tuples, the way the sections hold them."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
