"""Payloads that somebody may put into a checkpoint directory: pickles, bombs, links, and manifests whose digests fit.

Each is a function that changes a directory which holds the checkpoints of steps 1 and 2. The pickles would make a file,
the canary; the links lead out of the directory. None may be executed, followed or written through, and none may take
much more time or memory than a small checkpoint does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.lock import LOCK_NAME
from megatron.checkpoint.manifest import MANIFEST_NAME
from megatron.checkpoint.publish import HINT_NAME
from tests.checkpoint.made.versions import rewrite, sealed

FILE = "pieces_00000.safetensors"
NEWEST = "iter_0000002"


@dataclass(frozen=True)
class Place:
    """The directories of a payload.

    Args:
        directory: holds the checkpoints.
        outside: a directory next to it that nothing may change.
        canary: exists once a payload was executed.
    """

    directory: Path
    outside: Path
    canary: Path

    @property
    def newest(self) -> Path:
        """The folder of the newest checkpoint."""
        return self.directory / NEWEST

    @property
    def file(self) -> Path:
        """Its file of pieces."""
        return self.newest / FILE

    @property
    def manifest(self) -> Path:
        """Its manifest."""
        return self.newest / MANIFEST_NAME


Payload = Callable[[Place], None]


class _Execute:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.canary), "w"))


def _pickle(place: Place, protocol: int = 2) -> bytes:
    return pickle.dumps({"model": _Execute(place.canary)}, protocol=protocol)


def _zipped(place: Place) -> bytes:
    file = io.BytesIO()
    torch.save({"model": _Execute(place.canary)}, file)
    return file.getvalue()


def _archive(names: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in names.items():
            archive.writestr(name, data)
    return file.getvalue()


def _array(place: Place) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([_Execute(place.canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


# --- manifests whose digests fit ------------------------------------------------------------------


def write_sealed(path: Path, body: bytes) -> None:
    """Writes a manifest with that text and the digest that belongs to it."""
    path.write_bytes(sealed(body))


def read_values(place: Place) -> dict[str, Any]:
    """The manifest of the newest checkpoint, without its digest."""
    values: dict[str, Any] = json.loads(place.manifest.read_bytes())
    del values["digest"]
    return values


def _write_values(place: Place, values: dict[str, Any]) -> None:
    write_sealed(place.manifest, json.dumps(values).encode()[:-1] + b",\n")


def changing(change: Callable[[dict[str, Any]], object]) -> Payload:
    """A payload that changes the manifest."""

    def write(place: Place) -> None:
        values = read_values(place)
        change(values)
        _write_values(place, values)

    return write


def _text(make: Callable[[bytes], bytes]) -> Payload:
    """A payload that changes the manifest as text."""

    def write(place: Place) -> None:
        write_sealed(place.manifest, make(json.dumps(read_values(place)).encode()[:-1] + b",\n"))

    return write


def _record(value: bytes) -> Payload:
    """A payload whose record is a text."""

    def write(place: Place) -> None:
        values = read_values(place) | {"record": "here"}
        write_sealed(place.manifest, json.dumps(values).encode()[:-1].replace(b'"here"', value) + b",\n")

    return write


def with_file(make: Callable[[Place], bytes], sparse_bytes: int = 0) -> Payload:
    """A payload in place of the file of pieces, of which the manifest knows size and digests."""

    def write(place: Place) -> None:
        content = make(place)
        place.file.unlink()
        place.file.write_bytes(content)
        size = max(len(content), sparse_bytes)
        if sparse_bytes:
            os.truncate(place.file, sparse_bytes)
        values = read_values(place)
        chunk = values["chunk_bytes"] = 1024 if not sparse_bytes else 2**30
        digests = [hashlib.sha256(content[at : at + chunk]).hexdigest() for at in range(0, size, chunk)]
        values["files"] = [[FILE, size, hashlib.sha256(content).hexdigest(), digests]]
        _write_values(place, values)

    return write


def with_header(change: Callable[[dict[str, Any]], object]) -> Payload:
    """A payload that changes the header of the file of pieces; its length stays, so the manifest's offsets do."""

    def make(place: Place) -> bytes:
        content = place.file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return with_file(make)


