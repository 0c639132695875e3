"""Opening conversations for fine-tuning: seconds and memory of the first start, of the next one, and rows per second.

    python benchmarks/conversations.py --examples 1000000

Prints one JSON line per measurement. Each start is a new process; `grown_by` is the peak growth of its memory.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, DataConfig, flag, parse_flags
from megatron.data.build import build_split_datasets
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.sources.source import DataRequest
from megatron.tokenizers.chat import load_chat_template
from megatron.tokenizers.encoders.fast_encoder import resident_bytes
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level

_WORDS = ("the", "of", "and", "to", "in", "that", "is", "was", "for", "on", "with", "as", "by", "at", "from", "his")


@dataclass(frozen=True)
class ExamplesFlags(ConfigSection):
    """Flags of this program."""

    examples: int = flag(100_000, "conversations in the file", at_least=1)
    seq_length: int = flag(512, "tokens of a row", at_least=64)
    rows: int = flag(2_000, "rows to read", at_least=1)
    chat_template: str = flag("plain", "how conversations are written: a name, or a file with a Jinja template")
    renders: int = flag(1_000, "single conversations to render", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the conversations, opens them twice, and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ExamplesFlags, words, prog="conversations.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_conversations(folder / "chat.jsonl", flags.examples)
        vocabulary, merges = train_byte_level([path.read_text(encoding="utf-8")[: 1 << 20]], 400)
        files = save_byte_level_vocabulary(str(folder / "demo"), vocabulary, [list(pair) for pair in merges])
        for start in ("first_start", "next_start"):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                process.submit(measure, start, str(path), flags, [str(file) for file in files]).result()
        measure_renders(flags)
    return 0


def write_conversations(path: Path, count: int) -> Path:
    """Writes conversations of one question with one answer, about 45 words together."""
    drawn = random.Random(1)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            question, answer = (" ".join(drawn.choices(_WORDS, k=drawn.randrange(5, most))) for most in (40, 60))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def measure(start: str, path: str, flags: ExamplesFlags, files: Sequence[str]) -> None:
    """Opens the file as a run does, packed, and reads rows."""
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *files))
    tokenizer.encode("the")
    length = flags.seq_length
    data = DataConfig(seq_length=length, data_path=(path,), split="98,2,0")
    before, began_at = resident_bytes() or 0, time.perf_counter()
    options = ExampleOptions(flags.chat_template, pack=True, on_targets_only=True)
    datasets, _ = build_split_datasets(
        DataRequest(data, length, 1, (flags.rows, 1, 0), tokenizer=tokenizer, examples=options)
    )
    opened = time.perf_counter() - began_at
    if datasets.train is None:
        raise SystemExit("no rows")
    began_at = time.perf_counter()
    for number in range(flags.rows):
        datasets.train.read(number)
    read = time.perf_counter() - began_at
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print_figure(
        "conversations", f"{start}_seconds", opened, "s", examples=flags.examples, grown_by=f"{grown / 1e6:.0f} MB"
    )
    print_figure("conversations", f"{start}_rows", flags.rows / read, "rows/s", tokens=length)


def measure_renders(flags: ExamplesFlags) -> None:
    """Renders one conversation after the other, as a server does."""
    template = load_chat_template(flags.chat_template, None)
    messages = [{"role": role, "content": " ".join(_WORDS)} for role in ("user", "assistant", "user")]
    seconds = []
    for _ in range(flags.renders):
        began_at = time.perf_counter()
        template.render(messages, add_generation_prompt=True)
        seconds.append(1e3 * (time.perf_counter() - began_at))
    seconds.sort()
    worst = seconds[int(0.99 * len(seconds))]
    print_figure("conversations", "render_ms", seconds[len(seconds) // 2], "ms", spread=(seconds[0], worst))


if __name__ == "__main__":
    process_exit.exit_with(main)
