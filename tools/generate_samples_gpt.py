"""Generates text from a GPT checkpoint of any layout.

    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --num-samples 4 --genfile samples.jsonl --top_p 0.9
    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --sample-input-file prompts.txt --greedy

The network, its dtype and the tokenizer come from the checkpoint. Every line of --sample-input-file produces one line
of output; an empty line starts from the end-of-document token. Without --num-samples (or with 0) and without
--sample-input-file, prompts are read from the terminal. Under torchrun, --tensor-model-parallel-size N splits the
network over N processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, ParallelRequest, flag
from megatron.config.overlay import parse_over
from megatron.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from megatron.inference.generate import Continuation
    from megatron.inference.loading import LoadedModel
    from megatron.parallel.mesh import ParallelMesh

_USUAL_NEW_TOKENS = 1024


@dataclass(frozen=True)
class GenerateFlags(ConfigSection):
    """Upstream's flags of this tool, in addition to the trainer's."""

    load: str = flag(help="folder of checkpoints (the newest valid one is used), or one checkpoint")
    temperature: float = flag(1.0, "divisor of the logits", above=0, remedy="Use --greedy for the most probable token.")
    greedy: bool = flag(False, "always take the most probable token")
    top_k: int = flag(0, "sample from the k most probable tokens; 0 from all", at_least=0, spelled=("--top_k",))
    top_p: float = flag(
        0.0, "sample from the most probable tokens up to this cumulative probability; 0 from all", at_least=0,
        at_most=1, spelled=("--top_p",),
    )  # fmt: skip
    out_seq_length: int | None = flag(
        None, "maximum number of tokens generated per text; by default 1024, or what the model's positions allow",
        at_least=1,
    )  # fmt: skip
    num_samples: int = flag(
        0, "number of texts to generate without a prompt, into --genfile; 0 reads prompts from the terminal", at_least=0
    )
    genfile: str | None = flag(None, "file for the texts of --num-samples, one JSON object per line")
    sample_input_file: str | None = flag(None, "file of prompts to continue, one per line; lines may be empty")
    sample_output_file: str | None = flag(
        None, "file for the continuations, one JSON object per line; by default the input's name with .out appended"
    )
    recompute: bool = flag(False, "process the whole text for every token instead of using a key-value cache")

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.num_samples > 0 and not self.genfile:
            yield f"--num-samples {self.num_samples} needs --genfile FILE for the texts."
        if self.num_samples == 0 and self.genfile:
            yield f"--genfile {self.genfile} is for --num-samples N; continued prompts go to --sample-output-file."
        if self.num_samples > 0 and self.sample_input_file:
            yield "--num-samples generates without prompts and --sample-input-file continues prompts. Give one of them."


@dataclass(frozen=True)
class Generator:
    """A loaded network with everything needed to turn prompts into records.

    Args:
        new_tokens: maximum number of tokens generated for one text.
    """

    flags: GenerateFlags
    new_tokens: int
    loaded: LoadedModel

    def records(self, prompts: Sequence[str], first_sample: int) -> Iterator[dict[str, Any]]:
        """Continues prompts with equal numbers of tokens; an empty prompt becomes end-of-document."""
        from megatron.inference.generate import Limits, generate
        from megatron.inference.sampling import Sampling

        flags, loaded = self.flags, self.loaded
        tokens = [self.encode(prompt) for prompt in prompts]
        found = generate(
            loaded.model,
            loaded.mesh,
            tokens,
            Limits(self.new_tokens, loaded.positions, loaded.eod_id, loaded.config.model.short_context),
            Sampling(
                greedy=flags.greedy,
                temperature=flags.temperature,
                top_k=flags.top_k,
                top_p=flags.top_p,
                seed=loaded.config.random.seed,
            ),
            vocab_size=loaded.vocab_size,
            first_sample=first_sample,
            recompute=flags.recompute,
        )
        for prompt, continuation in zip(prompts, found, strict=True):
            yield self._record(prompt, continuation)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ConfigError: the prompt is empty and the tokenizer has no end-of-document token.
        """
        return self.loaded.tokenizer.encode(prompt) or [self.loaded.tokenizer.eod_id]

    def _record(self, prompt: str, continuation: Continuation) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "text": self.loaded.tokenizer.decode(continuation.tokens),
            "tokens": list(continuation.tokens),
            "length": len(continuation.tokens),
            "finished": continuation.is_finished,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    request = parse_over(
        GenerateFlags, sys.argv[1:] if argv is None else argv, "generate_samples_gpt.py", description=__doc__ or ""
    )
    layout = _layout(request.given)
    prompts = _read_prompts(request.own.sample_input_file)

    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(layout)
    try:
        generator = _open(request.own, request.given, mesh)
        if request.own.num_samples:
            _unconditional(generator, request.given.get("optim.micro_batch_size", 4))
        elif prompts is not None:
            _continue_file(generator, prompts)
        else:
            _interact(generator)
    finally:
        close_mesh(mesh)
    return 0


def _layout(given: Mapping[str, Any]) -> ParallelRequest:
    """The layout: one pipeline stage, one replica, and the requested tensor-parallel size.

    Raises:
        ConfigError: a pipeline-parallel size above 1 was requested.
    """
    own = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("parallel.")}
    stages = own.get("pipeline_model_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} is not supported here: generation runs every layer on each rank. "
            f"Remove the flag; a checkpoint of any layout loads at pipeline size 1, and --tensor-model-parallel-size "
            "splits it over several processes."
        )
    return ParallelRequest(**own)


