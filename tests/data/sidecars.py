"""Writes the sidecar of a pair that a test made by hand."""

import os
from pathlib import Path

from megatron.data.formats.sidecar import Sidecar, sidecar_path, write_temporary_sidecar


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the sidecar of a data prefix."""
    os.replace(write_temporary_sidecar(prefix, sidecar), sidecar_path(prefix))
