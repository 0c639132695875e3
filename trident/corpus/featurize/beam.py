"""Featurizing as an Apache Beam pipeline: each element is a shard, written by one worker from its share of the inputs.

The shares equal `--shard i/n`: all shards in order hold the rows of the default runner in its order, whatever order
Beam works in; only the boundaries between shards differ. Workers must have access to the inputs and the output: a local
or shared file system, or addresses such as gs://bucket/file supported by Beam.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.formats.parquet_windows import WindowFacts, Windows
from megatron.data.formats.window_names import is_shard_of, shard_name
from megatron.errors import ConfigError, DataError, MegatronError, StorageError
from megatron.files.failures import storage_error
from megatron.files.replacing import check_writable, move, temporary_name
from megatron.secret_text import SecretText
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice
from trident.corpus.featurize.featurize_corpus import FeaturizeResult, WindowOptions, cutting_for_text
from trident.corpus.featurize.shards import prepare_folder, publish
from trident.corpus.featurize.window_cutting import Cutting, Numbers, Tally, cut, documents_of, regrouped, tally
from trident.corpus.featurize.window_writer import WindowWriter
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.input_blocks import blocks, check_inputs
from trident.corpus.inputs.input_paths import STANDARD_INPUT, InputPart, Shard, share_of
from trident.corpus.inputs.tables import is_table, open_table
from trident.corpus.preprocess.encode import BlockEncoder, EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import BLOCK_BYTES

SHARD_TEXT_BYTES = 64 << 20
_NOMINAL_ROW_BYTES = 1 << 10  # of a table of unknown size
_NAMESPACE = "megatron.featurize"
_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, StorageError)
_FAILURE = re.compile(r"(?:megatron\.errors\.)(\w+): (.*?)(?: \[while running|\n\n|\Z)", re.DOTALL)


def featurize_with_beam(
    inputs: Sequence[str],
    output_path: str,
    encoding: EncodeOptions,
    options: WindowOptions,
    beam_flags: Sequence[str],
    make: Callable[[str, str, str], None],
) -> FeaturizeResult:
    """Converts texts to windows in a Beam pipeline.

    Args:
        inputs: files, tables (see `tables.py`) that every worker opens, and addresses of files.
        beam_flags: Beam's command-line flags.
        make: calls `make_shard` with its first and third argument, in a worker that may lack this package in its path;
            the second is its folder.

    Raises:
        ConfigError: Beam is missing or rejects a flag; or as `featurize`.
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the outputs cannot be written.
    """
    _refuse_passwords(inputs)
    beam = _beam(beam_flags)
    pipeline_options = _pipeline_options(beam_flags)
    cutting = cutting_for_text(encoding, options)
    works = list(_works(inputs, encoding, options.num_shards))
    shards = len(works)
    finals = [shard_name(output_path, number, shards) for number in range(shards)]
    temporaries = [_temporary(path) for path in finals]
    if not _is_address(output_path):
        check_writable(Path(finals[0]))
        prepare_folder(output_path)
    job = json.dumps({"encoding": asdict(encoding), "cutting": asdict(cutting)})
    elements = [json.dumps({"path": path, **work}) for path, work in zip(temporaries, works, strict=True)]
    folder = str(Path(__file__).resolve().parents[2])
    try:
        pipeline = beam.Pipeline(options=pipeline_options)
        _ = (
            pipeline
            | "Shards" >> beam.Create(elements)
            | "Divide among workers" >> beam.Reshuffle()
            | "Make windows" >> beam.Map(make, folder, job)
        )
        result = pipeline.run()
        result.wait_until_finish()
        counts = {counter.key.metric.name: int(counter.result) for counter in result.metrics().query()["counters"]}
        _publish(output_path, temporaries, finals)
    except Exception as failure:
        raise _original_error(failure) from failure
    finally:
        _remove(temporaries)
    total = Tally(**{field.name: counts.get(field.name, 0) for field in fields(Tally)})
    return FeaturizeResult(tuple(finals), total, counts.get("empty", 0), counts.get("skipped", 0))


def _refuse_passwords(inputs: Sequence[str]) -> None:
    """Rejects an address with a password, which would become part of the job.

    Raises:
        ConfigError: an address has one.
    """
    secret = [path for path in inputs if isinstance(path, SecretText)]
    if secret:
        raise ConfigError(
            f"--input {secret[0]} cannot be passed to Beam: its password would be part of the job, which Beam's "
            "services record. Use a configuration file that the workers can read (db.json), or --runner local."
        )


def make_shard(element: str, job: str) -> None:
    """Runs one element in a worker: reads its share of the inputs and writes its shard under a temporary name.

    Raises:
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the shard cannot be written.
    """
    described = json.loads(element)
    encoder, cutting = _worker_tools(job)
    path = described["path"]
    counts: dict[str, int] = {"empty": 0, "skipped": 0, **asdict(Tally())}
    groups = _window_groups(encoder, cutting, described, counts)
    unfinished = f"{path}.{secrets.token_hex(4)}"  # another attempt at the same shard may be running
    try:
        with _create(unfinished) as stream, WindowWriter(stream, path, cutting.facts) as writer:
            for windows, offsets in regrouped(groups, cutting.rows_at_once):
                writer.write(windows, offsets)
        _rename(unfinished, path)
    except OSError as failure:
        raise storage_error(Path(path), failure) from failure
    finally:
        _remove([unfinished])
    metrics = _beam().metrics.Metrics
    for name, count in counts.items():
        metrics.counter(_NAMESPACE, name).inc(count)


def _window_groups(
    encoder: BlockEncoder, cutting: Cutting, described: dict[str, Any], counts: dict[str, int]
) -> Iterator[tuple[Windows, Numbers]]:
    """Yields and counts the windows of an element's documents."""
    options = encoder.options
    total = Tally()
    for block in _blocks(described, options):
        encoded = encoder.encode(block)
        if encoded.bad and not options.skip_bad_lines:
            bad = encoded.bad[0]
            raise DataError(
                f"{block.source}: byte offset {block.start + bad.offset}: {bad.reason}. Fix the line, or skip such "
                "lines with --on-bad-line skip."
            )
        counts["empty"] += encoded.documents - encoded.keys[0].documents
        counts["skipped"] += encoded.bad_count
        ids, lengths = encoded.keys[0].ids, encoded.keys[0].lengths
        if ids is not None:
            documents = documents_of(cutting.facts, lengths, _slices(ids), block.source)
            total += tally(cutting, documents.lengths)
            counts["empty"] += len(lengths) - int(np.count_nonzero(documents.lengths))
            yield from cut(cutting, documents)
    counts.update(asdict(total))


