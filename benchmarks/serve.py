"""Tokens per second through the server and through the engine called directly, for the same requests, in turns.

    python benchmarks/serve.py

Prints one JSON line per figure. The network has random weights (by default a GPT-2 of 124 million parameters) and
generates greedily. Each of 1, 8 and 32 clients keeps one request going at a time; as many as that are in the engine
when it is called directly. The clients are one process of their own: they speak HTTP over the loopback and read streams
of events. Runs of the two alternate. `served_over_direct` is the ratio of their tokens per second, the median over the
pairs of runs, and its spread their extremes; what is missing to 1 is the cost of the server.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, Machine, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.inference.generation import GenerationEngine, Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level
from trident.serve.access import Access
from trident.serve.network import listen
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import build_served_model
from trident.serve.server import EngineSession, Server
from trident.serve.service import READY
from trident.serve.single_turn import SingleTurn

_MAX_CLIENTS = 32
_POSITIONS = 512
_SIZES = {
    "small": ("--num-layers", "12", "--hidden-size", "768", "--num-attention-heads", "12", "--vocab-size", "50257"),
    "tiny": ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "512"),
}


@dataclass(frozen=True)
class ServeFlags(ConfigSection):
    """Flags of this program."""

    size: str = flag("small", "size of the network", choices=tuple(_SIZES))
    clients: tuple[int, ...] = flag((1, 8, 32), "clients at the same time", nargs="+", at_least=1, at_most=_MAX_CLIENTS)
    repeats: int = flag(3, "pairs of runs", at_least=1)
    requests: int = flag(2, "requests of each client in a run", at_least=1)
    prompt_tokens: int = flag(32, "tokens of a prompt", at_least=1)
    new_tokens: int = flag(32, "new tokens of a request", at_least=2)
    threads: int = flag(1, "threads that compute", at_least=1)


@dataclass(frozen=True)
class Outcome:
    """The results of some requests.

    Args:
        first_seconds: to the first token, of each request.
        token_seconds: per further token, of each request.
    """

    tokens: int
    seconds: float
    first_seconds: list[float]
    token_seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Over all clients."""
        return self.tokens / self.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both sides for each number of clients."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(ServeFlags, words, prog="serve.py", description=__doc__ or "")
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as name:
        loaded = make_network(Path(name), flags.size)
        with serving(loaded) as address:
            for clients in flags.clients:
                measure(loaded, address, clients, flags)
    return 0


def make_network(folder: Path, size: str) -> LoadedModel:
    """A network with random weights and a small vocabulary; the tokenizer's files are in the folder."""
    vocabulary, merges = train_byte_level([Path(__file__).read_text(encoding="utf-8")], 400)
    vocab_file, merge_file = save_byte_level_vocabulary(str(folder / "benchmark"), vocabulary, merges)
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", str(vocab_file), str(merge_file)))
    request = parse([
        *_SIZES[size], "--seq-length", str(_POSITIONS), "--max-position-embeddings", str(_POSITIONS),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "0.001"),
        *("--data-path", "nowhere", "--vocab-file", str(vocab_file), "--merge-file", str(merge_file)),
    ])  # fmt: skip
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    config = resolve(request, Machine("cpu", 1, False, True), facts)
    mesh = ParallelMesh.single()
    model = LayerStack(gpt_layers(config.model, mesh), seed=1).eval()
    return LoadedModel(config, mesh, tokenizer, model, folder, 0)


