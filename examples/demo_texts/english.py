"""The English of a Python installation: paragraphs of its manual, docstrings and comments that are running text.

Standard library only. One subject and one style, so that a network that trains for two minutes writes sentences.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trident.corpus.inputs.demo import DemoCorpus, corpus_documents, write_corpus

LEAST_BYTES, ENOUGH_BYTES = 500_000, 1_400_000
_LEAST_LETTERS, _LEAST_SPACES, _LEAST_SHARE = 60, 9, 0.93
_PLAIN = frozenset(" ,.'-\n")
_CODE = (">>>", "::")
_COMMENT = re.compile(r"\s*#+ ?(.*)$")
_ITEM = re.compile(r"^[-*] ")


def write_prose(path: Path) -> DemoCorpus:
    """Writes jsonl lines {"text", "src"}, a document for each page of the manual and each source file.

    Raises:
        DataError: this Python contains hardly any text.
        StorageError: the file cannot be written; checked before the work where possible.
    """
    problem = (
        f"bytes of English are in the standard library of this Python; {LEAST_BYTES} are needed. Use an "
        "interpreter with its full standard library, or train on a text of your own: python train_on_text.py my.txt"
    )
    return write_corpus(path, prose_documents, ENOUGH_BYTES, LEAST_BYTES, problem)


def prose_documents() -> Iterator[tuple[str, str]]:
    """(source, text) of the manual and then of the standard library, each paragraph once."""
    seen: set[str] = set()
    for source, text in _texts():
        new = [paragraph for paragraph in paragraphs(text) if paragraph not in seen]
        new = list(dict.fromkeys(new))
        seen.update(new)
        if new:
            yield source, "\n\n".join(new)


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a text that are sentences rather than code, tables or lists of names, each as one line."""
    for part in re.split(r"\n\s*\n", text):
        paragraph = _ITEM.sub("", " ".join(inspect.cleandoc(part).split()))
        if _is_prose(paragraph):
            yield paragraph


def comments(source: str) -> str:
    """The comments of a source file; blank lines divide those that code divides."""
    lines = [match.group(1) if (match := _COMMENT.match(line)) else "" for line in source.split("\n")]
    return "\n".join(lines)


def _texts() -> Iterator[tuple[str, str]]:
    for name, text in sorted(_manual().items()):
        yield f"manual/{name}", text
    for source, text in corpus_documents():
        if not source.startswith("stdlib/"):
            return
        yield source, text if source.endswith("#docstrings") else comments(text)


def _manual() -> Mapping[str, str]:
    """The pages of `help()`, which some distributions leave out."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}
    return topics


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < _LEAST_LETTERS or not paragraph[0].isupper() or paragraph[-1] not in ".!?:":
        return False
    if paragraph.count(" ") < _LEAST_SPACES or any(mark in paragraph for mark in _CODE):
        return False
    plain = sum(letter.isalpha() or letter in _PLAIN for letter in paragraph)
    return plain > _LEAST_SHARE * len(paragraph)
