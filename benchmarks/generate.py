"""Tokens per second of the generation engine and of `transformers`, on the same exported checkpoint, in one process.

    python benchmarks/generate.py

Prints one JSON line per figure. The networks have random weights: a GPT-2 of 124 million parameters and a Llama of
about as many, or smaller ones (--size). Both sides generate greedily; that the texts are equal is checked before
anything is timed. Runs of the two alternate; a ratio is the median over the pairs of runs, its spread their extremes.
On a busy machine the ratio of processor times says more than that of seconds.

The requests are one prompt alone, eight prompts of the same length, and eight prompts of different lengths, with
as many new tokens each and with different numbers of new tokens. For several requests `transformers`
gets one batch, padded on the left, which runs until its longest text is finished. Only the requested tokens count.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.checkpoint import save
from megatron.checkpoint.record import Progress, Record
from megatron.config import ConfigSection, Machine, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.data.order.plan import DataPlan
from megatron.inference.generation import GenerationEngine, Request
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.inference.sampling import Sampling
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import filling_weights
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.convert.hugging_face.exporting import ExportRequest, export_model
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level

_TINY = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "512")
_SIZES = {
    "small": ("--num-layers", "12", "--hidden-size", "768", "--num-attention-heads", "12", "--vocab-size", "50257"),
    "medium": ("--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "8192"),
    "tiny": _TINY,
}
_KINDS = {
    "gpt2": (),
    "llama": (
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--num-query-groups", "4", "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "2048"),
    ),
}
_POSITIONS = 1024
_GREEDY = Sampling(greedy=True)


@dataclass(frozen=True)
class GenerateFlags(ConfigSection):
    """Flags of this program."""

    size: str = flag("small", "size of the networks", choices=tuple(_SIZES))
    kind: str | None = flag(None, "measure only this network", choices=tuple(_KINDS))
    repeats: int = flag(5, "pairs of runs", at_least=1)
    new_tokens: int = flag(48, "new tokens of a request", at_least=2)
    threads: int = flag(2, "threads of both sides", at_least=1)
    requests: str | None = flag(None, "measure only the requests whose description has this text")


@dataclass(frozen=True)
class Work:
    """Requests that are measured together.

    Attributes:
        name: what they show.
        prompts: token ids.
        new_tokens: how many tokens each gets.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """The results of one side.

    Attributes:
        processor_seconds: what all threads of this process took.
        first_seconds: until the first token of the first request was known.
        cache_bytes: most memory of keys and values.
    """

    texts: list[list[int]]
    seconds: float
    processor_seconds: float
    first_seconds: float
    cache_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the networks, checks that both sides agree, and measures them."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(GenerateFlags, words, prog="generate.py", description=__doc__ or "")
    torch.set_num_threads(flags.threads)
    for kind in _KINDS:
        if flags.kind in (None, kind):
            with tempfile.TemporaryDirectory() as name:
                loaded, reference = make_networks(Path(name), kind, flags.size)
            for work in work_of(flags.new_tokens, loaded.config.model.vocab_size):
                if flags.requests is None or flags.requests in work.name:
                    measure(f"{kind} {flags.size}", loaded, reference, work, flags)
    return 0


def make_networks(folder: Path, kind: str, size: str) -> tuple[LoadedModel, PreTrainedModel]:
    """A checkpoint with random weights as the engine opens it, and its export as `transformers` opens it."""
    source = Path(__file__).read_text(encoding="utf-8")
    vocabulary, merges = train_byte_level([source], 400)
    vocab_file, merge_file = save_byte_level_vocabulary(str(folder / "benchmark"), vocabulary, merges)
    choice = TokenizerChoice("GPT2BPETokenizer", str(vocab_file), str(merge_file))
    tokenizer = build_tokenizer(choice)
    request = parse([
        *_SIZES[size], *_KINDS[kind], "--seq-length", str(_POSITIONS), "--max-position-embeddings", str(_POSITIONS),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "0.001"),
        *("--data-path", "nowhere", "--vocab-file", str(vocab_file), "--merge-file", str(merge_file)),
        *("--init-method-std", "0.06"),
    ])  # fmt: skip
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    config = resolve(request, Machine("cpu", 1, False, True), facts)
    mesh = ParallelMesh.single()
    model = LayerStack(gpt_layers(config.model, mesh), seed=1)
    weights = dict(model.named_parameters())
    pieces = [(key, weights[key.name].detach().view(-1)[: key.numel]) for key, _ in filling_weights(model.parameters())]
    made_with = TokenizerRecord(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size)
    plan = DataPlan(sequence_length=_POSITIONS, seed=1, epoch_rule="bigscience", train=None, valid=(), test=())
    record = Record(Progress(), 0, {}, config.to_json(), plan, {}, made_with, "benchmark")
    save(folder / "checkpoints", 0, pieces, record.to_json(), mesh)
    loaded = open_checkpoint(str(folder / "checkpoints"), {}, mesh)
    exported = export_model(ExportRequest(loaded.path, folder / "exported", config.model, choice, made_with))
    reference = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True).eval()
    every_token: Any = SimpleNamespace(vocab_size=config.model.vocab_size)  # as transformers chooses
    return dataclasses.replace(loaded, tokenizer=every_token), reference


