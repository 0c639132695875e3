"""Fuzzes every kind of file that the data side reads: its mutations, and the readers that must refuse damage.

A target's `read` returns if it accepts the files and the result obeys the rules. It raises a `MegatronError` if it
refuses them, and `Broken` if it accepts something that violates a rule.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from campaigns.campaign import Plan, Result
from campaigns.fuzzing.fuzzer import Kit, fuzz
from campaigns.fuzzing.mutations import ANY_FILE, INDEX, JSON, Files
from campaigns.fuzzing.target import Broken, Target, check
from campaigns.fuzzing.undamaged_files import LINES, VOCAB_SIZE, compressors, write_undamaged
from campaigns.fuzzing.windows_and_stores import (
    check_ids,
    read_store,
    read_windows,
    train,
    write_store,
    write_windows,
)
from megatron.config import DataConfig
from megatron.config.files.flag_files import read_group_files
from megatron.data.build import build_split_datasets
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import check_tokenizer_fits, read_sidecar
from megatron.data.order.index_cache import IndexCache
from megatron.data.sources.source import DataRequest
from megatron.errors import ConfigError, MegatronError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tools.corpus.examination import examine, report, sample_documents
from trident.corpus.preprocess import encode as encode_module
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.merge import merge
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers.progress_line import ProgressLine

# --- token files ----------------------------------------------------------------------------------


def _read_pair(folder: Path, undamaged: Path, draw: Random) -> None:
    prefix = str(
        folder / ("cached" if (folder / "cached.idx").exists() or (folder / "cached.bin").exists() else "pair")
    )
    draw.choice((_read_all, _read_as_training, _read_as_check, _read_as_merge))(prefix, folder, undamaged)


def _read_all(prefix: str, folder: Path, undamaged: Path) -> None:
    dataset = IndexedDataset(prefix)
    total = 0
    for sequence in range(len(dataset)):
        ids = dataset[sequence]
        check(len(ids) == int(dataset.lengths[sequence]), f"sequence {sequence} has {len(ids)} tokens")
        total += ids.nbytes
    check(total == Path(prefix + ".bin").stat().st_size, f"{total} bytes were read of another number")
    check(bool((np.diff(dataset.documents) >= 0).all()), "documents go backwards")
    check(len(dataset.fingerprint) == 64, "no fingerprint")


def _read_as_training(prefix: str, folder: Path, undamaged: Path) -> None:
    train(prefix, folder / "cache")


def _read_as_check(prefix: str, folder: Path, undamaged: Path) -> None:
    found = examine(prefix, VOCAB_SIZE)
    check(bool(report(found)), "no report")
    dataset = IndexedDataset(prefix)
    for _, ids in sample_documents(dataset, 3):
        check(found.out_of_range > 0 or ids.dtype.kind == "f" or not len(ids) or ids.max() < VOCAB_SIZE, "id accepted")
    sizes = [len(dataset[sequence]) for sequence in range(len(dataset))]
    check(found.tokens == sum(sizes), "the tokens are not those of the sequences")


def _read_as_merge(prefix: str, folder: Path, undamaged: Path) -> None:
    plan = merge([str(undamaged / "other"), prefix], str(folder / "merged"))
    dataset = IndexedDataset(folder / "merged")
    check(dataset.tokens == plan.index.tokens, "the merged file has another number of tokens")
    check(sorted(path.name for path in folder.glob(".*.tmp")) == [], "a temporary file stayed")


def _read_described(folder: Path, undamaged: Path, draw: Random) -> None:
    """The same, and its sidecar."""
    prefix = str(folder / "pair")
    sidecar = read_sidecar(prefix)
    check_tokenizer_fits([prefix], _good_tokenizer(str(undamaged)))
    if sidecar is not None:
        check(all(type(count) is int for count in sidecar.counts), "a sidecar without counts")
    draw.choice((_read_as_check, _read_as_merge))(prefix, folder, undamaged)


# --- index caches ---------------------------------------------------------------------------------


def _cache_truth() -> dict[str, np.ndarray]:
    return {"document": np.arange(40, dtype=np.int32), "sample": np.arange(60, dtype=np.int64).reshape(30, 2)}


def _write(undamaged: Path) -> None:
    """Writes the undamaged files and what is derived from them: windows, a store, and two index caches."""
    write_undamaged(undamaged)
    write_windows(undamaged)
    write_store(undamaged)
    IndexCache(undamaged / "cache").arrays("gpt", {"seed": 1, "weights": [0.5, 1.0]}, _cache_truth)
    train(str(undamaged / "pair"), undamaged / "training-cache")


def _read_cache(folder: Path, undamaged: Path, draw: Random) -> None:
    """Whatever the files contain, the arrays are correct: damage is detected and the entry is rebuilt."""
    builds = draw.random() < 0.7
    found = IndexCache(folder, build=builds, required=True).arrays(
        "gpt", {"seed": 1, "weights": [0.5, 1.0]}, _cache_truth
    )
    for name, array in _cache_truth().items():
        check(name in found and np.array_equal(found[name], array), f"{name} is wrong")
        check(found[name].dtype == array.dtype, f"{name} has another type")
    if builds:
        again = IndexCache(folder, build=False).arrays("gpt", {"seed": 1, "weights": [0.5, 1.0]}, _no_build)
        check(np.array_equal(again["sample"], found["sample"]), "what was built again cannot be read")


def _read_forged_cache(folder: Path, undamaged: Path, draw: Random) -> None:
    """Foreign arrays with a matching description: rejected, or samples of the corpus."""
    train(str(undamaged / "pair"), folder)


def _no_build() -> dict[str, np.ndarray]:
    raise Broken("the entry was built again and is still damaged")


def believable(draw: Random, files: Files) -> Files:
    """An array of a cache is replaced and its description gets the new size and checksum."""
    name = draw.choice([name for name in sorted(files) if name.endswith(".npy")])
    described = next(name for name in files if name.endswith(".json"))
    data = bytearray(files[name])
    at = draw.randrange(min(len(data), 128)) if draw.random() < 0.7 else draw.randrange(len(data))
    hostile = (b"(4611686018427387904, 2)", b"(-1, 2)", b"(0,)", b"'|O'", b"'<f8'", b"'|V8'", b"True", b"\xff", b"")
    data[at : at + draw.choice((1, 4, 20))] = draw.choice(hostile)
    record = json.loads(files[described])
    key = next(key for key in record["files"] if name.endswith(f"-{key}.npy"))
    record["files"][key] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    record.pop("crc32")
    record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    return {**files, name: bytes(data), described: json.dumps(record).encode()}


# --- text -----------------------------------------------------------------------------------------


@functools.cache
def _good_tokenizer(undamaged: str) -> Any:
    return build_tokenizer(_choice(undamaged))


def _choice(undamaged: str) -> TokenizerChoice:
    return TokenizerChoice("GPT2BPETokenizer", f"{undamaged}/demo-vocab.json", f"{undamaged}/demo-merges.txt")


def _load(undamaged: Path) -> None:
    tokenizer = _good_tokenizer(str(undamaged))
    encode_module.build_tokenizer = lambda flags, known_library=None: tokenizer


def _read_text(folder: Path, undamaged: Path, draw: Random) -> None:
    path = next(folder.iterdir())
    keys = draw.choice((("text",), ("text",), ("text", "a.b")))
    skip, eod = draw.random() < 0.6, draw.random() < 0.5
    options = EncodeOptions(_choice(str(undamaged)), keys, eod, skip)
    quiet = ProgressLine(None, 1, lambda text: None)
    try:
        result = preprocess((str(path),), str(folder / "out"), options, 1, quiet, draw.choice((100, 5000, 1 << 20)))
    except MegatronError:
        check([entry.name for entry in folder.iterdir()] == [path.name], "a refused input left files")
        raise
    expected = _expected_texts(path, keys)
    tokenizer = _good_tokenizer(str(undamaged))
    for key, prefix, wanted in zip(keys, result.prefixes, expected, strict=True):
        dataset = IndexedDataset(prefix)
        rows = [dataset[sequence] for sequence in range(len(dataset))]
        check_ids(np.concatenate(rows) if rows else np.empty(0), f"key {key}")
        texts = [tokenizer.decode(row[: len(row) - eod].tolist()) for row in rows]
        check(
            texts == [text for text in wanted if text],
            f"key {key}: {len(texts)} documents differ from those of the input",
        )
        sidecar = read_sidecar(prefix)
        check(sidecar is not None and sidecar.tokens == dataset.tokens, "the sidecar describes other tokens")


def _expected_texts(path: Path, keys: tuple[str, ...]) -> list[list[str]]:
    """The texts that an independent line-by-line reader finds in the input."""
    if path.suffix == ".parquet":
        import pyarrow.compute
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path, columns=sorted({key.split(".")[0] for key in keys}), use_threads=False)
        columns = [
            table.column("text"),
            *([pyarrow.compute.struct_field(table.column("a"), "b")] if "a.b" in keys else []),
        ]
        rows = [list(row) for row in zip(*([_python_value(one) for one in column] for column in columns), strict=True)]
    else:
        data = _decompressed(path)
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        rows = [_line_values(line, keys) for line in (lines if lines[-1] else lines[:-1])]
    good = [row for row in rows if all(isinstance(text, str) and _is_text(text) for text in row)]
    return [[row[place] for row in good] for place in range(len(keys))]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _line_values(line: bytes, keys: tuple[str, ...]) -> list[Any]:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        try:
            import orjson

            entry = orjson.loads(line)
        except (ValueError, ImportError):
            return [None for _ in keys]
    return [_value(entry, key) for key in keys]


def _value(entry: Any, key: str) -> Any:
    if isinstance(entry, dict) and key in entry:
        return entry[key]
    for name in key.split("."):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry


def _is_text(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


def _decompressed(path: Path) -> bytes:
    """All of a file, member by member; a member that does not end is no member."""
    import bz2
    import lzma

    import zstandard

    makers: dict[str, Callable[[], Any]] = {
        ".gz": lambda: zlib.decompressobj(31),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
        ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    }
    data = path.read_bytes()
    if path.suffix not in makers:
        return data
    check(bool(data), f"{path.name} is empty, which no {path.suffix} file is, and was accepted")
    parts = []
    while data.strip(b"\x00") and not data.startswith(b"\x50\x2a\x4d\x18"):
        decompressor = makers[path.suffix]()
        try:
            parts.append(decompressor.decompress(data))
        except Exception as failure:
            raise Broken(f"damage in {path.name} was accepted: {failure}") from failure
        check(decompressor.eof, f"{path.name} ends early and was accepted")
        data = decompressor.unused_data.lstrip(b"\x00")
    return b"".join(parts)


# --- tokenizers and blends ------------------------------------------------------------------------


def _read_gpt2(folder: Path, undamaged: Path, draw: Random) -> None:
    _use(build_tokenizer(_choice(str(folder))))


def _read_hugging_face(folder: Path, undamaged: Path, draw: Random) -> None:
    _use(build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(folder / "tokenizer.json"))))


def _read_wordpiece(folder: Path, undamaged: Path, draw: Random) -> None:
    _use(build_tokenizer(TokenizerChoice("BertWordPieceLowerCase", str(folder / "vocab.txt"))))


def _read_sentencepiece(folder: Path, undamaged: Path, draw: Random) -> None:
    _use(
        build_tokenizer(TokenizerChoice("SentencePieceTokenizer", tokenizer_name_or_path=str(folder / "spiece.model")))
    )


def _use(tokenizer: Any) -> None:
    texts = hard_documents(10)
    ids, lengths = tokenizer.encode_flat(texts)
    check(len(lengths) == len(texts) and int(lengths.sum()) == len(ids), "lengths do not sum to the ids")
    check(not len(ids) or int(ids.max()) < tokenizer.vocab_size, f"id {ids.max() if len(ids) else 0} is no id")
    check(len(tokenizer.fingerprint) == 64, "no fingerprint")
    tokenizer.decode(ids[:200].tolist())
    try:
        check(0 <= tokenizer.eod_id < tokenizer.vocab_size, f"end of document {tokenizer.eod_id} is no id")
    except ConfigError:  # it has none, and the error names it
        return


def _read_blend(folder: Path, undamaged: Path, draw: Random) -> None:
    path = folder / "groups.txt"
    values, problems = read_group_files({"data.train_weighted_split_paths_path": str(path)})
    if problems:
        raise ConfigError(problems)
    data = DataConfig(
        seq_length=4,
        train_weighted_split_paths=values["data.train_weighted_split_paths"],
        data_cache_path=str(folder / "cache"),
    )
    problems = list(data.problems())
    if problems:
        raise ConfigError(problems)
    datasets, plan = build_split_datasets(DataRequest(data, 4, 1234, (50, 0, 0)))
    check(datasets.train is not None and plan.train is not None, "no data")
    check(len(datasets.train) >= 50, "too few samples")  # type: ignore[arg-type]
    check_ids(datasets.train[49], "sample")  # type: ignore[index]


def hostile_words(draw: Random, files: Files) -> Files:
    """A word of a blend is replaced, doubled or left out."""
    ((name, data),) = files.items()
    words = data.decode().split(" ")
    hostile = (
        "1e999", "-1", "0", "nan", "1e-320", "0:1", "1:0", "0:2", "-0:0.5", "nan:1", ":", "0.5:0.5", ",", ":",
        '"', "\x00", "/nowhere/x", ".", "é", "1e308", "0x10", "١", "1_0", "", "\n", "x" * 70000, '" "', "0:1e-9",
        "pair,", "TRAIN:",
    )  # fmt: skip
    place = draw.randrange(len(words))
    words[place : place + draw.choice((0, 1, 1, 1))] = draw.choice(([draw.choice(hostile)], [words[place]] * 2, []))
    return {name: " ".join(words).encode()}


_ONE_FILE = {name: mutation for name, mutation in ANY_FILE.items() if name != "missing file"}
_CUT_OR_SWAPPED = {name: ANY_FILE[name] for name in ("truncation", "swapped files")}
_AS_IT_IS = {"as it is": lambda draw, files: files, "truncation": ANY_FILE["truncation"]}
_PAIR_PLACE = (
    r"byte offset \d+|:\d+|line \d+|\d+ bytes|does not exist|has id|No tokens are left|holds float|different widths"
)
_TEXT_PLACE = r"byte offset \d+|cannot be read"
_TREES = {**ANY_FILE, **JSON}
_PACKED = tuple(compressors())
_BOMBS = tuple((f"{kind}{suffix}",) for kind in ("bomb", "lines") for suffix in _PACKED)

TARGETS: tuple[Target, ...] = (
    Target("MMIDIDX", (("pair.bin", "pair.idx"),), {**ANY_FILE, **INDEX}, _read_pair, _PAIR_PLACE, 4),
    Target("TNTIDX", (("cached.bin", "cached.idx"),), {**ANY_FILE, **INDEX}, _read_pair, _PAIR_PLACE, 3),
    Target("sidecar", (("pair.bin", "pair.idx", "pair.json"),), {**JSON, **_CUT_OR_SWAPPED}, _read_described, share=2),
    Target("index cache", (("cache",),), {**ANY_FILE, **JSON}, _read_cache, share=1.5),
    Target("forged index cache", (("training-cache",),), {"believable array": believable}, _read_forged_cache),
    Target("jsonl", (("in.jsonl",),), {**_ONE_FILE, **LINES}, _read_text, _TEXT_PLACE, 6),
    *(
        Target(f"jsonl{suffix}", ((f"one{suffix}",), (f"two{suffix}",)), _ONE_FILE, _read_text, _TEXT_PLACE)
        for suffix in _PACKED
    ),
    Target("compression bomb", _BOMBS, _AS_IT_IS, _read_text, _TEXT_PLACE, 0.15),
    Target("Parquet", (("in.parquet",),), _ONE_FILE, _read_text, share=1.5),
    Target("vocab.json, merges.txt", (("demo-merges.txt", "demo-vocab.json"),), _TREES, _read_gpt2, share=0.5),
    Target("tokenizer.json", (("tokenizer.json", "tokenizer_config.json"),), _TREES, _read_hugging_face, share=0.5),
    Target("vocab.txt", (("vocab.txt",),), _ONE_FILE, _read_wordpiece, share=0.3),
    Target("SentencePiece model", (("spiece.model",),), _ONE_FILE, _read_sentencepiece, share=0.3),
    Target("windows", (("windows.parquet",),), _ONE_FILE, read_windows),
    Target("SQLite store", (("store.db",),), ANY_FILE, read_store),
    Target("blend file", (("groups.txt",),), {**ANY_FILE, "words": hostile_words}, _read_blend, "", 1.5, 300_000),
)


def run_cases(plan: Plan) -> Iterator[Result]:
    """Fuzzes the files of the data side."""
    return fuzz(Kit(TARGETS, _write, _load), plan)
