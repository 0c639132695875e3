r"""An alias of preprocess_data.py, for upstream's name: same flags, same implementation, same bytes.

    python tools/preprocess_data_many_cores.py --input corpus.jsonl --output-prefix my-gpt2 --vocab-file vocab.json \
        --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod --workers 40

Upstream's version reorders documents and derives the integer type of ids from the padded vocabulary; here the output is
that of preprocess_data.py for any --workers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import process_exit
from megatron.config import parse_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    from preprocess_data import PreprocessFlags, run  # in this file's folder, the first entry of sys.path

    name = "preprocess_data_many_cores.py"
    return int(run(parse_flags(PreprocessFlags, arguments, prog=name, description=__doc__ or "")))


if __name__ == "__main__":
    process_exit.exit_with(main)
