"""The same tool as preprocess_data.py under upstream's second name: same flags, same engine, same bytes.

    python tools/preprocess_data_many_cores.py --input corpus.jsonl --output-prefix my-gpt2 --vocab-file vocab.json \
        --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod --workers 40

Upstream's writes the documents in another order than they came in and chooses the width of an id by the padded
vocabulary; here the documents keep their order and the files are those of preprocess_data.py, whatever --workers is.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config import parse_flags


def main() -> int:
    """Runs the tool on the command line's flags."""
    from preprocess_data import PreprocessFlags, run  # beside this file, where Python looks first

    name = "preprocess_data_many_cores.py"
    return int(run(parse_flags(PreprocessFlags, sys.argv[1:], prog=name, description=__doc__ or "")))


if __name__ == "__main__":
    log.exit_with(main)
