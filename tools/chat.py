"""Chats with a checkpoint in the terminal.

    python tools/chat.py --load checkpoints/chat
    echo "What is the capital of Turkey?" | python tools/chat.py --load checkpoints/chat --greedy

Answers are streamed; Ctrl-C stops one, Ctrl-D ends the conversation. At the prompt, /reset clears the conversation,
/system TEXT sets the system prompt (and clears the conversation), /quit ends; //help sends "/help". Without a terminal,
every line of standard input is a message. Under torchrun, --tensor-model-parallel-size and
--pipeline-model-parallel-size split the network over several processes.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import PathUse, flag
from megatron.config.program_flags import ToolRequest, parse_over
from megatron.config.sampling_flags import SamplingFlags
from megatron.errors import DataError
from megatron.files.typed_lines import read_line

if TYPE_CHECKING:
    from megatron.inference.generation import GenerationEngine
    from megatron.parallel.mesh import ParallelMesh
    from trident.serve.conversation import Conversation


@dataclass(frozen=True)
class ChatFlags(SamplingFlags):
    """Flags of this tool, in addition to the trainer's."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    chat_template: str | None = flag(
        None, "chat template: plain, chatml, llama, dsgpt2, or a file with a Jinja template; if unset, the one used "
        "for fine-tuning, else the tokenizer's", path=PathUse.FILE_OR_FOLDER,
    )  # fmt: skip
    system: str = flag("", "system prompt")
    max_new_tokens: int | None = flag(None, "maximum number of tokens per answer; as many as fit if unset", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Chats until the input ends."""
    request = parse_over(ChatFlags, sys.argv[1:] if argv is None else argv, "chat.py", description=__doc__ or "")

    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(request.layout)
    try:
        _run(request, mesh)
    finally:
        close_mesh(mesh)
    return 0


def _run(request: ToolRequest[ChatFlags], mesh: ParallelMesh) -> None:
    from megatron.inference.generation import GenerationEngine, drive, serve_as_worker
    from megatron.inference.loaded_model import open_checkpoint

    engine = GenerationEngine(open_checkpoint(request.flags.load, request.given, mesh), max_sequences=1)
    if mesh.world.rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles it
        serve_as_worker(engine)
        return
    with drive(engine) as driver:
        talk(_conversation(request, engine, driver))


def _conversation(request: ToolRequest[ChatFlags], engine: GenerationEngine, driver: object) -> Conversation:
    from megatron.inference.sampling import Sampling
    from trident.serve.conversation import Conversation
    from trident.serve.requests.served_model import build_served_model

    flags, loaded = request.flags, engine.loaded
    flags.check_vocabulary(loaded.vocab_size)
    served = build_served_model(loaded, chat_template=flags.chat_template)
    sampling = Sampling.of_flags(flags, loaded.config.random.seed)
    return Conversation(served, driver, sampling, flags.max_new_tokens, flags.system)  # type: ignore[arg-type]


def talk(conversation: Conversation) -> None:
    """Reads messages and commands until the input ends, and prints answers."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        log.info(f"{conversation.served.name}: /reset, /system TEXT, /quit; Ctrl-C stops an answer, Ctrl-D exits.")
    for number in itertools.count(1):
        try:
            line = _read_line(is_terminal, number)
        except DataError as failure:  # the next line may be valid
            log.error(str(failure))
            continue
        text = None if line is None else line.strip()
        if text is None or text == "/quit":
            return
        if text.startswith("/") and not text.startswith("//"):
            _run_command(text, conversation)
        elif text:
            _answer(conversation, text[1:] if text.startswith("//") else text)


def _run_command(text: str, conversation: Conversation) -> None:
    """Executes a command, or logs an error."""
    command, rest = (part.strip() for part in (text.split(maxsplit=1) + [""])[:2])
    if command in ("/quit", "/reset") and rest:
        log.error(f"{command} expects no text. Use {command} alone, or /{text} to send it as a message.")
    elif command == "/reset":
        conversation.reset()
        log.info("Conversation cleared.")
    elif command == "/system":
        conversation.reset()
        conversation.system = rest
        log.info("Conversation cleared, " + ("with" if rest else "without") + " a system prompt.")
    else:
        log.error(f"unknown command {command}. Use /reset, /system TEXT or /quit; /{command} sends it as a message.")


def _answer(conversation: Conversation, question: str) -> None:
    """Prints the answer to one question as it is generated."""
    from trident.serve.requests.refusals import Refusal

    try:
        with _stoppable() as stops:
            for chunk in conversation.answer(question, lambda: bool(stops)):
                log.text(chunk, end="")
        log.text("")
    except Refusal as refusal:
        log.error(str(refusal))
        return
    if stops:
        log.info("(stopped)")
    elif conversation.was_cut:
        log.info("(truncated: see --max-new-tokens and --max-position-embeddings)")
    if conversation.dropped:
        log.info(f"({conversation.dropped} earlier messages were dropped: the model has too few positions)")


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Records Ctrl-C during an answer instead of raising: the current step must complete on all ranks."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = signal.signal(signal.SIGINT, record)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_line(is_terminal: bool, number: int) -> str | None:
    """The next line; None at the end of the input, or when it is interrupted.

    Raises:
        DataError: the line is not UTF-8.
    """
    try:
        line = read_line("> ", number)
        if line is None and is_terminal:
            print()
        return line
    except KeyboardInterrupt:
        print()
        return None


if __name__ == "__main__":
    process_exit.exit_with(main)
