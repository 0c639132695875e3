"""The undamaged files that fuzzing starts from, and the mutations that need to know what is in them."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import numpy as np

from campaigns.fuzzing.mutations import Files, Mutation
from megatron.data.formats.index_layout import CACHED_HEADER, CACHED_MAGIC
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import Sidecar, SourceRecord
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.data.corpora import write_sidecar
from tests.helpers.vocabulary import hard_documents, write_vocabulary

VOCAB_SIZE = 600
BOMB_BYTES = 80 << 20
_LENGTHS = (5, 0, 9, 3, 12, 7, 1, 20, 4, 8, 11, 2)
_DOCUMENTS = (0, 2, 2, 3, 7, 8, 12)


def write_undamaged(folder: Path) -> None:
    """Writes every file that a case may begin with; done once, in a separate process."""
    choice = write_vocabulary(folder, VOCAB_SIZE)
    (folder / "tokenizer.json").write_text(_tokenizer_json(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    tokenizer = build_tokenizer(choice)
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, sum(_LENGTHS)).astype(np.uint16)
    for name in ("pair", "other"):
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_batch(ids, _LENGTHS, np.diff(_DOCUMENTS))
        counts = (len(_DOCUMENTS) - 1, 1, 2, len(_LENGTHS), len(ids), True)
        record = TokenizerRecord.of(tokenizer)
        sources = (SourceRecord("a.jsonl", 1000, "0" * 16), SourceRecord("b.gz", 5, None))
        write_sidecar(folder / name, Sidecar(*counts, record, {"python": "3.11"}, sources))
    (folder / "cached.idx").write_bytes(_cached_index())
    (folder / "cached.bin").write_bytes(ids.tobytes())
    (folder / "vocab.txt").write_text(_wordpiece_vocabulary())
    groups = '"TRAIN: 0.5 0:0.5 {0}, 1.5 0.25:1 {0}" "MORE: 1 0:1 {0}"'.format(folder / "pair")
    (folder / "groups.txt").write_text(groups.split('" "')[0] + '"')
    lines = _jsonl()
    (folder / "in.jsonl").write_bytes(lines)
    for suffix, compress in compressors().items():
        half = lines.index(b"\n", len(lines) // 2) + 1
        (folder / f"one{suffix}").write_bytes(compress(lines))
        (folder / f"two{suffix}").write_bytes(compress(lines[:half]) + compress(lines[half:]))
        (folder / f"bomb{suffix}").write_bytes(compress(bytes(BOMB_BYTES)))
        (folder / f"lines{suffix}").write_bytes(compress(b'{"text": ""}\n' * (BOMB_BYTES // 1000)))
    for name, write in (("in.parquet", lambda: _parquet(lines)), ("spiece.model", _sentencepiece_model)):
        with contextlib.suppress(ImportError):  # without the package that it needs, a target is left out
            (folder / name).write_bytes(write())


def compressors() -> Mapping[str, Callable[[bytes], bytes]]:
    """The compressor of each suffix; without .zst where the zstandard package is not installed."""
    found: dict[str, Callable[[bytes], bytes]] = {
        ".gz": functools.partial(gzip.compress, compresslevel=1, mtime=0),
        ".bz2": functools.partial(bz2.compress, compresslevel=1),
        ".xz": functools.partial(lzma.compress, preset=0),
    }
    try:
        import zstandard
    except ImportError:
        return found
    return {**found, ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)}


def _jsonl() -> bytes:
    rows = [
        {"text": text, "a": {"b": f"{number} words"}, "n": number} for number, text in enumerate(hard_documents(25))
    ]
    return b"".join(json.dumps(row, ensure_ascii=row["n"] % 2 == 0).encode() + b"\n" for row in rows)


def _cached_index() -> bytes:
    lengths = np.array(_LENGTHS, "<i8")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    header = CACHED_HEADER.pack(CACHED_MAGIC, 1, 8, 2, len(lengths), len(lengths), len(_DOCUMENTS))
    tables = (np.arange(len(lengths) + 1, dtype="<i8"), offsets, lengths, np.array(_DOCUMENTS, "<i8"))
    return header + b"".join(table.tobytes() for table in tables)


def _tokenizer_json(folder: Path) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = json.loads((folder / "demo-vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (folder / "demo-merges.txt").read_text().splitlines()[1:]]
    reference = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    reference.post_processor = processors.ByteLevel(trim_offsets=False)
    reference.add_special_tokens(["<|endoftext|>"])
    return str(reference.to_str())


def _wordpiece_vocabulary() -> str:
    pieces = [letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,;!?'<>/|"]
    pieces += [f"##{piece}" for piece in pieces] + ["the", "##ing", "it", "word", "##s"]
    return "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]) + "\n"


def _sentencepiece_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(hard_documents(200)), model_writer=model, vocab_size=500, model_type="bpe",
        byte_fallback=True, num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return model.getvalue()


def _parquet(lines: bytes) -> bytes:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in lines.splitlines()]
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=10, compression="snappy")
    return sink.getvalue()


# --- lines of JSON --------------------------------------------------------------------------------

HOSTILE_LINES: Mapping[str, tuple[bytes, ...]] = {
    "NUL": (b"\x00", b"\x00" * 5000, b'{"text": "a\x00b"}', b'{"text": "a\\u0000b"}'),
    "byte order mark": (
        b'\xef\xbb\xbf{"text": "a"}', b'{"text": "\xef\xbb\xbfa"}', b"\xef\xbb\xbf", b"\xff\xfe{\x00}\x00",
    ),
    "lone surrogate": (
        b'{"text": "\\ud800"}', b'{"text": "a\\udfffb", "a": {"b": "c"}}', b'{"text": "\xed\xa0\x80"}',
        b'{"text": "\\ud83d\\ude00"}', b'{"text": "a", "a": {"b": "\\udc00"}}', b'{"\\ud800": 1, "text": "a"}',
        b'{"text": "\\uD83D\\u0041"}',
    ),
    "not UTF-8": (
        b"\xff", b'{"text": "\xff"}', b'{"text": "\xc0\xaf"}', b'{"text": "\xf4\x90\x80\x80"}', b'{"text": "\xe9"}',
    ),
    "deep nesting": (
        b"[" * 100000, b"[" * 100000 + b"]" * 100000, b'{"text": "a", "b": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"a":' * 100000 + b"1" + b"}" * 100000, b'{"text":' * 5000 + b'"a"' + b"}" * 5000, b'{"b": ' + b"[" * 900,
    ),
    "duplicate keys": (b'{"text": "a", "text": "b"}', b'{"text": 1, "text": "b"}', b'{"text": "a", "text": null}'),
    "null and other kinds": (
        b"null", b"true", b"1", b'"text"', b"[]", b"{}", b'{"text": null}', b'{"text": ["a"]}', b'{"text": {"b": "c"}}',
        b'{"text": 1.5}', b'{"a": "text"}', b'{"TEXT": "a"}', b'{"a.b": "c", "text": "d"}', b'{"a": {"b": {"c": 1}}}',
    ),
    "huge numbers": (
        b'{"text": "a", "n": ' + b"9" * 400 + b"}", b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"text": "a", "n": 1e999}', b'{"text": "a", "n": NaN}', b'{"text": "a", "n": -Infinity}', b"9" * 100000,
        b'{"text": "a", "n": 18446744073709551616}', b'{"text": "a", "n": 1e-999999999999}',
    ),
    "not JSON": (
        b"{", b'{"text": "a"', b'{"text": "a"}}', b"{'text': 'a'}", b'{"text": "a",}', b'{"text": "\t"}',
        b'{"text": "\\x"}', b'{"text": "a"} {"text": "b"}', b"//", b"text", b'{"text": "\\ud8', b'{"text": "',
        b'{"text": "\\', b"\x1f\x8b\x08",
    ),
    "blank lines": (b"", b" ", b"\t", b"\x0b", b"\r", b"\n\n\n", b"\xc2\xa0", b"\xe2\x80\xa8"),
    "long line": (
        b'{"text": "' + b"long " * 200000 + b'"}', b'{"text": "' + b"x" * 300000, b" " * 1000000,
        b'{"text": "a"}' + b" " * 500000,
        b'{"text": "a", "b": [' + b"[]," * 100000 + b"[]]}", b'"' * 500000, b"\\" * 500000, b"{" * 1000,
    ),
}  # fmt: skip


def hostile_line(lines: tuple[bytes, ...]) -> Mutation:
    """A mutation that puts one of the lines between the good ones, at their end, or in the place of all."""

    def mutate(draw: Random, files: Files) -> Files:
        (name, data), line = next(iter(files.items())), draw.choice(lines)
        rows = data.split(b"\n")[:-1]
        place = draw.choice((0, draw.randrange(len(rows)), len(rows)))
        rows = draw.choice(([*rows[:place], line, *rows[place:]], [*rows[:place], line, *rows[place:]], [line]))
        return {name: b"\n".join(rows) + draw.choice((b"", b"\n"))}

    return mutate


def other_ends_of_lines(draw: Random, files: Files) -> Files:
    """Lines end as other systems end them, or some do not end."""
    name, data = next(iter(files.items()))
    at = data.index(b"\n", draw.randrange(len(data)))
    return {
        name: draw.choice(
            (
                data.replace(b"\n", b"\r\n"), data.replace(b"\n", b"\r"), data.replace(b"\n", b"\n\r"), data[:-1],
                data.replace(b"\n", b"\n\n"), data[:at] + data[at + 1 :], data.replace(b"\n", b""),
                b"\xef\xbb\xbf" + data,
            )
        )
    }  # fmt: skip


LINES: Mapping[str, Mutation] = {
    **{kind: hostile_line(lines) for kind, lines in HOSTILE_LINES.items()},
    "ends of lines": other_ends_of_lines,
}
