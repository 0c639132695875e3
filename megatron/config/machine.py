"""Facts about the machine and the tokenizer that complete a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The device and the number formats of a machine, and the processes of a run."""

    device_type: str  # cpu or cuda
    world_size: int
    supports_fp16: bool
    supports_bf16: bool
    device_reason: str = ""  # why CUDA is unavailable, if known
    supports_fp8: bool = False  # float8 matrix products


@dataclass(frozen=True)
class TokenizerFacts:
    """The vocabulary of a tokenizer, and a fingerprint of its files."""

    vocab_size: int
    eod_id: int
    fingerprint: str
