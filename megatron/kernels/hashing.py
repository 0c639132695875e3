"""The integer hashes behind stateless random numbers, on tensors; `csrc/ops/base/hash.h` computes the same bits."""

from __future__ import annotations

import torch

# Constants of splitmix64: the golden-ratio increment and the two multipliers.
GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Constants of murmur3's 32-bit finalizer.
_MULTIPLIER_3, _MULTIPLIER_4 = 0x85EBCA6B, 0xC2B2AE35
_MASK_64 = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hashes integers to 64 bits; each one affects all bits of the result.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the finalizer of
    splitmix64).
    """
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & _MASK_64
        state = ((state ^ (state >> 30)) * _MULTIPLIER_1) & _MASK_64
        state = ((state ^ (state >> 27)) * _MULTIPLIER_2) & _MASK_64
        state ^= state >> 31
    return state


def mix_64(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 (products wrap; shifts extend the sign, so the sign bits are masked off)."""
    state = state ^ ((state >> 30) & ((1 << 34) - 1))
    state.mul_(signed(_MULTIPLIER_1, 64))
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(signed(_MULTIPLIER_2, 64))
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


def mix_32(state: torch.Tensor) -> torch.Tensor:
    """murmur3's finalizer on int32, in place.

    Source: Appleby, MurmurHash3, `fmix32`.
    """
    shifted = torch.empty_like(state)
    for shift, multiplier in ((16, _MULTIPLIER_3), (13, _MULTIPLIER_4), (16, None)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if multiplier is not None:
            state.mul_(signed(multiplier, 32))
    return state


def counters(first: int, last: int, device: torch.device) -> torch.Tensor:
    """Multiples of the golden-ratio increment: successive states of splitmix64.

    For torch.compile the numbers come from a bit operation: it takes a product of consecutive integers and a constant
    for an index, but this product wraps (torch 2.13 shifts it as a Python integer, which fails or writes out of
    bounds).
    """
    if torch.compiler.is_compiling():
        numbers = torch.arange(~first, ~last, -1, dtype=torch.int64, device=device).bitwise_not()
    else:
        numbers = torch.arange(first, last, dtype=torch.int64, device=device)
    return numbers.mul_(signed(GOLDEN, 64))


def low_half(state: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 tensor, as int32."""
    return state.to(torch.int32)  # wraps


def half_words(words: torch.Tensor) -> torch.Tensor:
    """The two signed halves of each word, the low one first.

    Shapes: words `[..., n]` int64 or int32; result `[..., 2n]` of half the width.
    """
    return words.view(torch.int32 if words.dtype is torch.int64 else torch.int16)


def signed(number: int, bits: int) -> int:
    """Reinterprets the bits as a signed integer."""
    return number - (1 << bits) if number >> (bits - 1) else number
