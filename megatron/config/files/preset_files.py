"""`--model-preset NAME`: published architectures by name, files in the format of `--config`."""

from __future__ import annotations

import difflib
from pathlib import Path

from megatron.errors import ConfigError

_MOST_SHOWN = 6


def preset_path(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: there is none of this name.
    """
    folder, names = _folder(), preset_names()
    if name in names:
        return folder / f"{name}.yaml"
    near = difflib.get_close_matches(name.lower(), names, n=_MOST_SHOWN, cutoff=0.5)
    if not near:
        near = sorted({other.partition("-")[0] + "-..." for other in names})
    raise ConfigError(
        f"--model-preset {name} is not known. Similar: {', '.join(near)}. All {len(names)} are the files in {folder}; "
        "--config FILE reads any file of flags."
    )


def preset_names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def _folder() -> Path:
    """`examples/configs` of the repository, which an installed package holds as its folder `presets`."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "examples" / "configs"
