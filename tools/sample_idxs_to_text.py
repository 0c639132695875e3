r"""Prints the text of a range of training samples, for example to investigate a loss spike.

    python tools/sample_idxs_to_text.py --load checkpoints --sample-id-range 74096 75888
    python tools/sample_idxs_to_text.py --run-dir runs/gpt-20260101-120000 --start-step 3792 --end-step 3848
    python tools/sample_idxs_to_text.py --print-text --start-sample 5 --end-sample 15 --seed 42 --train-samples 100 \
        --seq-length 2048 --data-path my-gpt2_text_document --vocab-file vocab.json --merge-file merges.txt

The sample order comes from the checkpoint in --load or of the run in --run-dir, or is planned from the trainer's flags,
which must be the same as in training: data, split, seed, sequence length and number of samples. Paths of moved files
can be overridden with the trainer's flags. Sample N is the one read after N consumed samples.

Writes one JSON object per line: sample, source, pieces (sequence, first token, number of tokens) and text; for a masked
sample the masked text, and the position and original text of each masked token. --print-text and --print-tokens write
upstream's plain lines instead: the sample index and its text or tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import (
    ConfigSection,
    DataConfig,
    LossConfig,
    MaskingConfig,
    OptimRequest,
    PathUse,
    RandomConfig,
    RunConfig,
    SafetyRequest,
    flag,
)
from megatron.config.files.flag_files import read_group_files
from megatron.config.program_flags import parse_over, with_overrides
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.files.settings import read_json

if TYPE_CHECKING:
    from megatron.checkpoint.record import Progress
    from megatron.data.datasets.masked.masked_options import MaskedOptions
    from megatron.tokenizers.record import TokenizerRecord
    from megatron.tokenizers.tokenizer import Tokenizer
    from tools.runs.sample_order import SampleOrder, TrainedSample

_SHOWN_TOKENS = 6  # at the start and the end, without --all-tokens


@dataclass(frozen=True)
class SampleFlags(ConfigSection):
    """Upstream's flags of this tool and the source of the sample order, in addition to the trainer's flags."""

    load: str | None = flag(None, "folder of checkpoints (the newest is used), or one checkpoint", path=PathUse.FOLDER)
    run_dir: str | None = flag(None, "run folder", path=PathUse.FOLDER)
    sample_id_range: tuple[int, int] | None = flag(None, "first sample, and one past the last")
    start_sample: int | None = flag(None, "first sample, counted from 0", at_least=0)
    end_sample: int | None = flag(None, "one past the last sample", at_least=1)
    start_step: int | None = flag(None, "first step, counted from 1 as in the log", at_least=1)
    end_step: int | None = flag(None, "last step, inclusive; --start-step if unset", at_least=1)
    print_text: bool = flag(False, "write plain lines with the sample index and text")
    print_tokens: bool = flag(False, "write plain lines with the sample index and token ids")
    all_tokens: bool = flag(False, "write all token ids of a sample, in plain lines and in JSON")
    output_file: str | None = flag(None, "output file; standard output if unset", path=PathUse.NEW_FILE)

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.load and self.run_dir:
            yield f"--load {self.load} cannot be combined with --run-dir {self.run_dir}. Drop one of them."
        ends = [self.start_sample is not None, self.end_sample is not None]
        by_steps = self.start_step is not None or self.end_step is not None
        if any(ends) + (self.sample_id_range is not None) + by_steps != 1 or any(ends) != all(ends):
            yield (
                "expected exactly one of --sample-id-range FIRST END, --start-sample with --end-sample, and "
                "--start-step with --end-step."
            )
        if self.end_step is not None and not 1 <= (self.start_step or 0) <= self.end_step:
            yield f"--end-step {self.end_step} requires a --start-step of at most {self.end_step}."


@dataclass(frozen=True)
class Origin:
    """The sample order of a run, and its settings.

    Args:
        ranges: the steps skipped by --skip-train-iteration-range.
        progress: the progress of the checkpoint; None without one.
        tokenizer: the tokenizer of the run; None if unknown.
        skipped: the steps before which a bad batch was skipped, as ranges.
    """

    order: SampleOrder
    optim: OptimRequest
    ranges: tuple[tuple[int, int], ...] = ()
    progress: Progress | None = None
    tokenizer: TokenizerRecord | None = None
    skipped: tuple[tuple[int, int], ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    request = parse_over(
        SampleFlags, sys.argv[1:] if argv is None else argv, "sample_idxs_to_text.py", description=__doc__ or ""
    )
    flags = request.flags
    given, problems = read_group_files(request.given)
    if problems:
        raise ConfigError(problems)
    origin = _origin(flags, given)
    from tools.runs.sample_order import read_samples

    start, end = _range(flags, origin)
    is_needed = flags.print_text or not flags.print_tokens or origin.order.masked is not None
    tokenizer = _tokenizer(origin) if is_needed else None
    lines = _lines(read_samples(origin.order, start, end, tokenizer), flags, tokenizer)
    _write(lines, flags.output_file)
    log.info(f"{end - start} samples, {start} to {end - 1}.")
    return 0


def _origin(flags: SampleFlags, given: Mapping[str, Any]) -> Origin:
    """Determines the source of the sample order."""
    if flags.load is not None:
        return _of_checkpoint(Path(flags.load), given)
    if flags.run_dir is not None:
        return _of_run(Path(flags.run_dir), given)
    return _of_flags(given)


def _of_checkpoint(folder: Path, given: Mapping[str, Any]) -> Origin:
    from megatron.checkpoint import find, read_record
    from megatron.checkpoint.record import Record
    from tools.runs.sample_order import SampleOrder

    candidates = find(folder)
    if not candidates:
        raise CheckpointError(f"no checkpoint in {folder}. Give the folder of a run's checkpoints.")
    record = Record.from_json(read_record(candidates[0].path), candidates[0].path)
    config = with_overrides(RunConfig.from_json(record.config), given)
    order = SampleOrder.of_plan(
        record.data_plan, config.data, _masked(config.masking, config.loss, pairs=config.model.sentence_order_head)
    )
    skipped = tuple((batch["step"], batch["step"]) for batch in record.passed_batches)
    return Origin(order, config.optim, config.safety.skip_ranges, record.progress, record.tokenizer, skipped)


def _of_run(folder: Path, given: Mapping[str, Any]) -> Origin:
    """The order in the run's checkpoint, or from the configuration of a run that was started only once."""
    from megatron.checkpoint import find
    from megatron.observe.metrics_file import read_records
    from tools.runs.sample_order import SampleOrder

    path = folder / "config.json"
    try:
        content = read_json(str(path), str(path))
    except ConfigError as failure:
        raise DataError(f"{failure} Give the folder of a run (--run-dir).") from failure
    saved = RunConfig.from_json(content)
    saves = Path(saved.saving.save) if saved.saving.save else None
    if saves is not None and find(saves):
        return _of_checkpoint(saves, given)
    starts = [record["step"] for record in read_records(folder) if record["kind"] == "start"]
    if starts != [0]:
        raise ConfigError(
            f"The run in {folder} did not start exactly once, at step 0 (its starts: {starts}), and has no checkpoint "
            f"in {saves or '(no --save)'}, so its sample order cannot be derived from its flags. Give the folder of "
            "its checkpoints with --load."
        )
    config = with_overrides(saved, given)
    length, seed = config.data.seq_length, config.random.seed
    masked = _masked(config.masking, config.loss, pairs=config.model.sentence_order_head)
    ranges = config.safety.skip_ranges
    order = SampleOrder.of_flags(config.data, length, seed, config.optim, ranges, masked)
    return Origin(order, config.optim, ranges)


