"""What the tests of featurizing share."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.corpus.workers.progress import ProgressLine


def write_jsonl(path: Path, texts: list[str]) -> str:
    """A jsonl file of these texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def quiet() -> ProgressLine:
    """A progress line that shows nothing."""
    return ProgressLine(None, 1, lambda text: None)