def with_header_text(make: Callable[[bytes], bytes]) -> Payload:
    """A payload whose header is any text."""

    def write(place: Place) -> None:
        content = place.file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        text = make(content[8 : 8 + size])
        values = read_values(place)
        _write_values(place, values)
        with_file(lambda _: len(text).to_bytes(8, "little") + text + content[8 + size :])(place)

    return write


def with_length(number: int) -> Payload:
    """A payload whose header claims a length."""
    return with_file(lambda place: struct.pack("<Q", number) + place.file.read_bytes()[8:])


def _entry(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(value for name, value in header.items() if name != "__metadata__")
    return entry


def many(text: bytes) -> bytes:
    """A header with a million tensors of no bytes more, written as text: as a dictionary it takes 1.2 GB to make."""
    more = (b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(10**6))
    return text.rstrip()[:-1] + b"," + b",".join(more) + b"}"


def rows(values: dict[str, Any], count: int) -> None:
    """The same piece, repeated."""
    values["pieces"] = values["pieces"][:1] * count


def tables(values: dict[str, Any]) -> None:
    """A million tensors."""
    values["tensors"] = [[f"t{number}", [4]] for number in range(10**6)]


def chunks(values: dict[str, Any]) -> None:
    """A file of a million chunks."""
    values["files"][0][1], values["files"][0][3] = 64 * 10**6, ["0" * 64] * 10**6
    values["chunk_bytes"] = 64


def shape(sizes: list[int]) -> Callable[[dict[str, Any]], object]:
    """The first tensor has another shape, and its pieces say so."""

    def change(values: dict[str, Any]) -> None:
        values["tensors"][0][1] = sizes
        for piece in values["pieces"]:
            if piece[0] == 0:
                piece[3], piece[4], piece[5] = [0] * len(sizes), sizes, 0

    return change


def files(values: dict[str, Any]) -> None:
    """A million files of no name that was seen before."""
    values["files"] = [[f"pieces_{number:07d}.safetensors", 0, "0" * 64, []] for number in range(10**6)]


def runs(values: dict[str, Any]) -> None:
    """A hundred thousand parameters that each go through a million files in another way."""
    count = 10**5
    values["tensors"] = [[f"t{number}", [10**6 - 12 * number // 2]] for number in range(count)]
    values["files"] = []
    values["indexes"] = [[f"index_{number:05d}.json", 9, "0" * 64, 10**5] for number in range(10)]
    values["pieces"] = [[at, 0, 1, [0], shape, 0, shape[0], 0, 1, 1] for at, (_, shape) in enumerate(values["tensors"])]


def rewritten(form: str, payload: Payload) -> Payload:
    """A payload in a checkpoint whose manifest has another form."""

    def write(place: Place) -> None:
        rewrite(place.newest, form)
        payload(place)

    return write


def indexed(change: Callable[[dict[str, Any]], object]) -> Payload:
    """A payload that changes a manifest with index files."""
    return rewritten("indexed", changing(change))


def with_index(change: Callable[[Path, Place], object]) -> Payload:
    """A payload in place of an index file."""
    return rewritten("indexed", lambda place: change(place.newest / "index_00000.json", place) and None)


def with_index_text(text: bytes) -> Payload:
    """A payload that is the text of an index file, of which the manifest knows size and digest."""

    def write(place: Place) -> None:
        (place.newest / "index_00000.json").write_bytes(text)
        values = read_values(place)
        values["indexes"] = [["index_00000.json", len(text), hashlib.sha256(text).hexdigest(), 1]]
        _write_values(place, values)

    return rewritten("indexed", write)


def overlapping_boxes(values: dict[str, Any]) -> None:
    """A hundred thousand boxes of one tensor that all meet each other."""
    values["tensors"] = [["t", [4, 200000]]]
    values["pieces"] = [[0, 0, 1, [0, at], [4, 100000 + at], 0, 1, 0] for at in range(100000)]
    values["files"][0][1] = 500 + 400000
    values["files"][0][3] = ["0" * 64] * -(-400500 // values["chunk_bytes"])


# --- files that are none --------------------------------------------------------------------------


def replaced(name: str, make: Callable[[Path, Place], object]) -> Payload:
    """A payload that takes the place of an entry of the directory."""

    def write(place: Place) -> None:
        path = place.directory / name
        if path.is_dir():
            path.rename(place.directory / f"moved {path.name}")
        else:
            path.unlink(missing_ok=True)
        make(path, place)

    return write


def _link(to: str) -> Callable[[Path, Place], object]:
    return lambda path, place: path.symlink_to(place.outside / to)


def _socket(path: Path, place: Place) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _older_manifest(path: Path, place: Place) -> None:
    path.symlink_to(place.directory / "iter_0000001" / MANIFEST_NAME)


def _zeros(path: Path, place: Place) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:  # not root
        path.symlink_to("/dev/zero")


def _terabyte(path: Path, place: Place) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _put(name: str, make: Callable[[Place], bytes]) -> Payload:
    def write(place: Place) -> None:
        path = place.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make(place))

    return write


def crowd(place: Place) -> None:
    """Very many entries that look like something."""
    for number in range(3000):
        (place.directory / f"iter_{number:09d}").mkdir()


PAYLOADS: dict[str, Payload] = {
    # pickles where upstream's programs, or torch's, would look for them, and as our own files
    "pickle model_optim_rng.pt": _put(f"{NEWEST}/model_optim_rng.pt", _pickle),
    "pickle protocol 0": _put(f"{NEWEST}/mp_rank_00_model_states.pt", lambda place: _pickle(place, 0)),
    "pickle protocol 4": _put("common.pt", lambda place: _pickle(place, 4)),
    "pickle torch zip": _put(f"{NEWEST}/pytorch_model.bin", _zipped),
    "pickle .metadata": _put(f"{NEWEST}/.metadata", _pickle),
    "pickle .metadata beside": _put(".metadata", _pickle),
    "pickle .npy": _put(f"{NEWEST}/state.npy", _array),
    "pickle .npz": _put(f"{NEWEST}/state.npz", lambda place: _archive({"a.npy": _array(place)})),
    "pickle as pieces": with_file(_pickle),
    "pickle as pieces, torch zip": with_file(_zipped),
    "pickle as pieces, .npy": with_file(_array),
    "pickle as manifest": _put(f"{NEWEST}/{MANIFEST_NAME}", _pickle),
    "pickle as sealed manifest": lambda place: write_sealed(place.manifest, _pickle(place) + b",\n"),
    "pickle as hint": _put(HINT_NAME, _pickle),
    "pickle as lock": _put(LOCK_NAME, _pickle),
    "pickle as run.json": _put("run.json", _pickle),
    "pickle as history": _put("history.jsonl", _pickle),
    "modules": _put(f"{NEWEST}/sitecustomize.py", lambda place: f"open({str(place.canary)!r}, 'w')".encode()),
    "package": _put(f"{NEWEST}/__init__.py", lambda place: f"open({str(place.canary)!r}, 'w')".encode()),
    "auto_map": _put(
        f"{NEWEST}/tokenizer_config.json",
        lambda place: json.dumps({"auto_map": {"AutoTokenizer": ["sitecustomize.T", None]}}).encode(),
    ),
    "zip slip": _put(f"{NEWEST}/x.zip", lambda place: _archive({"../../../outside/slipped": b"x"})),
    "zip slip as pieces": with_file(lambda place: _archive({"../../../outside/slipped": b"x"})),
    # headers
    "header 2^63": with_length(2**63),
    "header 2^64 - 1": with_length(2**64 - 1),
    "header 0": with_length(0),
    "header beyond the file": with_length(10**6),
    "header of a sparse terabyte": with_file(lambda place: struct.pack("<Q", 10**12), 10**12),
    "header depth bomb": with_header_text(lambda text: b"[" * 10**6),
    "header object depth bomb": with_header_text(lambda text: b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "header no object": with_header_text(lambda text: b"[]      "),
    "header no JSON": with_header_text(lambda text: b"\x80\x02}" + bytes(61)),
    "header of lists": with_header_text(lambda text: b"[" + b"[]," * 10**7 + b"[]]"),
    "header million tensors": with_header_text(many),
    "header names twice": with_header_text(lambda text: text[:1] + b'"__metadata__":{},' + text[1:]),
    "header long metadata": with_header_text(lambda text: text[:1] + b'"m":"' + b"x" * (30 << 20) + b'",' + text[1:]),
    "header overlapping": with_header(lambda header: _entry(header).update(data_offsets=[0, 8])),
    "header negative": with_header(lambda header: _entry(header).update(data_offsets=[-8, 0])),
    "header offsets beyond": with_header(lambda header: _entry(header).update(data_offsets=[0, 2**63])),
    "header shape overflow": with_header(lambda header: _entry(header).update(shape=[2**32, 2**32])),
    "header type": with_header(lambda header: _entry(header).update(dtype="PICKLE")),
    "header name": with_header(lambda header: header.update({"../../outside/x": header.pop(next(reversed(header)))})),
    # manifests whose digests fit
    "file name ..": changing(lambda values: values["files"][0].__setitem__(0, "../../outside/secret")),
    "file name absolute": changing(lambda values: values["files"][0].__setitem__(0, "/etc/passwd")),
    "file name with NUL": changing(lambda values: values["files"][0].__setitem__(0, FILE + "\0")),
    "tensor name": changing(lambda values: values["tensors"][0].__setitem__(0, "\x1b]0;owned\x07")),
    "long tensor name": changing(lambda values: values["tensors"][0].__setitem__(0, "x" * 10**7)),
    "million tensors": changing(tables),
    "million pieces": changing(lambda values: rows(values, 10**6)),
    "million chunks": changing(chunks),
    "shape overflow": changing(shape([2**31, 2**31, 2**31])),
    "sixteen dimensions": changing(shape([2] * 16)),
    "sixty dimensions": changing(shape([1] * 60)),
    "boxes that meet": changing(overlapping_boxes),
    "huge step between files": changing(lambda values: values["pieces"][0].extend([2**61, 1])),
    "million files": changing(files),
    "runs through a million files": changing(runs),
    "index file ..": indexed(lambda values: values["indexes"][0].__setitem__(0, "../../outside/secret")),
    "index of a sparse terabyte": with_index(lambda path, place: os.truncate(path, 2**40)),
    "index link": with_index(lambda path, place: (path.unlink(), path.symlink_to(place.outside / "secret"))),
    "index FIFO": with_index(lambda path, place: (path.unlink(), os.mkfifo(path))),
    "index of lists": with_index_text(b"[" + b"[]," * (20 << 20) + b"[]]"),
    "index of depth": with_index_text(b"[" * 10**7),
    "index of a million chunks": with_index_text(
        json.dumps({"files": [[FILE, 2**40, "0" * 64, ["0" * 64] * 10**6]]}).encode()
    ),
    "index of 2^62 files": indexed(lambda values: values["indexes"][0].__setitem__(3, 2**62)),
    "missing piece": changing(lambda values: values["pieces"].pop()),
    "tiny chunks": changing(lambda values: values.update(chunk_bytes=1)),
    "huge step": changing(lambda values: values.update(step=2**62)),
    "names twice": _text(lambda text: text[:1] + b'"step": 2, "step": 2, ' + text[1:]),
    "UTF-16": _text(lambda text: text.decode().encode("utf-16")),
    "byte order mark": _text(lambda text: b"\xef\xbb\xbf" + text),
    "depth bomb": _text(lambda text: b'{"a": ' + b"[" * 10**7 + b",\n"),
    "record of lists": _record(b"[" + b"[]," * (20 << 20) + b"[]]"),
    "record of objects": _record(b'{"a": [' + b'{"a":1},' * (8 << 20) + b"{}]}"),
    "record of numbers": _record(b'{"a": [' + b"1234," * (13 << 20) + b"0]}"),
    "record of one text": _record(b'{"a": "' + b"\\ud83d\\ude00" + b"x" * (64 << 20) + b'"}'),
    "record of digits": _record(b'{"a": ' + b"9" * (64 << 20) + b"}"),
    "record of depth": _record(b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    "sparse manifest": lambda place: os.truncate(place.manifest, 2**40),
    # entries that are no files, and links that lead elsewhere
    "manifest link": replaced(f"{NEWEST}/{MANIFEST_NAME}", _link("secret")),
    "manifest link inside": replaced(f"{NEWEST}/{MANIFEST_NAME}", _older_manifest),
    "manifest FIFO": replaced(f"{NEWEST}/{MANIFEST_NAME}", lambda path, place: os.mkfifo(path)),
    "manifest directory": replaced(f"{NEWEST}/{MANIFEST_NAME}", lambda path, place: path.mkdir()),
    "manifest device": replaced(f"{NEWEST}/{MANIFEST_NAME}", _zeros),
    "manifest socket": replaced(f"{NEWEST}/{MANIFEST_NAME}", _socket),
    "pieces link": replaced(f"{NEWEST}/{FILE}", _link("secret")),
    "pieces hard link": replaced(f"{NEWEST}/{FILE}", lambda path, place: os.link(place.outside / "secret", path)),
    "pieces FIFO": replaced(f"{NEWEST}/{FILE}", lambda path, place: os.mkfifo(path)),
    "pieces directory": replaced(f"{NEWEST}/{FILE}", lambda path, place: path.mkdir()),
    "pieces device": replaced(f"{NEWEST}/{FILE}", _zeros),
    "step link": replaced(NEWEST, _link("")),
    "step link to nothing": replaced("iter_0000009", _link("nothing")),
    "step link to the root": replaced("iter_0000009", lambda path, place: path.symlink_to("/")),
    "step file": replaced("iter_0000009", lambda path, place: path.write_bytes(b"{}")),
    "step FIFO": replaced("iter_0000009", lambda path, place: os.mkfifo(path)),
    "step aside link": replaced(".old-iter_0000009-0a", _link("")),
    "step temporary link": replaced(".tmp-iter_0000009-0a", _link("")),
    "step trash link": replaced(".trash-iter_0000009-0a", _link("")),
    "hint temporary directory": replaced(".tmp-latest-0a", lambda path, place: path.mkdir()),
    "hint link": replaced(HINT_NAME, _link("secret")),
    "hint FIFO": replaced(HINT_NAME, lambda path, place: os.mkfifo(path)),
    "hint device": replaced(HINT_NAME, _zeros),
    "lock link": replaced(LOCK_NAME, _link("secret")),
    "lock FIFO": replaced(LOCK_NAME, lambda path, place: os.mkfifo(path)),
    "lock directory": replaced(LOCK_NAME, lambda path, place: path.mkdir()),
    "lock terabyte": replaced(LOCK_NAME, _terabyte),
    "run.json link": replaced("run.json", _link("secret")),
    "run.json FIFO": replaced("run.json", lambda path, place: os.mkfifo(path)),
    "run.json depth": _put("run.json", lambda place: b"[" * 60000),
    "run.json terabyte": replaced("run.json", _terabyte),
    "name with escapes": replaced("x\x1b]0;owned\x07.pt", lambda path, place: path.touch()),
    "crowd": crowd,
}  # fmt: skip
