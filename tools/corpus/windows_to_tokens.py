"""Converts windows in Parquet files to a `.bin/.idx` pair that `pretrain_gpt.py --data-path` reads.

    python tools/corpus/windows_to_tokens.py --windows out/wt.train --output-prefix out/wt_text_document --append-eod

From files of `tools/corpus/featurize.py`, the original documents are restored. Each window of other files becomes a
document of the ids in its attention_mask. The inverse is `tools/corpus/featurize.py --data-prefix`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.sections.data import TokenizerFileFlags, optional_tokenizer_type


@dataclass(frozen=True)
class BackFlags(TokenizerFileFlags):
    """Flags of this program."""

    windows: tuple[str, ...] = flag(
        help="Parquet files, patterns, or paths without -00000-of-0000N, in the order of the result",
        nargs="+",
        path=PathUse.PREFIX,
    )
    output_prefix: str = flag(help="data prefix of the output, without .bin/.idx", path=PathUse.NEW_PREFIX)
    append_eod: bool = flag(False, "append the end-of-document id to every document")
    tokenizer_type: str | None = optional_tokenizer_type("tokenizer of files that do not record it")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(BackFlags, arguments, prog="windows_to_tokens.py", description=__doc__ or "")
    from megatron.tokenizers.record import TokenizerRecord
    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
    from trident.corpus.featurize.windows_to_tokens import windows_to_tokens

    process_exit.interrupt_on_sigterm()
    record = TokenizerRecord.of(build_tokenizer(TokenizerChoice.of(flags))) if flags.tokenizer_type else None
    result = windows_to_tokens(flags.windows, flags.output_prefix, record, flags.append_eod)
    kind = "joined" if result.whole else "as one document each (their files do not record document boundaries)"
    log.info(
        f"Wrote {flags.output_prefix} (.bin, .idx): {result.documents} documents, {result.tokens} tokens, from "
        f"{result.windows} windows {kind}; skipped {result.empty} empty ones."
    )
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
