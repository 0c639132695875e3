"""A block: a stretch of an input, as it passes from the code that cuts inputs to the code that reads documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from megatron.corpus.inputs.long_lines import LONG_LINE_BYTES
from megatron.errors import DataError
from megatron.files.exact import read_exactly
from megatron.files.plain import open_plain

STANDARD_INPUT = "-"
LINE_END = "\n"  # what ends a document in plain text, unless another separator is given
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputBlock:
    """Whole lines of one input; the last line of an input may lack its newline.

    Args:
        source: the input as it was given.
        start: byte offset in the (uncompressed) input.
        size: bytes of the block.
        data: its bytes, or None when they are to be read from the file `source`.
        input_bytes: bytes of the input as it lies on disk that were consumed for this block.
        layout: how it holds documents, see `layout_of`; of a Parquet file `start` and `size` count rows' bytes in
            Arrow's form, of a store the bytes of its rows as lines of JSON.
        first_line: number of the input's documents before this block, where a share of the input begins with it and
            they are not found by counting newlines.
    """

    source: str
    start: int
    size: int
    data: bytes | None
    input_bytes: int
    layout: str = "jsonl"
    first_line: int = 0

    def read(self) -> bytes:
        """The bytes of the block.

        Raises:
            DataError: the file has become shorter or unreadable since it was cut.
        """
        if self.data is not None:
            return self.data
        try:
            with open_plain(self.source, buffering=0) as file:
                file.seek(self.start)
                data = read_exactly(lambda size, _: file.read(size), self.size)
        except OSError as failure:
            raise unreadable(self.source, self.start, failure) from failure
        if len(data) != self.size:
            raise DataError(
                f"{self.source}: ended at byte offset {self.start + len(data)} instead of "
                f"{self.start + self.size}: it was truncated while it was read. Start again when nothing writes to it."
            )
        return data


def as_block_data(data: bytearray) -> bytes:
    """Bytes as a block carries them: copied to `bytes`, which is faster to work on, unless there are too many."""
    return bytes(data) if len(data) < LONG_LINE_BYTES else cast(bytes, data)


def shown_path(path: str) -> str:
    """How an input is called in messages."""
    return "<stdin>" if path == STANDARD_INPUT else path


def unreadable(path: str, offset: int, failure: BaseException) -> DataError:
    """The error of an input that is damaged at a byte offset of its text."""
    return DataError(
        f"{shown_path(path)}: cannot be read past byte offset {offset} of its text: {failure}. The file is "
        "damaged or not what its suffix says; "
        "fetch it again or leave it out."
    )