def measure(loaded: LoadedModel, address: str, clients: int, flags: ServeFlags) -> None:
    """Prints the figures of one number of clients, after a run of each that is not counted."""
    served: list[Outcome] = []
    direct: list[Outcome] = []
    for repeat in range(flags.repeats + 1):
        pair = ask_engine(loaded, clients, flags), ask_server(address, clients, flags)
        if repeat:
            direct.append(pair[0])
            served.append(pair[1])
    about = {"clients": clients, "size": flags.size, "threads": flags.threads, "new_tokens": flags.new_tokens}
    ratios = [ours.tokens_per_second / its.tokens_per_second for ours, its in zip(served, direct, strict=True)]
    for name, side in (("served", served), ("direct", direct)):
        speeds = [one.tokens_per_second for one in side]
        requests = [clients * flags.requests / one.seconds for one in side]
        first = [seconds for one in side for seconds in one.first_seconds]
        further = [seconds for one in side for seconds in one.token_seconds]
        _print(f"{name}_tokens", speeds, "tokens/s", about)
        _print(f"{name}_requests", requests, "requests/s", about)
        _print(f"{name}_time_to_first_token", [1000 * seconds for seconds in first], "ms", about)
        _print(f"{name}_time_per_token", [1000 * seconds for seconds in further], "ms", about)
    _print("served_over_direct", ratios, "ratio", about)


def ask_engine(loaded: LoadedModel, clients: int, flags: ServeFlags) -> Outcome:
    """Runs the requests of all clients, with one per client in the engine."""
    engine = GenerationEngine(loaded, max_sequences=_MAX_CLIENTS)
    turns = {client: iter(prompts_of(client, flags)) for client in range(clients)}
    asked_at: dict[str, float] = {}
    first_at: dict[str, float] = {}
    first, further, tokens = [], [], 0

    def submit(client: int) -> None:
        for number, prompt in turns[client]:
            name = f"{client}/{number}"
            asked_at[name] = time.perf_counter()
            engine.add(Request(name, prompt, flags.new_tokens, Sampling(greedy=True)))
            return

    started_at = time.perf_counter()
    for client in range(clients):
        submit(client)
    while not engine.is_idle:
        found = engine.step()
        now = time.perf_counter()
        for token in found:
            name, tokens = token.request_id, tokens + 1
            first_at.setdefault(name, now)
            if token.finish is not None:
                first.append(first_at[name] - asked_at[name])
                further.append((now - first_at[name]) / (flags.new_tokens - 1))
                submit(int(name.partition("/")[0]))
    return Outcome(tokens, time.perf_counter() - started_at, first, further)


def ask_server(address: str, clients: int, flags: ServeFlags) -> Outcome:
    """The same, from another process."""
    prompts = [[list(prompt) for _, prompt in prompts_of(client, flags)] for client in range(clients)]
    order = {"address": address, "new_tokens": flags.new_tokens, "prompts": prompts}
    command = [sys.executable, str(Path(__file__).with_name("serve_clients.py"))]
    done = subprocess.run(command, input=json.dumps(order), check=True, stdout=subprocess.PIPE, text=True)
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def prompts_of(client: int, flags: ServeFlags) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The prompts of one client, of different tokens, with their numbers."""
    for number in range(flags.requests):
        first = 7 * client + 31 * number
        yield number, tuple((first + 3 * place) % 255 for place in range(flags.prompt_tokens))


@contextmanager
def serving(loaded: LoadedModel) -> Iterator[str]:
    """A server in this process, and its address."""
    limits, turn = ServerLimits(), SingleTurn(Sampling(), 16)
    server = Server(listen("127.0.0.1", 0), limits, Access(), turn, grace_seconds=0)
    served = replace(build_served_model(loaded, "benchmark"), eod_id=None)  # no text ends before its length

    def open_model() -> EngineSession:
        return EngineSession(served, GenerationEngine(loaded, max_sequences=_MAX_CLIENTS), _MAX_CLIENTS)

    thread = threading.Thread(target=server.run, args=(open_model,), daemon=True)
    thread.start()
    while server.service.state != READY:
        time.sleep(0.01)
    yield server.address
    server.stop()
    thread.join()


def _print(figure: str, values: Sequence[float], unit: str, about: dict[str, object]) -> None:
    spread = (min(values), max(values))
    print_figure("serve", figure, statistics.median(values), unit, spread=spread, **about)


if __name__ == "__main__":
    process_exit.exit_with(main)