def _of_flags(given: Mapping[str, Any]) -> Origin:
    from tools.runs.sample_order import SampleOrder

    sections: dict[str, dict[str, Any]] = {"data": {}, "optim": {"micro_batch_size": 1}, "safety": {}, "random": {}}
    for name, value in given.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    if "seq_length" not in sections["data"]:
        raise ConfigError("--seq-length of the training run is required without --load or --run-dir.")
    data, optim = DataConfig(**sections["data"]), OptimRequest(**sections["optim"])
    skipped = sections["safety"].get("skip_train_iteration_range", ())
    ranges = SafetyRequest(skip_train_iteration_range=skipped).skip_ranges
    seed = RandomConfig(**sections["random"]).seed
    masking, loss = MaskingConfig(**sections.get("masking", {})), LossConfig(**sections.get("loss", {}))
    masked = _masked(masking, loss, pairs=sections.get("model", {}).get("sentence_order_head", False))
    return Origin(SampleOrder.of_flags(data, data.seq_length, seed, optim, ranges, masked), optim, ranges)


def _masked(masking: MaskingConfig, loss: LossConfig, *, pairs: bool) -> MaskedOptions | None:
    """The options of masked samples; None if the run had none."""
    from megatron.data.datasets.masked.masked_options import MaskedOptions

    return MaskedOptions.of(masking, loss, pairs=pairs)


