"""Facts about the machine and the tokenizer that complete a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Facts about the machine."""

    device_type: str  # cpu or cuda
    world_size: int
    supports_fp16: bool
    supports_bf16: bool
    device_reason: str = ""  # why there is no CUDA, where that is known
    supports_fp8: bool = False  # products of float8 matrices


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts about a tokenizer."""

    vocab_size: int
    eod_id: int
    fingerprint: str