def _open(flags: GenerateFlags, given: Mapping[str, Any], mesh: ParallelMesh) -> Generator:
    """Builds the checkpoint's network and loads its weights.

    Raises:
        CheckpointError, ConfigError: see `open_checkpoint`; or there are more processes than tensor-parallel ranks.
    """
    from megatron.inference.loading import open_checkpoint

    if mesh.dp.size > 1:
        raise ConfigError(
            f"{mesh.world.size} processes were started, but the network is split over {mesh.tp.size} "
            f"(--tensor-model-parallel-size "
            f"{mesh.tp.size}). Start {mesh.tp.size}, or split the network over all of them: "
            f"--tensor-model-parallel-size "
            f"{mesh.world.size}."
        )
    loaded = open_checkpoint(flags.load, given, mesh)
    return Generator(flags, _new_tokens(flags.out_seq_length, loaded.positions, mesh), loaded)


def _new_tokens(asked: int | None, positions: int, mesh: ParallelMesh) -> int:
    """The maximum number of tokens generated for one text; warns if more are requested than the model's positions
    allow.
    """
    most = max(1, positions - 1)
    if asked is not None and asked > most and mesh.world.rank == 0:
        log.warning(
            f"--out-seq-length {asked} does not fit a model of {positions} positions (--max-position-embeddings "
            f"{positions}), prompt included: texts end after at most {most} new tokens."
        )
    return min(_USUAL_NEW_TOKENS if asked is None else asked, most)


def _read_prompts(path: str | None) -> list[str] | None:
    """All lines of the prompt file, including empty ones, so that output n belongs to line n.

    Raises:
        DataError: it cannot be read, is not UTF-8, or holds no prompt.
    """
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
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


def _unconditional(generator: Generator, batch: int) -> None:
    """Generates texts without prompts, in batches."""
    flags = generator.flags

    def records() -> Iterator[dict[str, Any]]:
        for first in range(0, flags.num_samples, batch):
            yield from generator.records([""] * min(batch, flags.num_samples - first), first)

    _write(generator, str(flags.genfile), records())


def _continue_file(generator: Generator, prompts: Sequence[str]) -> None:
    """Continues the prompts of a file, after checking that all of them fit."""
    from megatron.inference.generate import Limits

    flags = generator.flags
    limits = Limits(generator.new_tokens, generator.loaded.positions, None)
    for number, prompt in enumerate(prompts, start=1):
        limits.check_prompt(len(generator.encode(prompt)), f"prompt {number} of {flags.sample_input_file}")
    path = flags.sample_output_file or f"{flags.sample_input_file}.out"
    _write(
        generator,
        path,
        (record for index, prompt in enumerate(prompts) for record in generator.records([prompt], index)),
    )


def _interact(generator: Generator) -> None:
    """Continues prompts from standard input until its end (Ctrl-D).

    Raises:
        ConfigError: the input is not a terminal and contains no prompt.
    """
    from megatron.parallel.messages import broadcast_json

    speaks = generator.loaded.mesh.world.rank == 0
    is_terminal = broadcast_json(_is_terminal() if speaks else None, generator.loaded.mesh.world)
    if is_terminal:
        log.info("Without --num-samples N and --sample-input-file, prompts are read from this terminal, one per line.")
    index = 0
    while True:
        prompt = broadcast_json(_ask() if speaks else None, generator.loaded.mesh.world)
        if prompt is None:
            if index == 0 and not is_terminal:
                raise ConfigError(
                    "without --num-samples N (0 means none) and --sample-input-file, prompts are read from standard "
                    "input, which is not a terminal here and contains no prompt. Give --num-samples N --genfile FILE, "
                    "--sample-input-file FILE, or one prompt per line on standard input."
                )
            return
        if not prompt.strip():
            continue
        try:
            for record in generator.records([prompt], index):
                if speaks:
                    print(prompt + record["text"] + "\n", flush=True)
        except ConfigError as failure:  # the prompt is too long; the next one may fit
            log.error(str(failure))
        index += 1


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _ask() -> str | None:
    if sys.stdin is None:  # closed by the parent process
        return None
    try:
        return input("prompt (Ctrl-D ends)> " if _is_terminal() else "")
    except EOFError:
        return None


def _write(generator: Generator, path: str, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as they are generated, one JSON object per line, on rank 0; the other ranks only generate.

    Raises:
        StorageError: the file cannot be written.
    """
    writes = generator.loaded.mesh.world.rank == 0
    count = 0
    emit: Callable[[str], object] = len
    try:
        stream = Path(path).open("w", encoding="utf-8") if writes else None
        try:
            emit = stream.write if stream else emit
            for record in records:
                emit(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        finally:
            if stream:
                stream.close()
    except OSError as failure:
        raise StorageError(
            f"{path} cannot be written: {failure.strerror or failure}. Choose another file."
        ) from failure
    if writes:
        print(f"{count} {'text' if count == 1 else 'texts'} in {path}")


if __name__ == "__main__":
    log.exit_with(main)
