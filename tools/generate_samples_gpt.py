"""Generates text from a GPT checkpoint of any layout.

    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --num-samples 4 --genfile samples.jsonl --top_p 0.9
    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --sample-input-file prompts.txt --greedy
    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --sample-input-file prompts.txt --num-beams 4

The network, its dtype and the tokenizer come from the checkpoint. Every line of --sample-input-file produces
--num-return-sequences lines of output; an empty line starts from the end-of-document token. Without --num-samples and
--sample-input-file, prompts are read from the terminal. Texts are generated in batches of --micro-batch-size, which do
not affect them. The output file has the suffix .partial until it is complete. Under torchrun,
--tensor-model-parallel-size and --pipeline-model-parallel-size split the network over several processes.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import PathUse, flag
from megatron.config.program_flags import parse_over
from megatron.config.sampling_flags import MOST_SPECULATIVE_TOKENS, BeamFlags
from megatron.errors import ConfigError, DataError
from megatron.files.typed_lines import read_line

if TYPE_CHECKING:
    from megatron.inference.beams import Beam
    from megatron.inference.generation import Completion, Request
    from megatron.inference.loaded_model import LoadedModel
    from megatron.parallel.mesh import ParallelMesh

_DEFAULT_NEW_TOKENS = 1024
_DEFAULT_BATCH = 32  # texts generated together
_MAX_PROMPTS = 2**32  # the first text of prompt i has sample index i, whatever the number of texts


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(BeamFlags):
    """Upstream's flags of this tool and sampling flags, in addition to the trainer's."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    out_seq_length: int | None = flag(
        None, "maximum number of new tokens per text; 1024, or the remaining context, if unset",
        at_least=1,
    )  # fmt: skip
    num_samples: int = flag(
        0, "number of texts to generate without a prompt to --genfile; 0 reads prompts from the terminal", at_least=0
    )
    num_return_sequences: int = flag(
        1, "number of texts per prompt; with beam search, the best ones", at_least=1, at_most=1024,
        spelled=("--num_return_sequences",),
    )  # fmt: skip
    genfile: str | None = flag(
        None, "file for the texts of --num-samples, one JSON object per line", path=PathUse.NEW_STREAM
    )
    sample_input_file: str | None = flag(None, "file of prompts, one per line; lines may be empty", path=PathUse.STREAM)
    sample_output_file: str | None = flag(
        None,
        "file for the continuations, one JSON object per line; --sample-input-file with the suffix .out if unset",
        path=PathUse.NEW_STREAM,
    )
    recompute: bool = flag(False, "recompute the whole text for every token instead of using a KV cache")
    speculative_tokens: int = flag(
        0, "speculative decoding: number of tokens drafted by multi-token prediction per step; does not change texts",
        at_least=0, at_most=MOST_SPECULATIVE_TOKENS,
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        yield from super().problems()
        if self.num_samples > 0 and not self.genfile:
            yield f"--num-samples {self.num_samples} requires --genfile FILE for the texts."
        if self.num_samples == 0 and self.genfile:
            yield f"--genfile {self.genfile} requires --num-samples N. Use --sample-output-file for prompts."
        if self.num_samples > 0 and self.sample_input_file:
            yield "--num-samples cannot be combined with --sample-input-file. Drop one of them."
        if self.num_samples > 0 and self.num_return_sequences > 1:
            yield (
                f"--num-return-sequences {self.num_return_sequences} cannot be combined with --num-samples "
                f"{self.num_samples}. Use --num-samples {self.num_samples * self.num_return_sequences} instead."
            )
        if 1 < self.num_beams < max(self.num_return_sequences, self.num_samples):
            yield (
                f"--num-beams {self.num_beams} is less than the {max(self.num_return_sequences, self.num_samples)} "
                "requested texts per prompt. Use more beams."
            )
        if self.num_beams > 1 and self.recompute:
            yield "--recompute cannot be combined with --num-beams. Drop one of them."
        others = {"--recompute": self.recompute, f"--num-beams {self.num_beams}": self.num_beams > 1}
        for option, is_set in others.items():
            if is_set and self.speculative_tokens:
                yield (
                    f"--speculative-tokens {self.speculative_tokens} cannot be combined with {option}. Drop one of "
                    "them."
                )


@dataclass(frozen=True)
class Generator:
    """A loaded network, and the settings to turn prompts into records.

    Args:
        new_tokens: maximum number of new tokens per text.
        batch: number of texts generated together.
    """

    flags: GenerateFlags
    new_tokens: int
    batch: int
    loaded: LoadedModel

    def records(self, prompts: Sequence[str], first_prompt: int = 0) -> Iterator[dict[str, Any]]:
        """Continues prompts, in order; an empty prompt becomes end-of-document.

        Args:
            first_prompt: index of the first prompt, which determines the random numbers together with the seed.
        """
        if self.flags.num_beams > 1:
            yield from self._best_records(prompts)
            return
        copies = self.flags.num_return_sequences
        requests = [
            self.request(prompt, number + copy * _MAX_PROMPTS)
            for number, prompt in enumerate(prompts, start=first_prompt)
            for copy in range(copies)
        ]
        for index, completion in enumerate(self._completions(requests)):
            yield self._record(prompts[index // copies], completion)

    def request(self, prompt: str, sample: int) -> Request:
        """The request to continue a prompt."""
        from megatron.inference.generation import Request
        from megatron.inference.sampling import Sampling

        return Request(
            id=str(sample),
            prompt=tuple(self.encode(prompt)),
            max_new_tokens=self.new_tokens,
            sampling=Sampling.of_flags(self.flags, self.loaded.config.random.seed),
            sample=sample,
            stop_ids=self._stop_ids(),
        )

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ConfigError: the prompt is empty and the tokenizer has no end-of-document token.
        """
        from megatron.tokenizers.prompts import encode_prompt

        return encode_prompt(self.loaded.tokenizer, prompt) or [self.loaded.tokenizer.eod_id]

    def check_prompt(self, prompt: str, name: str) -> None:
        """Checks that a prompt leaves at least one position for a new token.

        Raises:
            ConfigError: it fills all positions.
        """
        length, positions = len(self.encode(prompt)), self.loaded.positions
        if length >= positions:
            raise ConfigError(
                f"{name} has {length} tokens, and the model has {positions} positions (--max-position-embeddings "
                f"{positions}). Shorten it to at most {positions - 1}."
            )

    def _completions(self, requests: Sequence[Request]) -> Iterator[Completion]:
        from megatron.inference.generation import completions, recompute

        if self.flags.recompute:
            return (recompute(self.loaded, request) for request in requests)
        drafted = self.flags.speculative_tokens
        return completions(self.loaded, requests, max_sequences=self.batch, speculative_tokens=drafted)

    def _best_records(self, prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The best beams of every prompt, or without prompts the best texts."""
        from megatron.inference.beams import BeamSettings, beam_search

        flags = self.flags
        settings = BeamSettings.of_flags(
            flags,
            max_new_tokens=self.new_tokens,
            returned=max(flags.num_return_sequences, flags.num_samples),
            stop_ids=self._stop_ids(),
        )
        for prompt in prompts[:1] if flags.num_samples else prompts:
            for beam in beam_search(self.loaded, self.encode(prompt), settings):
                yield {**self._record(prompt, beam), "score": beam.score}

    def _stop_ids(self) -> frozenset[int]:
        return frozenset() if self.loaded.eod_id is None else frozenset({self.loaded.eod_id})

    def _record(self, prompt: str, generated: Completion | Beam) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "text": self.loaded.tokenizer.decode(generated.tokens),
            "tokens": list(generated.tokens),
            "length": len(generated.tokens),
            "finished": generated.finish == "stop",
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    request = parse_over(
        GenerateFlags, sys.argv[1:] if argv is None else argv, "generate_samples_gpt.py", description=__doc__ or ""
    )
    layout = request.layout
    prompts = _read_prompts(request.flags.sample_input_file)

    from megatron.parallel.agreement import run_on_first
    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(layout)
    try:
        output = _output(request.flags)
        if output is not None:
            run_on_first(mesh, lambda: _check_output(output, request.flags.sample_input_file))
        generator = _open(request.flags, request.given, mesh)
        if output is None:
            _interact(generator)
        else:
            _write(generator, output, _records(generator, prompts))
    finally:
        close_mesh(mesh)
    return 0


def _open(flags: GenerateFlags, given: Mapping[str, Any], mesh: ParallelMesh) -> Generator:
    """Builds the checkpoint's network and loads its weights.

    Raises:
        CheckpointError, ConfigError: see `open_checkpoint`; or there are more processes than a model replica has.
    """
    from megatron.inference.loaded_model import open_checkpoint

    if mesh.model.size < mesh.world.size:
        raise ConfigError(
            f"this run has {mesh.world.size} processes, but the network is split over {mesh.model.size} "
            f"(--tensor-model-parallel-size {mesh.tp.size}, --pipeline-model-parallel-size {mesh.pp.size}). Use "
            f"{mesh.model.size}, or split the network over all of them."
        )
    loaded = open_checkpoint(flags.load, given, mesh)
    flags.check_vocabulary(loaded.vocab_size)
    batch = given.get("optim.micro_batch_size", _DEFAULT_BATCH)
    return Generator(flags, _new_tokens(flags.out_seq_length, loaded.positions, mesh), batch, loaded)


def _new_tokens(requested: int | None, positions: int, mesh: ParallelMesh) -> int:
    """The maximum number of new tokens per text, limited by the model's positions with a warning."""
    most = max(1, positions - 1)
    if requested is not None and requested > most and mesh.world.rank == 0:
        log.warning(
            f"--out-seq-length {requested} exceeds the {positions} positions of the model (--max-position-embeddings "
            f"{positions}), prompt included: texts end after at most {most} new tokens."
        )
    return min(_DEFAULT_NEW_TOKENS if requested is None else requested, most)


def _read_prompts(path: str | None) -> list[str] | None:
    """All lines of the prompt file, including empty ones, so that output n belongs to line n.

    Raises:
        DataError: it cannot be read, is not UTF-8, or holds no prompt.
    """
    from megatron.files.plain import read_plain_text

    if path is None:
        return None
    try:
        lines = read_plain_text(path, with_pipes=True).removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as failure:
        raise DataError(
            f"{path} (--sample-input-file) cannot be read as UTF-8 text: {failure}. Give a file of prompts."
        ) from failure
    if lines[-1] == "":  # the last newline does not start another line
        lines.pop()
    prompts = [line.rstrip("\r") for line in lines]
    if not any(prompt.strip() for prompt in prompts):
        raise DataError(
            f"{path} (--sample-input-file) contains no prompt: every line is empty. Write one prompt per line."
        )
    return prompts


def _records(generator: Generator, prompts: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Texts without prompts, or the continuations of the prompts of a file, after checking that all of them fit."""
    flags = generator.flags
    for number, prompt in enumerate(prompts or (), start=1):
        generator.check_prompt(prompt, f"prompt {number} of {flags.sample_input_file}")
    return generator.records([""] * flags.num_samples if prompts is None else prompts)


def _interact(generator: Generator) -> None:
    """Continues prompts from standard input until end of file (Ctrl-D).

    Raises:
        ConfigError: the input is not a terminal and contains no prompt.
    """
    from megatron.parallel.messages import broadcast_json

    group = generator.loaded.mesh.background  # a user may take longer than the timeout of collectives
    is_first = group.rank == 0
    is_terminal = broadcast_json(_is_terminal() if is_first else None, group)
    if is_terminal:
        log.info("Without --num-samples N and --sample-input-file, prompts are read from this terminal, one per line.")
    index = 0
    for number in itertools.count(1):
        prompt = broadcast_json(_read_prompt(number) if is_first else None, group)
        if prompt is None:
            if index == 0 and not is_terminal:
                raise ConfigError(
                    "without --num-samples N and --sample-input-file, prompts are read from standard "
                    "input, which is not a terminal and contains no prompt. Give --num-samples N --genfile FILE, "
                    "--sample-input-file FILE, or one prompt per line on standard input."
                )
            return
        if prompt == "":
            continue
        try:
            if not isinstance(prompt, str):
                raise DataError(prompt["refused"])
            generator.check_prompt(prompt, f"prompt {index + 1}")
            for record in generator.records([prompt], index):
                if is_first:
                    log.text(f"{prompt}{record['text']}\n")
        except (ConfigError, DataError) as failure:  # the next prompt may be valid
            if is_first:
                log.error(str(failure))
        index += 1


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_prompt(number: int) -> str | dict[str, str] | None:
    """Reads a prompt, empty for a blank line; None at the end; {"refused": reason} for an invalid line."""
    try:
        line = read_line("prompt (Ctrl-D ends)> ", number)
    except DataError as failure:
        return {"refused": str(failure)}
    return "" if line is not None and not line.strip() else line


def _write(generator: Generator, path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as they are generated, one JSON object per line, on rank 0; the other ranks only generate.

    Records are in `_partial` until the file is complete.

    Raises:
        StorageError: the file cannot be written.
    """
    from megatron.files.failures import storage_error
    from megatron.files.replacing import move

    if generator.loaded.mesh.world.rank != 0:
        for _ in records:
            pass
        return
    partial = _partial(path)
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for record in records:
            with partial.open("a" if count or partial == path else "w", encoding="utf-8") as stream:
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
        if partial != path:
            move(partial, path.resolve())
    except BaseException as failure:
        if count and partial != path:
            log.info(f"{_texts(count)} written so far are in {partial}.")
        if isinstance(failure, OSError):
            raise storage_error(path, failure) from failure
        raise
    log.text(f"{_texts(count)} in {path}")


def _texts(count: int) -> str:
    return f"{count} {'text' if count == 1 else 'texts'}"


def _partial(path: Path) -> Path:
    """The file for incomplete output; the file itself if it is a device or a pipe."""
    if path.exists() and not path.is_file():
        return path
    final = path.resolve()
    return final.with_name(f"{final.name}.partial")


def _output(flags: GenerateFlags) -> Path | None:
    """The file for the texts; None when prompts are read from the terminal."""
    if flags.num_samples:
        return Path(str(flags.genfile))
    if flags.sample_input_file is None:
        return None
    return Path(flags.sample_output_file or f"{flags.sample_input_file}.out")


def _check_output(path: Path, prompts: str | None) -> None:
    """Checks that the output can be written, before any work is done.

    Raises:
        ConfigError: it would overwrite the file of prompts.
        StorageError: it cannot be written.
    """
    from megatron.files.replacing import check_writable

    partial = _partial(path)
    for file in (path, partial):
        if prompts is not None and file.exists() and file.samefile(prompts):
            raise ConfigError(
                f"--sample-output-file {path} would overwrite the prompts (--sample-input-file {prompts}). Choose "
                f"another file."
            )
    if partial != path or path.is_dir():
        check_writable(path)
        check_writable(partial)


if __name__ == "__main__":
    process_exit.exit_with(main)