def _range(flags: SampleFlags, origin: Origin) -> tuple[int, int]:
    """The samples [start, end) that the flags select."""
    from megatron.observe.metrics_file import read_steps
    from tools.runs.sample_order import samples_of_logged_steps, samples_of_steps

    if flags.sample_id_range is not None:
        return flags.sample_id_range
    if flags.start_step is None:
        return flags.start_sample or 0, flags.end_sample or 0
    last = flags.end_step or flags.start_step
    if flags.run_dir is not None:
        return samples_of_logged_steps(flags.start_step, last, read_steps(flags.run_dir))
    ranges = (*origin.ranges, *origin.skipped)
    return samples_of_steps(flags.start_step, last, origin.optim, ranges, origin.progress)


def _tokenizer(origin: Origin) -> Tokenizer:
    from megatron.data.build import token_file_prefixes
    from megatron.data.formats.sidecar import check_tokenizer_fits
    from megatron.tokenizers.record import check_same_tokenizer
    from megatron.tokenizers.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(origin.order.data)
    if origin.tokenizer is not None:
        advice = ", or print ids with --print-tokens"
        check_same_tokenizer("the run was trained", origin.tokenizer, tokenizer, CheckpointError, advice)
    check_tokenizer_fits(token_file_prefixes(origin.order.data), tokenizer)
    return tokenizer


def _lines(samples: Iterator[TrainedSample], flags: SampleFlags, tokenizer: Tokenizer | None) -> Iterator[str]:
    for sample in samples:
        text = tokenizer.decode(sample.tokens) if tokenizer is not None else ""
        if flags.print_tokens:
            yield f"{sample.number} {_shown_tokens(sample, flags.all_tokens)}"
        if flags.print_text:
            yield f"{sample.number} {text}"
        if not (flags.print_tokens or flags.print_text):
            record = {
                "sample": sample.number,
                "source": sample.source,
                "pieces": [span._asdict() for span in sample.spans],
                "text": text,
            }
            if tokenizer is not None and sample.hidden:
                record["hidden"] = [[position, tokenizer.decode([token])] for position, token in sample.hidden]
            if flags.all_tokens:
                record["tokens"] = sample.tokens.tolist()
            yield json.dumps(record, ensure_ascii=False)


def _shown_tokens(sample: TrainedSample, everything: bool) -> str:
    ids = [str(token) for token in sample.tokens.tolist()]
    if not everything and len(ids) > 2 * _SHOWN_TOKENS:
        ids[_SHOWN_TOKENS:-_SHOWN_TOKENS] = ["..."]
    return f"[{', '.join(ids)}]"


def _write(lines: Iterator[str], path: str | None) -> None:
    """Writes the lines to standard output, or atomically to a file."""
    from megatron.files.replacing import write_atomically

    if path is None:
        for line in lines:
            log.text(line)
        return
    write_atomically(Path(path), lambda stream: stream.writelines(f"{line}\n".encode() for line in lines))


if __name__ == "__main__":
    process_exit.exit_with(main)