def _blocks(described: dict[str, Any], options: EncodeOptions) -> Iterator[InputBlock]:
    for path, start, stop in described["parts"]:
        with tempfile.TemporaryDirectory() as folder:
            local = InputPart(_fetched(path, folder), start, stop)
            for block in blocks([local], BLOCK_BYTES, options.document_separator, options.keys):
                yield replace(block, data=block.read(), source=path) if local.path != path else block


def _slices(tokens: np.ndarray) -> Callable[[int, int], np.ndarray]:
    return lambda start, stop: tokens[start:stop]


@cache
def _worker_tools(job: str) -> tuple[BlockEncoder, Cutting]:
    """Creates the encoder and the cutting of a job, once in each worker."""
    described = json.loads(job)
    encoding, cutting = described["encoding"], described["cutting"]
    tokenizer = TokenizerChoice(**encoding.pop("tokenizer"))
    keys = tuple(encoding.pop("keys"))
    facts = cutting.pop("facts")
    record = TokenizerRecord.from_json(facts.pop("tokenizer"))
    encoder = BlockEncoder(EncodeOptions(tokenizer, keys, **encoding))
    return encoder, Cutting(WindowFacts(**facts, tokenizer=record), **cutting)


def _sizes(inputs: Sequence[str], encoding: EncodeOptions) -> list[int]:
    """Returns the size of every input in bytes.

    Raises:
        ConfigError: an input does not exist, or is standard input.
    """
    if STANDARD_INPUT in inputs:
        raise ConfigError("--input - (standard input) cannot be read by Beam's workers. Use files, or --runner local.")
    check_inputs([path for path in inputs if not _is_address(path)], encoding.keys)
    return [_size(path) for path in inputs]


def _size(path: str) -> int:
    if _is_address(path):
        return _address_size(path)
    if not is_table(path):
        return os.path.getsize(path)
    table = open_table(path)
    return table.size_bytes(0, None) or table.rows * _NOMINAL_ROW_BYTES


