"""Writes a corpus of real text without a download, from the sources and docstrings of the Python installation.

    python tools/build_demo_corpus.py --output demo.jsonl

Each line is {"text": ..., "src": ...}. The same interpreter always produces the same bytes.
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
    """Flags of this tool."""

    output: str = flag(help="jsonl file to write")
    megabytes: float = flag(
        11.0, "size limit in megabytes (1 MB = 10^6 bytes); installed packages are included", at_least=10.0
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
