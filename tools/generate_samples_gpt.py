"""Generates text with a GPT checkpoint of any layout.

    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --num-samples 4 --genfile samples.jsonl --top_p 0.9
    python tools/generate_samples_gpt.py --load checkpoints/gpt2 --sample-input-file prompts.txt --greedy

The network, its dtype and the tokenizer come from the checkpoint. Every line of --sample-input-file gives one line of
output; an empty one starts from the end-of-document token. Without --num-samples (or with 0) and without
--sample-input-file, prompts are read from the terminal. Under torchrun with --tensor-model-parallel-size N, N processes
share the network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, ParallelRequest, PrecisionConfig, RunConfig, flag
from megatron.config.overlay import laid_over, parse_over
from megatron.config.resolve import padded_vocab_size
from megatron.errors import CheckpointError, ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from megatron.inference.generate import Continuation
    from megatron.model.interface.network import LayerStack
    from megatron.parallel.mesh import ParallelMesh
    from megatron.tokenizers.tokenizer import Tokenizer

_USUAL_NEW_TOKENS = 1024


@dataclass(frozen=True)
class GenerateFlags(ConfigSection):
    """Upstream's flags of this tool; the trainer's come on top."""

    load: str = flag(help="folder of checkpoints (the newest good one is used), or one checkpoint")
    temperature: float = flag(1.0, "scores are divided by it", above=0, remedy="Use --greedy for the best token.")
    greedy: bool = flag(False, "always take the best token")
    top_k: int = flag(0, "sample among the k best tokens; 0 among all", at_least=0, spelled=("--top_k",))
    top_p: float = flag(
        0.0, "sample among the best tokens that together have this probability; 0 among all", at_least=0, at_most=1,
        spelled=("--top_p",),
    )  # fmt: skip
    out_seq_length: int | None = flag(
        None, "the most tokens to generate for one text; 1024, or what the model's positions leave, if unset",
        at_least=1,
    )  # fmt: skip
    num_samples: int = flag(
        0, "texts to generate from nothing, into --genfile; 0 reads prompts from the terminal", at_least=0
    )
    genfile: str | None = flag(None, "file for the texts of --num-samples, one JSON object a line")
    sample_input_file: str | None = flag(None, "file of prompts, one a line, also empty ones; each is continued")
    sample_output_file: str | None = flag(
        None, "file for the continuations, one JSON object a line; the input's name and .out if unset"
    )
    recompute: bool = flag(False, "run the whole text for every token instead of keeping keys and values")

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.num_samples > 0 and not self.genfile:
            yield f"--num-samples {self.num_samples} needs --genfile FILE for the texts."
        if self.num_samples == 0 and self.genfile:
            yield f"--genfile {self.genfile} is for --num-samples N; continued prompts go to --sample-output-file."
        if self.num_samples > 0 and self.sample_input_file:
            yield "--num-samples starts from nothing and --sample-input-file from prompts. Give one of them."


@dataclass(frozen=True)
class Generator:
    """A loaded network with all that turns a prompt into a record.

    Args:
        new_tokens: the most tokens generated for one text.
    """

    flags: GenerateFlags
    new_tokens: int
    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    model: LayerStack

    def records(self, prompts: Sequence[str], first_sample: int) -> Iterator[dict[str, Any]]:
        """Continues prompts that have equally many tokens; the empty prompt is end-of-document."""
        from megatron.inference.generate import Limits, generate
        from megatron.inference.sampling import Sampling

        flags, model = self.flags, self.config.model
        tokens = [self.encode(prompt) for prompt in prompts]
        found = generate(
            self.model,
            self.mesh,
            tokens,
            Limits(self.new_tokens, model.max_position_embeddings, self.eod_id),
            Sampling(flags.greedy, flags.temperature, flags.top_k, flags.top_p, self.config.random.seed),
            vocab_size=model.vocab_size,
            first_sample=first_sample,
            recompute=flags.recompute,
        )
        for prompt, continuation in zip(prompts, found, strict=True):
            yield self._record(prompt, continuation)

    def encode(self, prompt: str) -> list[int]:
        """The tokens a text starts with.

        Raises:
            ConfigError: the prompt is empty and the tokenizer has no end-of-document token.
        """
        return self.tokenizer.encode(prompt) or [self.tokenizer.eod_id]

    def _record(self, prompt: str, continuation: Continuation) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "text": self.tokenizer.decode(continuation.tokens),
            "tokens": list(continuation.tokens),
            "length": len(continuation.tokens),
            "finished": continuation.is_finished,
        }

    @property
    def eod_id(self) -> int | None:
        """The token that ends a text; None if the tokenizer has none, so that prompts can be continued all the same."""
        try:
            return self.tokenizer.eod_id
        except ConfigError:
            return None


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
    """One stage, one copy, as many tensor-parallel ranks as asked for.

    Raises:
        ConfigError: pipeline stages were asked for.
    """
    own = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("parallel.")}
    stages = own.get("pipeline_model_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} is refused here: generation runs every layer on each rank. "
            "Drop the flag; a checkpoint of any layout loads at pipeline size 1, and --tensor-model-parallel-size "
            "splits it over several processes."
        )
    return ParallelRequest(**own)


def _open(flags: GenerateFlags, given: Mapping[str, Any], mesh: ParallelMesh) -> Generator:
    """Builds the network that the checkpoint describes and fills it.

    Raises:
        CheckpointError: there is no usable checkpoint, or it was trained with another tokenizer.
        ConfigError: a flag contradicts the checkpoint, or there are more processes than ranks of one copy.
    """
    from megatron.checkpoint import newest_record
    from megatron.checkpoint.record import Record
    from megatron.inference.weights import load_weights
    from megatron.model.gpt import gpt_layers
    from megatron.model.interface.network import LayerStack
    from megatron.tokenizers.record import check_same_tokenizer

    if mesh.dp.size > 1:
        raise ConfigError(
            f"{mesh.world.size} processes were started for a network on {mesh.tp.size} (--tensor-model-parallel-size "
            f"{mesh.tp.size}). Start {mesh.tp.size}, or split the network over all: --tensor-model-parallel-size "
            f"{mesh.world.size}."
        )
    found = newest_record(Path(flags.load), mesh)
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {flags.load} (--load {flags.load}). Give the folder a run saved to."
        )
    record = Record.from_json(found.record, found.path)
    config = laid_over(RunConfig.from_json(record.config), given)
    layout = replace(config.parallel, tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=1)
    config = replace(config, parallel=layout)
    tokenizer = _tokenizer(config, given, found.path)
    check_same_tokenizer(f"the checkpoint {found.path} was trained", record.tokenizer, tokenizer, CheckpointError)
    padded, _ = padded_vocab_size(config.parallel, config.model.vocab_size)
    config = replace(config, model=replace(config.model, padded_vocab_size=padded))
    model = LayerStack(gpt_layers(config.model, mesh))
    load_weights(model, Path(flags.load), mesh, known=found)
    new_tokens = _new_tokens(flags.out_seq_length, config.model.max_position_embeddings, mesh)
    return Generator(flags, new_tokens, config, mesh, tokenizer, model.eval().to(_dtype(config.precision, mesh)))


def _tokenizer(config: RunConfig, given: Mapping[str, Any], checkpoint: Path) -> Tokenizer:
    """The tokenizer that the checkpoint's configuration names.

    Raises:
        ConfigError: its files are not where the checkpoint, or a flag, says.
    """
    from megatron.tokenizers.tokenizer import build_tokenizer

    try:
        return build_tokenizer(config.data)
    except ConfigError as failure:
        recorded = [
            f"--{name.replace('_', '-')} {getattr(config.data, name)}"
            for name in ("vocab_file", "merge_file", "tokenizer_name_or_path")
            if getattr(config.data, name) and f"data.{name}" not in given
        ]
        if not recorded:
            raise
        raise ConfigError(
            f"{failure} Not given here but recorded in the checkpoint {checkpoint}: {', '.join(recorded)} (a relative "
            f"path counts from the current folder, {Path.cwd()}). --vocab-file and --merge-file, or "
            "--tokenizer-name-or-path, give it anew."
        ) from failure


def _new_tokens(asked: int | None, positions: int, mesh: ParallelMesh) -> int:
    """The most tokens generated for one text; asking for more than the model's positions can hold is worth a word."""
    most = max(1, positions - 1)
    if asked is not None and asked > most and mesh.world.rank == 0:
        log.warning(
            f"--out-seq-length {asked} does not fit a model of {positions} positions (--max-position-embeddings "
            f"{positions}), prompt included: texts end after at most {most} new tokens."
        )
    return min(_USUAL_NEW_TOKENS if asked is None else asked, most)


