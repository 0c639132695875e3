"""Serves a checkpoint over HTTP: OpenAI's endpoints, a chat page, dsGPT2's /generate, health and metrics.

    python tools/serve.py --load checkpoints/gpt2
    curl 'localhost:4000/generate?sentence=Hello'

The server listens on 127.0.0.1 unless --host is set. On SIGTERM and Ctrl-C, running requests are completed. Under
torchrun, --tensor-model-parallel-size and --pipeline-model-parallel-size split the network over several processes; the
first one serves. See docs/serving.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import PathUse, flag
from megatron.config.program_flags import ToolRequest, parse_over
from megatron.config.sampling_flags import MOST_SPECULATIVE_TOKENS, SamplingFlags

if TYPE_CHECKING:
    from megatron.inference.generation import GenerationEngine
    from megatron.inference.loaded_model import LoadedModel
    from megatron.parallel.mesh import ParallelMesh
    from trident.serve.access import Access
    from trident.serve.requests.limits import ServerLimits
    from trident.serve.server import Server
    from trident.serve.single_turn import SingleTurn


@dataclass(frozen=True)
class ServeFlags(SamplingFlags):
    """Flags of this tool, in addition to the trainer's; sampling flags are for /generate, with dsGPT2's defaults."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 allows other machines to connect")
    port: int = flag(4000, "port to listen on; 0 for a free one", at_least=0, at_most=65535)
    served_model_name: str | None = flag(None, "model name for clients; the name of the checkpoint folder if unset")
    chat_template: str | None = flag(
        None, "chat template: plain, chatml, llama, dsgpt2, or a file with a Jinja template; if unset, the one used "
        "for fine-tuning, else the tokenizer's", path=PathUse.FILE_OR_FOLDER,
    )  # fmt: skip
    token_file: str | None = flag(
        None,
        "file with the bearer token that clients must send; or set MEGATRON_SERVE_TOKEN",
        path=PathUse.STREAM,
    )
    cors_origin: tuple[str, ...] = flag((), "allowed CORS origins, such as https://example.org; * for all", nargs="+")
    allowed_host: tuple[str, ...] = flag(
        (),
        "additional host names of a server on the loopback interface, for example behind a proxy",
        nargs="+",
    )
    max_sequences: int = flag(32, "maximum number of sequences per batch; others wait", at_least=1)
    speculative_tokens: int = flag(
        0, "speculative decoding: number of tokens drafted by multi-token prediction per step; does not change texts",
        at_least=0, at_most=MOST_SPECULATIVE_TOKENS,
    )  # fmt: skip
    max_queue: int = flag(
        1024, "maximum number of sequences waiting or running before requests are refused", at_least=1
    )
    max_choices: int = flag(64, "maximum number of choices per request", at_least=1)
    max_new_tokens: int | None = flag(
        None, "maximum number of new tokens per choice; the remaining context if unset", at_least=1
    )
    max_body_bytes: int = flag(1 << 20, "maximum size of a request", at_least=1)
    max_connections: int = flag(512, "maximum number of simultaneous connections", at_least=1)
    request_seconds: float = flag(600.0, "timeout of a request, waiting included", above=0)
    grace_seconds: float = flag(20.0, "grace period for running requests after SIGTERM or Ctrl-C", at_least=0)
    temperature: float = flag(0.9, "sampling temperature of /generate; 0 for greedy decoding", at_least=0)
    top_k: int = flag(30, "top-k sampling of /generate; 0 disables it", at_least=0, spelled=("--top_k",))
    top_p: float = flag(
        1.0, "nucleus sampling of /generate; 0 disables it",
        at_least=0, at_most=1, spelled=("--top_p",),
    )  # fmt: skip
    repetition_penalty: float = flag(
        1.2, "repetition penalty of /generate", at_least=0.01,
        at_most=100, spelled=("--repetition_penalty",),
    )  # fmt: skip
    max_length: int = flag(120, "maximum number of new tokens of /generate", at_least=1, spelled=("--max_length",))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_choices > self.max_queue:
            yield f"--max-choices {self.max_choices} exceeds --max-queue {self.max_queue}. Increase --max-queue."
        for origin in self.cors_origin:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                yield f"--cors-origin {origin} is not an origin. Expected for example https://example.org, or *."


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is stopped."""
    request = parse_over(ServeFlags, sys.argv[1:] if argv is None else argv, "serve.py", description=__doc__ or "")

    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(request.layout)
    try:
        if mesh.world.rank == 0:
            _serve(request, mesh)
        else:
            _serve_as_worker(request, mesh)
    finally:
        close_mesh(mesh)
    return 0


def _serve(request: ToolRequest[ServeFlags], mesh: ParallelMesh) -> None:
    """Serves on rank 0."""
    from megatron.inference.generation import drive
    from trident.serve.requests.served_model import build_served_model
    from trident.serve.server import EngineSession

    flags = request.flags
    server = _server(flags, "random.seed" in request.given, int(request.given.get("random.seed", 1234)))
    log.info(f"listening on {server.address}, loading {flags.load}")

    def open_model() -> EngineSession:
        loaded = _load(request, mesh)
        served = build_served_model(loaded, flags.served_model_name, flags.chat_template)
        driver = drive(_engine(flags, loaded))
        return EngineSession(served, driver, flags.max_sequences, driver.check_ranks, driver.close)

    server.run(open_model)


def _serve_as_worker(request: ToolRequest[ServeFlags], mesh: ParallelMesh) -> None:
    """Computes on other ranks, until rank 0 stops them."""
    import signal

    from megatron.inference.generation import serve_as_worker

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    serve_as_worker(_engine(request.flags, _load(request, mesh)))


def _engine(flags: ServeFlags, loaded: LoadedModel) -> GenerationEngine:
    from megatron.inference.generation import GenerationEngine

    drafted = flags.speculative_tokens
    return GenerationEngine(
        loaded, max_sequences=flags.max_sequences, isolates_failures=True, speculative_tokens=drafted
    )


def _load(request: ToolRequest[ServeFlags], mesh: ParallelMesh) -> LoadedModel:
    from megatron.inference.loaded_model import open_checkpoint

    return open_checkpoint(request.flags.load, request.given, mesh)


def _server(flags: ServeFlags, has_seed: bool, seed: int) -> Server:
    """Opens the server, listening but without a model."""
    from trident.serve.network import listen
    from trident.serve.server import Server

    access = _access(flags)
    listener = listen(flags.host, flags.port)
    return Server(listener, _limits(flags), access, _single_turn(flags, has_seed, seed), flags.grace_seconds)


def _access(flags: ServeFlags) -> Access:
    """The access rules of the server; warns if anyone may use it."""
    from megatron import device
    from trident.serve.access import TOKEN_VARIABLE, Access, allowed_hosts, is_loopback, read_token

    token = read_token(flags.token_file, device.environment(TOKEN_VARIABLE))
    if token is None and not is_loopback(flags.host):
        log.warning(
            f"--host {flags.host} allows other machines to connect without a token: anyone who can reach port "
            f"{flags.port} may use this server. Use --token-file FILE, or set {TOKEN_VARIABLE}."
        )
    return Access(token, flags.cors_origin, allowed_hosts(flags.host, flags.allowed_host))


def _limits(flags: ServeFlags) -> ServerLimits:
    from trident.serve.requests.limits import ServerLimits

    return ServerLimits(
        body_bytes=flags.max_body_bytes,
        new_tokens=flags.max_new_tokens,
        sequences=flags.max_choices,
        queued_sequences=flags.max_queue,
        request_seconds=flags.request_seconds,
        connections=flags.max_connections,
    )


def _single_turn(flags: ServeFlags, has_seed: bool, seed: int) -> SingleTurn:
    from megatron.inference.sampling import Sampling
    from trident.serve.single_turn import SingleTurn

    return SingleTurn(Sampling.of_flags(flags, seed), flags.max_length, has_seed)


if __name__ == "__main__":
    process_exit.exit_with(main)
