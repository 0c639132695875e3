"""Fuzzes what a resume and the tools do with the manifest of a checkpoint, its digest computed anew after every change.

    python -m campaigns.run manifests --cases 100000 --seed 1 --jobs 2

A digest shows damage, not malice: whoever writes the manifest writes its digest, too. So every value of the record and
of the tables may be anything. It is refused by an error of the project, or what is made of it is right; no text of it
reaches the terminal unescaped. The limits of time and memory are in `fuzzer.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from campaigns.campaign import Plan, Result
from campaigns.fuzzing.fuzzer import Kit, fuzz
from campaigns.fuzzing.mutations import HOSTILE_JSON, JSON, Files
from campaigns.fuzzing.target import Target, check
from campaigns.fuzzing.windows_and_stores import check_ids
from megatron import log
from megatron.checkpoint import SaveOptions, load_newest, newest_record, read_tensors, save
from megatron.checkpoint.record import Progress, Record
from megatron.checkpoint.recovery import OpenCheckpoint, only_of_run
from megatron.config import Machine, RunConfig, TokenizerFacts, check_resume, parse, resolve
from megatron.config.program_flags import with_overrides
from megatron.config.schedule import is_done, learning_rate, planned_samples
from megatron.data.build import build_split_datasets, data_fingerprint, describe
from megatron.data.loader import BatchOptions, MicroBatches
from megatron.data.sources.source import DataRequest
from megatron.errors import CheckpointError, MegatronError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron.train.restarts.identity import RunIdentity
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.versions import sealed
from tests.helpers.tiny_run import VOCAB_SIZE, TinyCorpus, write_tiny_corpus
from tools.runs.sample_order import SampleOrder, samples_of_steps
from trident.checkpoints.summary import summarize, summary_lines

MESH = ParallelMesh.single()
STEP, BATCH = 3, 4
SHAPES: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (5,)}
STATE = make_state(SHAPES)
HOSTILE_VALUES = (
    *HOSTILE_JSON, "2147483647", "4294967296", "9007199254740993", "4611686018427387904", "1e308", "-1e308", "1e-320",
    "0.5", "false", "2", "3", "7", "64", "1000000", "-2", '"\\u001b]0;owned\\u0007"', '"\\u001b[2J\\n"', '"\\u202e"',
    '"../../../etc/passwd"', '"/etc/passwd"', '"mongodb://user:secret@host/x"', '"a\\u0000b"',
    '"bigscience"', '"nvidia"', '"auto"', '"none"', '"rope"', '"' + "a," * 30000 + '"',
    '{"__class__": "os.system"}', '[["x"]]', "[0, 0, 0]",
    "[1, 1, 4611686018427387904]", "[" + "0," * 100000 + "0]", "[" + "[]," * 2000000 + "[]]",
    "[" + '{"a": 1},' * 300000 + "{}]", '{"a": [' * 20 + "]}" * 20,
)  # fmt: skip

Mutation = Callable[[Random, Files], Files]
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Rig(NamedTuple):
    """The settings of a resumed run."""

    config: RunConfig
    tokenizer: Tokenizer


def write_checkpoint(undamaged: Path) -> None:
    """Writes a corpus and a checkpoint as a run leaves it after three steps."""
    write_tiny_corpus(undamaged, documents=20)
    rig = _rig(str(undamaged))
    config = rig.config
    wanted = planned_samples(config.optim, config.evaluation, ranges=config.safety.skip_ranges)
    _, plan = build_split_datasets(DataRequest(config.data, config.data.seq_length, config.random.seed, wanted))
    record = Record(
        progress=Progress(STEP, STEP * BATCH, STEP * BATCH * config.data.seq_length),
        optimizer_updates=STEP,
        loss_scale={"cur_scale": 65536.0, "cur_iter": 3, "last_overflow_iter": -1},
        config=config.to_json(),
        data_plan=plan,
        data=data_fingerprint(config.data),
        tokenizer=TokenizerRecord.of(rig.tokenizer),
        program_version="0.1",
        run_id="0123456789abcdef",
        finetuned_from={"run_id": "0" * 16, "step": 9, "fingerprint": "a" * 64},
        validation_loss=2.5,
        recent={"loss": [2.5, 2.25]},
        passed_batches=({"step": 2, "first_sample": 4, "last_sample": 7},),
    )
    path = save(undamaged, STEP, whole_sink(STATE).expected, record.to_json(), MESH, SaveOptions(chunk_bytes=1024))
    path.rename(undamaged / "checkpoint")


@functools.cache
def _rig(undamaged: str) -> Rig:
    folder = Path(undamaged)
    corpus = TinyCorpus(
        folder, str(folder / "tiny_text_document"), str(folder / "demo-vocab.json"), str(folder / "demo-merges.txt")
    )
    flags = corpus.flags(seq_length=8, max_position_embeddings=8, data_cache_path=None)
    flags += ["--data-path", corpus.prefix, "--save", str(folder / "save"), "--load", str(folder / "save")]
    request = parse([*flags, "--save-interval", "3"])
    tokenizer = build_tokenizer(request.data)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    return Rig(resolve(request, Machine("cpu", 1, False, True), facts), tokenizer)


# --- what reads a checkpoint ----------------------------------------------------------------------


def read_checkpoint(folder: Path, undamaged: Path, draw: Random) -> None:
    """Does with the checkpoint what a resume or a tool does; looks at every text that the user would see."""
    rig = _rig(str(undamaged))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            draw.choice((_resume, _resume, _inspect, _sample_tool))(folder, rig)
        except MegatronError as failure:
            log.error(str(failure))  # as a program shows it
            raise
        finally:
            text = output.getvalue()
            check(_CONTROLS.search(text) is None, f"shows control characters: {text[:300]!r}")


def _resume(folder: Path, rig: Rig) -> None:
    found = newest_record(folder, MESH, check=only_of_run("", folder))
    check(found is not None, "no checkpoint, and no error")
    record = Record.from_json(found.record, found.path)  # type: ignore[union-attr]
    check_same_tokenizer("the checkpoint was trained", record.tokenizer, rig.tokenizer, CheckpointError)
    config = check_resume(record.config, rig.config)
    progress, data = record.progress, config.data
    log.info(f"{RunIdentity.from_json(found.record)}")  # type: ignore[union-attr]
    learning_rate(config.optim, progress.consumed_samples)
    sink = whole_sink(STATE)
    loaded = load_newest(folder, sink.wanted, MESH, known=found)
    check(loaded == found, "another checkpoint was loaded")
    sink.check()
    if is_done(config.optim, progress.step, progress.consumed_samples):
        return
    ranges = config.safety.skip_ranges
    wanted = planned_samples(config.optim, config.evaluation, progress.step, progress.consumed_samples, ranges=ranges)
    datasets, plan = build_split_datasets(
        DataRequest(
            data,
            data.seq_length,
            config.random.seed,
            wanted,
            record.data_plan,
            True,
            progress.consumed_samples,
            rig.tokenizer,
        )
    )
    for line in describe(datasets, plan):
        log.info(line)
    options = BatchOptions(eod_id=rig.tokenizer.eod_id, vocab_size=VOCAB_SIZE, segments=True)
    if datasets.train is None:
        raise CheckpointError(f"{folder}: no training data")
    batches = MicroBatches(
        datasets.train,
        first_sample=progress.consumed_samples,
        global_batch_size=BATCH,
        micro_batch_size=2,
        options=options,
    )
    batches_of_step = [next(iter(batches))]
    check_ids(batches_of_step[0].tokens.ravel(), "batch")


def _inspect(folder: Path, rig: Rig) -> None:
    checkpoint = OpenCheckpoint.newest(folder)
    summary = summarize(checkpoint, with_moments=True)
    for line in summary_lines(summary):
        log.line(line)
    log.line(json.dumps(summary.to_json()))
    dict(read_tensors(checkpoint.folder, kind="master"))


def _sample_tool(folder: Path, rig: Rig) -> None:
    checkpoint = OpenCheckpoint.newest(folder)
    record = checkpoint.record
    config = with_overrides(RunConfig.from_json(record.config), {"data.data_path": rig.config.data.data_path})
    order = SampleOrder.of_plan(record.data_plan, config.data)
    samples_of_steps(1, max(1, min(record.progress.step, 100)), config.optim, (), record.progress)
    log.line(f"{order.planned_samples} samples of {order.sequence_length} tokens")


# --- mutations ------------------------------------------------------------------------------------


def seal(body: bytes) -> bytes:
    """A manifest with that text and the digest that belongs to it."""
    head = body.rstrip()
    return sealed((head[:-1] if head.endswith(b"}") else head) + b",\n")


def _resealed(name: str, mutation: Mutation) -> Mutation:
    """A mutation of JSON, applied to the record or to the whole manifest, with the digest computed anew."""

    def change(draw: Random, files: Files) -> Files:
        values = json.loads(files["manifest.json"])
        del values["digest"]
        if name == "record":
            mark = "here stands the record"
            record, values["record"] = values["record"], mark
            text = mutation(draw, {"x.json": json.dumps(record).encode()})["x.json"]
            body = json.dumps(values).encode().replace(f'"{mark}"'.encode(), text)
        else:
            body = mutation(draw, {"x.json": json.dumps(values).encode()})["x.json"]
        return {**files, "manifest.json": seal(body)}

    return change


def hostile_value(draw: Random, files: Files) -> Files:
    """Some values anywhere are replaced by hostile ones."""
    ((name, data),) = files.items()
    tree = json.loads(data)
    marks = []
    for number in range(draw.choice((1, 1, 1, 2, 4))):
        holder, key = draw.choice(places(tree))
        marks.append(f"hostile value {number}")
        holder[key] = marks[-1]
    text = json.dumps(tree)
    for mark in marks:
        text = text.replace(f'"{mark}"', draw.choice(HOSTILE_VALUES))
    return {name: text.encode("utf-8", "surrogatepass")}


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) below a value; of a long list only some, so that tables do not outweigh the rest."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        keys: Any = list(holder) if isinstance(holder, dict) else range(min(4, len(holder)))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found


def swapped_values(draw: Random, files: Files) -> Files:
    """Two values change places."""
    ((name, data),) = files.items()
    tree = json.loads(data)
    every = places(tree)
    (one, key), (other, place) = draw.choice(every), draw.choice(every)
    one[key], other[place] = json.loads(json.dumps(other[place])), json.loads(json.dumps(one[key]))
    return {name: json.dumps(tree).encode()}


def nearby_number(draw: Random, files: Files) -> Files:
    """A number is a little larger or smaller."""
    ((name, data),) = files.items()
    tree = json.loads(data)
    numbers = [(holder, key) for holder, key in places(tree) if type(holder[key]) in (int, float)]
    holder, key = draw.choice(numbers)
    holder[key] += draw.choice((1, -1, 2, 7, 8, -8, 0.5, 1000, 2**31, 2**40))
    return {name: json.dumps(tree).encode()}


_MUTATIONS: dict[str, Mutation] = {
    "value": hostile_value, "key": JSON["JSON key"], "swapped": swapped_values, "number": nearby_number,
}  # fmt: skip
MUTATIONS = {
    f"{place}: {name}": _resealed(place, mutation)
    for place in ("record", "manifest")
    for name, mutation in _MUTATIONS.items()
}
TARGETS = (
    Target(
        "checkpoint",
        (("checkpoint",),),
        MUTATIONS,
        read_checkpoint,
        longest_letters=6000,
        names=r"/case|stored data plan|checkpoint|saved|progress|The blend|training data|order of samples|--[a-z]",
    ),
    Target(
        "checkpoint as a whole",
        (("checkpoint",),),
        {
            "whole": _resealed("manifest", JSON["JSON as a whole"]),
            "record": _resealed("record", JSON["JSON as a whole"]),
        },
        read_checkpoint,
        share=0.1,
        names="/case",
    ),
)


def _load(undamaged: Path) -> None:
    torch.set_num_threads(1)
    _rig(str(undamaged))
    place = undamaged.parent / "warm-up"
    shutil.copytree(undamaged / "checkpoint", place)
    for seed in range(8):  # what is imported late must not count as memory of a case
        read_checkpoint(place, undamaged, Random(seed))


def run_cases(plan: Plan) -> Iterator[Result]:
    """Fuzzes manifests and records."""
    return fuzz(Kit(TARGETS, write_checkpoint, _load), plan)
