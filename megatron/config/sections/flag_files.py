"""Files of flags: a published architecture by name, and the user's own file."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class FlagFilesConfig(ConfigSection):
    """Where flags come from in addition to the command line."""

    model_preset: str | None = flag(
        None, "a published architecture by name, a file in examples/configs; --config and the command line win"
    )
    config: str | None = flag(None, "JSON or YAML file with flags by name; the command line wins", path=PathUse.FILE)
