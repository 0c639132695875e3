"""Which implementation is asked for: by --kernels, by upstream's switches, or not at all."""

from __future__ import annotations

import pytest

from megatron.config import KernelConfig
from megatron.config.sections.computation import AUTO, BLOCK_OPERATIONS, OPERATIONS
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"kernels": "csrc"}, dict.fromkeys(OPERATIONS, "csrc")),
        ({"kernels": "softmax=torch, csrc"}, {**dict.fromkeys(OPERATIONS, "csrc"), "softmax": "torch"}),
        ({"kernels": "norm=torch,rotary=csrc"}, {"norm": "torch", "rotary": "csrc"}),
        ({"masked_softmax_fusion": False, "rope_fusion": False}, {"softmax": "torch", "rotary": "torch"}),
        ({"compile": True}, dict.fromkeys(BLOCK_OPERATIONS, "torch")),
        ({"compile": True, "kernels": "csrc,norm=auto"}, {**dict.fromkeys(OPERATIONS, "csrc"), "norm": "auto"}),
        ({"persist_layer_norm": False, "kernels": "csrc"}, {**dict.fromkeys(OPERATIONS, "csrc"), "norm": "torch"}),
    ],
)
def test_what_is_requested(fields: dict[str, object], expected: dict[str, str]) -> None:
    assert KernelConfig(**fields).requested == {**dict.fromkeys(OPERATIONS, AUTO), **expected}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kernels": "cuda"}, "--kernels cuda: unknown implementation 'cuda'. Use one of auto, csrc, torch"),
        ({"kernels": "softmx=csrc"}, "unknown operation 'softmx'. Use one of softmax, norm"),
        ({"kernels": "norm=csrc,norm=torch"}, "names norm twice"),
        ({"kernels": "csrc,torch"}, "names all operations twice"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        KernelConfig(**fields)  # type: ignore[arg-type]
