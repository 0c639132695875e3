"""Checksums of a model directory: an export writes them into `proof.json`, an import compares them."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.errors import ConversionError
from megatron.files.plain import open_plain, sha256_of
from trident.convert.hugging_face.proof import PROOF_NAME
from trident.convert.hugging_face.weight_files import read_json_file

_BLOB = re.compile("/blobs/[0-9a-f]{64}$")


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder by the file's name."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir())}


def check_digests(folder: Path) -> None:
    """Compares the files of a model directory with the checksums that came with them, where there are any.

    Files that nobody recorded are accepted. In the hub's cache a snapshot links to weights as `blobs/<SHA-256>`.

    Raises:
        ConversionError: a file has changed, is missing or cannot be read.
    """
    recorded = read_json_file(folder / PROOF_NAME, "the proof").get("files") if (folder / PROOF_NAME).exists() else None
    files = {path.name: path.resolve() for path in folder.glob("*.safetensors")}
    blobs = {name: file.name for name, file in files.items() if _BLOB.search(file.as_posix())}
    for name, digest in {**blobs, **(recorded if isinstance(recorded, dict) else {})}.items():
        path = folder / Path(name).name
        try:
            actual = _digest(path)
        except OSError as failure:
            actual = failure.strerror or str(failure)
        if actual != digest:
            raise ConversionError(
                f"{path} is not the file that was written or downloaded: its SHA-256 was {digest}, and now: {actual}. "
                f"Copy or download it again; if you changed it on purpose, remove the {PROOF_NAME} next to it."
            )


def _digest(path: Path) -> str:
    with open_plain(path) as stream:
        return sha256_of(stream)