def work_of(new_tokens: int, vocab_size: int) -> list[Work]:
    """The requests that are measured."""
    draws = torch.Generator().manual_seed(5)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (length,), generator=draws).tolist())

    lengths = (8, 16, 24, 40, 64, 96, 160, 256)
    wanted = tuple(new_tokens * share // 4 for share in (8, 1, 4, 2, 1, 6, 2, 3))
    return [
        Work("one request", (prompt(64),), (new_tokens,)),
        Work("8 prompts of 64 tokens", tuple(prompt(64) for _ in range(8)), (new_tokens,) * 8),
        Work("8 prompts of 8 to 256 tokens", tuple(map(prompt, lengths)), (new_tokens,) * 8),
        Work(f"the same, {min(wanted)} to {max(wanted)} new tokens", tuple(map(prompt, lengths)), wanted),
    ]


def measure(network: str, loaded: LoadedModel, reference: PreTrainedModel, work: Work, flags: GenerateFlags) -> None:
    """Alternates both sides on some work and prints the figures."""
    sides: dict[str, Callable[[Work], Outcome]] = {
        "ours": lambda work: run_ours(loaded, work),
        "transformers": lambda work: run_transformers(reference, work),
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in sides}
    agreeing = [run(work).texts for run in sides.values()]
    equal = sum(ours == theirs for ours, theirs in zip(*agreeing, strict=True))
    for _ in range(flags.repeats):
        for name, run in sides.items():
            outcomes[name].append(run(work))
    facts = {"network": network, "requests": work.name}
    tokens = sum(work.new_tokens)
    for name, found in outcomes.items():
        rates = [tokens / outcome.seconds for outcome in found]
        firsts = [outcome.first_seconds for outcome in found]
        _print("tokens_per_second", rates, "tokens/s", side=name, **facts)
        _print("seconds_to_first_token", firsts, "s", side=name, **facts)
        _print("cache", [outcome.cache_bytes / 2**20 for outcome in found], "MiB", side=name, **facts)
    pairs = list(zip(outcomes["ours"], outcomes["transformers"], strict=True))
    ratios = [theirs.processor_seconds / ours.processor_seconds for ours, theirs in pairs]
    _print("processor_time_ratio", ratios, "ratio", **facts)
    _print("speed_ratio", [theirs.seconds / ours.seconds for ours, theirs in pairs], "ratio", **facts)
    print_figure("generate", "equal_texts", equal, f"of {len(work.prompts)}", **facts)


def run_ours(loaded: LoadedModel, work: Work) -> Outcome:
    """The engine; all requests come at once."""
    engine = GenerationEngine(loaded)
    texts: list[list[int]] = [[] for _ in work.prompts]
    most, first_at = 0, 0.0
    started_at, busy_at = time.perf_counter(), time.process_time()
    for number, (prompt, count) in enumerate(zip(work.prompts, work.new_tokens, strict=True)):
        engine.add(Request(str(number), prompt, count, _GREEDY))
    while not engine.is_idle:
        for generated in engine.step():
            if generated.token is not None:
                texts[int(generated.request_id)].append(generated.token)
            first_at = first_at or time.perf_counter()
        most = max(most, engine.cache_bytes)
    seconds, busy_seconds = time.perf_counter() - started_at, time.process_time() - busy_at
    return Outcome(texts, seconds, busy_seconds, first_at - started_at, most)


@torch.inference_mode()
def run_transformers(model: PreTrainedModel, work: Work) -> Outcome:
    """`generate` on one batch, padded on the left."""
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in work.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
    clock = _FirstToken()
    started_at, busy_at = time.perf_counter(), time.process_time()
    found: Any = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(work.new_tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock if len(work.prompts) == 1 else None,
        return_dict_in_generate=True,
    )
    seconds, busy_seconds = time.perf_counter() - started_at, time.process_time() - busy_at
    texts = [
        row[longest : longest + count].tolist() for row, count in zip(found.sequences, work.new_tokens, strict=True)
    ]
    layers = found.past_key_values.layers
    held = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
    first = clock.times[1] - started_at if len(clock.times) > 1 else float("nan")
    return Outcome(texts, seconds, busy_seconds, first, held)


class _FirstToken:
    """A streamer of `transformers`: the prompt is put first, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _print(figure: str, values: Sequence[float], unit: str, **facts: object) -> None:
    if not any(value != value for value in values):
        middle = statistics.median(values)
        print_figure("generate", figure, middle, unit, spread=(min(values), max(values)), **facts)


if __name__ == "__main__":
    process_exit.exit_with(main)
