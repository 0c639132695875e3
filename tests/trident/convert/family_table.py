"""Conversion of a tiny model of each family, as a table: `python -m tests.trident.convert.family_table`.

Import and export name the largest difference of logits as a share of the largest logit, in float32.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils import logging

from megatron import log
from tests.trident.convert.comparison import Comparison, compare
from tests.trident.convert.tiny_models import TINY_MODELS, write_tiny_model
from trident.convert.hugging_face.importing import ModelImportRequest, import_model

HEADER = ("model", "import", "export", "first loss", "gradients", "generation", "round trip")


def rows(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each model."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(io.StringIO()):  # what was loaded and saved
                source = write_tiny_model(name, Path(folder) / "model")
                imported = import_model(ModelImportRequest(source, Path(folder) / "imported"))
                found = compare(source, imported, Path(folder))
            yield row(name, found)


def row(name: str, found: Comparison) -> tuple[str, ...]:
    """One row of the table."""
    return (
        name,
        f"{found.import_difference:.1e}",
        f"{found.export_difference:.1e}" if found.loads_completely else "tensors missing",
        f"{found.loss_difference:.1e}",
        f"{found.gradient_difference:.1e}",
        "equal" if found.generates_equally else "DIFFERENT",
        "bit-equal" if found.returns_equal else "DIFFERENT",
    )


def main(names: Sequence[str]) -> None:
    """Prints the table as Markdown."""
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for line in rows(names or list(TINY_MODELS)):
        print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    log.set_level("warning")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main(sys.argv[1:])
