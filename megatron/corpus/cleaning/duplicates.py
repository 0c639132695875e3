"""Documents that were there before: the part that must see all documents in order, so it runs in the parent."""

from __future__ import annotations

from megatron.corpus.cleaning.cleaner import CleanedBlock
from megatron.corpus.cleaning.key_table import KeyTable
from megatron.corpus.cleaning.options import CleanOptions
from megatron.corpus.cleaning.verdicts import EXACT_DUPLICATE, Verdict


class DuplicateFilter:
    """Drops documents like an earlier one; the first stays."""

    def __init__(self, options: CleanOptions) -> None:
        self._exact = ExactDuplicates() if options.exact_duplicates else None

    def judge(self, cleaned: CleanedBlock) -> list[Verdict | None]:
        """A verdict for each document of a block that passed so far, None where it stays."""
        verdicts: list[Verdict | None] = [None] * len(cleaned.passed)
        if self._exact is not None:
            verdicts = self._exact.judge(cleaned)
        return verdicts


class ExactDuplicates:
    """Remembers the hash of every text: 21 to 43 bytes a document (16 of them the hash, the rest free slots)."""

    def __init__(self) -> None:
        self._table = KeyTable(2, with_values=False)

    def judge(self, cleaned: CleanedBlock) -> list[Verdict | None]:
        """A verdict for each document of a block that passed so far, None where it is the first of its kind."""
        seen, _ = self._table.find(cleaned.digests)
        hashes = cleaned.digests.tobytes()
        first: dict[bytes, int] = {}
        for number in range(len(seen)):
            if first.setdefault(hashes[16 * number : 16 * number + 16], number) != number:
                seen[number] = True
        self._table.put(cleaned.digests[~seen])
        return [Verdict(EXACT_DUPLICATE) if is_seen else None for is_seen in seen.tolist()]
