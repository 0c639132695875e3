r"""Writes a small corpus without a download: the Python installation's own text, or generated Turkish text.

    python tools/corpus/build_demo_corpus.py --output demo.jsonl
    python tools/corpus/build_demo_corpus.py --lang english --output english.jsonl
    python tools/corpus/build_demo_corpus.py --lang tr --output tr.jsonl --held-out held-out.txt \
        --questions questions.jsonl

Each line is {"text": ..., "src": ...}. Without --lang it is the sources and docstrings of the Python installation, and
the same interpreter always produces the same bytes. With --lang english it is the paragraphs of these, and of the
manual, that are running text. With --lang tr it is stories, descriptions and talks, whose bytes depend on --documents
and --seed alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags

_MEGABYTES = 11.0
_DOCUMENTS, _SEED = 4000, 1234


@dataclass(frozen=True)
class DemoCorpusFlags(ConfigSection):
    """Flags of this tool."""

    output: str = flag(help="jsonl file to write", path=PathUse.NEW_FILE)
    lang: str = flag(
        "python",
        "python: sources and docstrings; english: sentences of manual, docstrings and comments; tr: generated Turkish",
        choices=("python", "english", "tr"),
    )
    megabytes: float | None = flag(
        None,
        f"python: size limit in megabytes (1 MB = 10^6 bytes), {_MEGABYTES:g} unless given; installed packages "
        "are included",
        at_least=10.0,
    )
    documents: int | None = flag(None, f"tr: documents to write, {_DOCUMENTS} unless given", at_least=1)
    seed: int | None = flag(None, f"tr: seed of the documents, {_SEED} unless given", at_least=0)
    held_out: str | None = flag(
        None,
        "tr: text file for held-out documents, a tenth as many as in --output, for evaluation",
        path=PathUse.NEW_FILE,
    )
    questions: str | None = flag(
        None, "tr: jsonl file for questions with answers, for fine-tuning", path=PathUse.NEW_FILE
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        turkish = ("documents", "seed", "held_out", "questions")
        others = {"tr": ("megabytes",), "python": turkish, "english": ("megabytes", *turkish)}
        for name in others[self.lang]:
            if (value := getattr(self, name)) is not None:
                yield f"--{name.replace('_', '-')} {value} has no effect with --lang {self.lang}; remove it."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(DemoCorpusFlags, words, prog="build_demo_corpus.py", description=__doc__ or "")
    if flags.lang == "tr":
        _write_turkish(flags)
        return 0
    if flags.lang == "english":
        from examples.demo_texts.english import write_prose

        corpus = write_prose(Path(flags.output))
    else:
        from trident.corpus.inputs.demo import write_demo_corpus

        corpus = write_demo_corpus(Path(flags.output), int((flags.megabytes or _MEGABYTES) * 1e6))
    log.info(f"Wrote {flags.output}: {corpus.documents} documents, {corpus.size_bytes / 1e6:.1f} MB.")
    return 0


def _write_turkish(flags: DemoCorpusFlags) -> None:
    from examples.demo_texts.turkish import write_turkish_corpus

    corpus = write_turkish_corpus(
        Path(flags.output),
        flags.documents or _DOCUMENTS,
        _SEED if flags.seed is None else flags.seed,
        held_out=None if flags.held_out is None else Path(flags.held_out),
        pairs=None if flags.questions is None else Path(flags.questions),
    )
    files = ", ".join(name for name in (flags.output, flags.held_out, flags.questions) if name)
    log.info(
        f"Wrote {files}: {corpus.documents} documents, {corpus.held_out} held out, {corpus.questions} questions, "
        f"{corpus.size_bytes / 1e6:.1f} MB."
    )


if __name__ == "__main__":
    process_exit.exit_with(main)