def _works(inputs: Sequence[str], encoding: EncodeOptions, shards: int | None) -> Iterator[dict[str, Any]]:
    """Yields the inputs of each shard.

    Raises:
        ConfigError: an input does not exist, or is standard input.
    """
    sizes = _sizes(inputs, encoding)
    shards = shards or max(1, math.ceil(sum(sizes) / SHARD_TEXT_BYTES))
    offsets = np.cumsum(sizes) - np.array(sizes)
    for number in range(1, shards + 1):
        shard = Shard(number, shards)
        if any(map(_is_address, inputs)):  # whole files belong to the shard in whose range they begin
            first, last = shard.of_total(max(1, sum(sizes)))
            parts = [InputPart(path) for path, offset in zip(inputs, offsets, strict=True) if first <= offset < last]
        else:
            parts = list(share_of(inputs, shard, encoding.document_separator))
        yield {"parts": [astuple(part) for part in parts]}


def _pipeline_options(flags: Sequence[str]) -> Any:
    """Parses Beam's flags.

    Raises:
        ConfigError: an unknown flag.
    """
    module = _beam().options.pipeline_options
    options = module.PipelineOptions(list(flags))
    parsers: list[Any] = []
    options.get_all_options(add_extra_args_fn=parsers.append)
    unknown = [flag for flag in parsers[0].parse_known_args(list(flags))[1] if flag.startswith("-")]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: neither this program nor Apache Beam has such a flag. See --help.")
    return options


def _original_error(failure: Exception) -> Exception:
    """Extracts the worker's error from the runner's report."""
    if isinstance(failure, MegatronError):
        return type(failure)(str(failure).partition(" [while running")[0])
    failures = _FAILURE.findall(str(failure))
    for kind, text in reversed(failures):
        for known in _KINDS:
            if known.__name__ == kind:
                return known(text.strip())
    return failure


def _beam(flags: Sequence[str] = ()) -> Any:
    """Imports Apache Beam with all required modules."""
    try:
        import apache_beam
        import apache_beam.io.filesystems
        import apache_beam.metrics
        import apache_beam.options.pipeline_options
    except ImportError as failure:
        given = " ".join(flag for flag in flags if flag.startswith("-"))
        raise ConfigError(
            f"--runner and Beam's options{f' ({given})' if given else ''} require the apache-beam package: pip install "
            "apache-beam. Without them local processes do the work (--num-workers)."
        ) from failure
    return apache_beam


# --- files, here or at an address -----------------------------------------------------------------


def _is_address(path: str) -> bool:
    return "://" in path and not is_table(path)


def _file_systems() -> Any:
    return _beam().io.filesystems.FileSystems


def _temporary(path: str) -> str:
    """Returns a name next to a file that no pattern for shards matches."""
    if not _is_address(path):
        return str(temporary_name(Path(path)))
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"


def _address_size(path: str) -> int:
    """Returns the size of a file at an address.

    Raises:
        ConfigError: Beam finds no such file.
    """
    try:
        files = _file_systems().match([path])[0].metadata_list
    except Exception as failure:
        raise ConfigError(f"--input {path}: Beam cannot look it up ({failure}).") from failure
    if len(files) != 1:
        raise ConfigError(f"--input {path} matches {len(files)} files, expected 1.")
    return int(files[0].size_in_bytes)


def _fetched(path: str, folder: str) -> str:
    """Returns a local copy of a file at an address; local paths are returned unchanged."""
    if not _is_address(path):
        return path
    local = os.path.join(folder, path.rpartition("/")[2])
    with _file_systems().open(path, compression_type="uncompressed") as source, open(local, "wb") as copy:
        shutil.copyfileobj(source, copy)
    return local


def _create(path: str) -> Any:
    return _file_systems().create(path, compression_type="uncompressed") if _is_address(path) else open(path, "xb")


def _rename(old: str, new: str) -> None:
    if _is_address(new):
        _file_systems().rename([old], [new])
        return
    move(Path(old), Path(new))


def _publish(output_path: str, temporaries: Sequence[str], finals: Sequence[str]) -> None:
    if not _is_address(output_path):
        publish(output_path, [(Path(old), Path(new)) for old, new in zip(temporaries, finals, strict=True)])
        return
    systems = _file_systems()
    existing = [metadata.path for metadata in systems.match([f"{output_path}-*"])[0].metadata_list]
    older = [path for path in existing if is_shard_of(output_path, path)]
    if older:
        systems.delete(older)
    systems.rename(list(temporaries), list(finals))


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        if not _is_address(path):
            Path(path).unlink(missing_ok=True)
        elif _file_systems().exists(path):
            _file_systems().delete([path])
