r"""Writes a small corpus without downloads: text of the Python installation, or generated Turkish text.

    python tools/corpus/build_demo_corpus.py --output demo.jsonl
    python tools/corpus/build_demo_corpus.py --lang english --output english.jsonl
    python tools/corpus/build_demo_corpus.py --lang tr --output tr.jsonl --held-out held-out.txt \
        --questions questions.jsonl

Each line is {"text": ..., "src": ...}. The default is sources and docstrings of the Python installation, which are the
same bytes for the same interpreter. --lang english selects paragraphs of prose from these and the manual. --lang tr
generates stories, descriptions and dialogs, which only depend on --documents and --seed.
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

    output: str = flag(help="jsonl output file", path=PathUse.NEW_FILE)
    lang: str = flag(
        "python",
        "python: sources and docstrings; english: prose from manual, docstrings and comments; tr: generated Turkish",
        choices=("python", "english", "tr"),
    )
    megabytes: float | None = flag(
        None,
        f"python: size limit in megabytes (1 MB = 10^6 bytes), {_MEGABYTES:g} if unset; includes installed packages",
        at_least=10.0,
    )
    documents: int | None = flag(None, f"tr: number of documents, {_DOCUMENTS} if unset", at_least=1)
    seed: int | None = flag(None, f"tr: random seed, {_SEED} if unset", at_least=0)
    held_out: str | None = flag(
        None,
        "tr: text file for held-out evaluation documents, a tenth of --output",
        path=PathUse.NEW_FILE,
    )
    questions: str | None = flag(
        None, "tr: jsonl file for question-answer pairs, for fine-tuning", path=PathUse.NEW_FILE
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        turkish = ("documents", "seed", "held_out", "questions")
        others = {"tr": ("megabytes",), "python": turkish, "english": ("megabytes", *turkish)}
        for name in others[self.lang]:
            if (value := getattr(self, name)) is not None:
                yield f"--{name.replace('_', '-')} {value} has no effect with --lang {self.lang}. Drop it."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(DemoCorpusFlags, arguments, prog="build_demo_corpus.py", description=__doc__ or "")
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
