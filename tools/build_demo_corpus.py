"""Writes a real corpus without a download: the sources and docstrings that come with every Python installation.

    python tools/build_demo_corpus.py --output demo.jsonl

Each line is {"text": ..., "src": ...}. One interpreter always gives the same bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import ConfigSection, flag, parse_flags


@dataclass(frozen=True)
class DemoCorpusFlags(ConfigSection):
    """What this tool asks for."""

    output: str = flag(help="jsonl file to write")
    megabytes: float = flag(
        11.0, "stop after so many megabytes (1 MB = 10^6 bytes), installed packages included", at_least=10.0
    )


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(DemoCorpusFlags, sys.argv[1:], prog="build_demo_corpus.py", description=__doc__ or "")
    from megatron.corpus.inputs.demo import write_demo_corpus

    corpus = write_demo_corpus(Path(flags.output), int(flags.megabytes * 1e6))
    log.info(f"Wrote {flags.output}: {corpus.documents} documents, {corpus.size_bytes / 1e6:.1f} MB.")
    return 0


if __name__ == "__main__":
    log.exit_with(main)