def _dtype(precision: PrecisionConfig, mesh: ParallelMesh) -> Any:
    """The dtype the network was trained in; float32 in place of float16 on the CPU."""
    import torch

    if precision.dtype_name == "float16" and mesh.device.type == "cpu":
        log.info("computing in float32: the CPU is slow in float16, the dtype of the checkpoint")
        return torch.float32
    return getattr(torch, precision.dtype_name)


def _read_prompts(path: str | None) -> list[str] | None:
    """All lines of the prompt file, empty ones included, so that output n belongs to line n.

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
    if lines[-1] == "":  # what follows the last newline is no line
        lines.pop()
    prompts = [line.rstrip("\r") for line in lines]
    if not any(prompt.strip() for prompt in prompts):
        raise DataError(f"{path} (--sample-input-file) holds no prompt: every line is empty. Write one prompt a line.")
    return prompts


def _unconditional(generator: Generator, batch: int) -> None:
    """Texts from nothing, in batches."""
    flags = generator.flags

    def records() -> Iterator[dict[str, Any]]:
        for first in range(0, flags.num_samples, batch):
            yield from generator.records([""] * min(batch, flags.num_samples - first), first)

    _write(generator, str(flags.genfile), records())


def _continue_file(generator: Generator, prompts: Sequence[str]) -> None:
    """Continuations of the prompts of a file; a prompt that does not fit is refused before the first is continued."""
    from megatron.inference.generate import Limits

    flags = generator.flags
    limits = Limits(generator.new_tokens, generator.config.model.max_position_embeddings, None)
    for number, prompt in enumerate(prompts, start=1):
        limits.check_prompt(len(generator.encode(prompt)), f"prompt {number} of {flags.sample_input_file}")
    path = flags.sample_output_file or f"{flags.sample_input_file}.out"
    _write(
        generator,
        path,
        (record for index, prompt in enumerate(prompts) for record in generator.records([prompt], index)),
    )


def _interact(generator: Generator) -> None:
    """Continues what is typed until the end of the input (Ctrl-D).

    Raises:
        ConfigError: the input is no terminal and holds no prompt.
    """
    from megatron.parallel.messages import broadcast_json

    speaks = generator.mesh.world.rank == 0
    is_terminal = broadcast_json(_is_terminal() if speaks else None, generator.mesh.world)
    if is_terminal:
        log.info("Without --num-samples N and --sample-input-file, prompts are read from this terminal, one a line.")
    index = 0
    while True:
        prompt = broadcast_json(_ask() if speaks else None, generator.mesh.world)
        if prompt is None:
            if index == 0 and not is_terminal:
                raise ConfigError(
                    "without --num-samples N (0 means none) and --sample-input-file, prompts are read from standard "
                    "input, which is no terminal here and holds no prompt. Give --num-samples N --genfile FILE, "
                    "--sample-input-file FILE, or one prompt a line on standard input."
                )
            return
        if not prompt.strip():
            continue
        try:
            for record in generator.records([prompt], index):
                if speaks:
                    print(prompt + record["text"] + "\n", flush=True)
        except ConfigError as failure:  # a prompt that is too long; the next may fit
            log.error(str(failure))
        index += 1


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _ask() -> str | None:
    if sys.stdin is None:  # closed by who started the program
        return None
    try:
        return input("prompt (Ctrl-D ends)> " if _is_terminal() else "")
    except EOFError:
        return None


def _write(generator: Generator, path: str, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as they come, one JSON object a line, from one rank; the others generate along.

    Raises:
        StorageError: the file cannot be written.
    """
    writes = generator.mesh.world.rank == 0
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
        print(f"{count} texts in {path}")


if __name__ == "__main__":
    log.exit_with(main)
