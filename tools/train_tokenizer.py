"""Trains a byte-level BPE vocabulary on jsonl text and writes it in GPT-2's format.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix demo

writes demo-vocab.json and demo-merges.txt, for --vocab-file and --merge-file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config.flags import Area, flag, parse_flags

_BYTES = 256


@dataclass(frozen=True)
class TrainTokenizerFlags(Area):
    """What this tool asks for."""

    input: tuple[str, ...] = flag(help="jsonl files, also .gz .bz2 .xz .zst; - is standard input", nargs="+")
    output_prefix: str = flag(help="path of the outputs without -vocab.json and -merges.txt")
    vocab_size: int = flag(50257, "entries of the vocabulary, <|endoftext|> included", at_least=_BYTES + 1, below=2**31)
    json_keys: tuple[str, ...] = flag(("text",), "keys whose texts are used", nargs="+", spelled=("--json-key",))
    min_frequency: int = flag(2, "how often a pair must occur to be merged", at_least=1)
    megabytes: float | None = flag(
        None, "learn from about so many megabytes, spread evenly over the input; all of it if unset", above=0.0
    )
    on_bad_line: str = flag(
        "error", "what a line that is no good JSON document does: stop, or be left out", choices=("error", "skip")
    )


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(TrainTokenizerFlags, sys.argv[1:], prog="train_tokenizer.py", description=__doc__ or "")
    from megatron.corpus.inputs import expand_inputs
    from megatron.corpus.progress import Progress
    from megatron.corpus.sources import total_bytes
    from megatron.corpus.vocab import (
        check_vocabulary_place,
        save_byte_level_vocabulary,
        texts_of,
        train_byte_level,
    )

    inputs = expand_inputs(flags.input)
    check_vocabulary_place(flags.output_prefix)
    size = total_bytes(inputs)
    write_bar = sys.stderr.write if sys.stderr.isatty() else None
    progress = Progress(size, 10_000, log.info, write_bar)
    share = 1.0 if flags.megabytes is None or not size else min(1.0, flags.megabytes * 1e6 / size)
    texts = texts_of(inputs, flags.json_keys, share, flags.on_bad_line == "skip", progress)
    vocabulary, merges = train_byte_level(texts, flags.vocab_size, flags.min_frequency)
    progress.finish()
    paths = save_byte_level_vocabulary(flags.output_prefix, vocabulary, merges)
    log.info(f"Wrote {paths[0]} ({len(vocabulary)} entries) and {paths[1]} ({len(merges)} merges).")
    return 0


if __name__ == "__main__":
    log.exit_with(main)
