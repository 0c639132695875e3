"""Detection of file formats by their first bytes, for error messages of readers that expect another one."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from megatron.files.plain import open_plain

LOOKS_LIKE = "The file looks like "
FIRST_BYTES = 512  # the signature of a tar archive is at byte 257
_FORMATS = (
    (rb"\x1f\x8b", "a gzip file. Decompress it (gunzip), or call an input *.gz"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "a zstd file. Decompress it (zstd -d), or call an input *.zst"),
    (rb"\xfd7zXZ\x00", "an xz file. Decompress it (xz -d), or call an input *.xz"),
    (rb"BZh[1-9]", "a bzip2 file. Decompress it (bunzip2), or call an input *.bz2"),
    (rb"\x04\x22\x4d\x18", "an lz4 file. Decompress it (lz4 -d)"),
    (rb"PK\x03\x04", "a zip archive. Extract it (unzip) and give the files in it"),
    (rb"(?s:.{257})ustar", "a tar archive. Extract it (tar -xf) and give the files in it"),
    (rb"PAR1", "a Parquet file. Call an input *.parquet"),
    (rb"ARROW1|\xff{4}", "an Arrow file of the datasets library. Give it, or its folder, as hf://PATH"),
    (rb"WARC/\d", "a web archive (WARC, WET). Write the text of each record as a line of JSON (warcio reads them)"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16. Convert it: iconv -f UTF-16 -t UTF-8"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the file itself. Fetch that with git lfs pull"),
    (rb"(?i)\s*<(?:!doctype|html)", "a page of a web site. Download the file itself"),
    (
        rb"[\w+/]+== \d+\r?\n",
        "ranks of tiktoken. Give the tokenizer as tokenizer.json, with --tokenizer-type HFTokenizer",
    ),
)
_NO_JSON_LINES = (
    (rb"\s*\[\s*[\[{\"]", "a JSON array. Write each of its elements on a line of its own: jq -c '.[]'"),
    (rb"\s*\{[ \t]*\r?\n", "JSON whose objects take several lines. Write each on a line of its own: jq -c ."),
    (
        rb'"?\w+"?(?:[,;\t]"?\w+"?)+\r?\n',
        "a table with a header (csv). Give it as hf://PATH.csv, or write it as jsonl",
    ),
)


def recognized(beginning: bytes, *, as_lines: bool = False) -> str:
    """A sentence with the detected format of an unreadable file and a remedy; empty if unknown.

    Args:
        as_lines: JSON lines are expected, so that other JSON and tables are detected, too.
    """
    for pattern, advice in (*_FORMATS, *(_NO_JSON_LINES if as_lines else ())):
        if re.match(pattern, beginning):
            return LOOKS_LIKE + advice
    return ""


def recognized_file(path: str) -> str:
    """The sentence of `recognized` for a file; empty if its format matches its name."""
    with contextlib.suppress(OSError), open_plain(path) as file:
        advice = recognized(file.read(FIRST_BYTES))
        return "" if advice.endswith(Path(path).suffix or " ") else advice
    return ""
