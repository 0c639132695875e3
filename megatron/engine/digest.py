"""A digest of a tensor's bits: one number that changes with any single bit, and cheap beside a training step.

Digests of the parts of a tensor add up to that of the whole, so that copies can be compared that ranks have divided
differently among themselves.
"""

from __future__ import annotations

import torch

CHUNK = 1 << 18
# Sums keep this many bits, so that the negative of a digest is one too.
_KEPT = (1 << 62) - 1
_WEIGHT, _CHUNK_WEIGHT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # any odd numbers
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Digester:
    """Computes digests on one device.

    An element counts as its bits, read as an integer, times an odd number that depends on its position, all modulo
    2^64. So a single bit changes the digest for certain, and other changes hardly ever leave it the same.
    """

    def __init__(self, on_device: torch.device) -> None:
        positions = torch.arange(CHUNK, dtype=torch.int64, device=on_device)
        mixed = (2 * positions + 1) * _signed(_WEIGHT)
        self._weights = (mixed ^ (mixed >> 31)) | 1  # not linear in the position, so that errors do not cancel in rows
        self._products = torch.empty_like(self._weights)

    def digest(self, values: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The digest of a tensor or of a part of one; does not synchronize.

        Args:
            values: contiguous elements of at most four bytes.
            first: position of the first of them in the whole tensor.

        Shapes: result `[]` int64.
        """
        bits = values.detach().view(-1).view(_INTEGERS[values.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        done = 0
        while done < len(bits):
            chunk, offset = divmod(first + done, CHUNK)
            count = min(CHUNK - offset, len(bits) - done)
            products = self._products[:count]
            torch.mul(bits[done : done + count], self._weights[offset : offset + count], out=products)
            total += products.sum() * _signed(pow(_CHUNK_WEIGHT, chunk + 1, 1 << 64))
            done += count
        return total


def comparable(digests: torch.Tensor) -> torch.Tensor:
    """Sums of digests in the form in which ranks compare them: not negative, and so that their negatives exist.

    Shapes: `[...]` int64.
    """
    return digests & _KEPT


def _signed(number: int) -> int:
    """A whole number modulo 2^64, as an int64 holds it."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number
