"""The choice among the forms of attention that compute only visible scores."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from megatron.kernels.attention.blocks import DocumentBlocks, WindowBlocks
from megatron.kernels.attention.bounds import Bounds
from megatron.kernels.attention.gpu import FlexAttention, VarlenAttention, has_flex, has_varlen

SMALLEST_FLEX_HEAD, LARGEST_FLASH_HEAD = 16, 256


class AttentionPlan(Protocol):
    """Attention with the bounds of a micro-batch; shared by layers with equal bounds."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Applies attention without dropout.

        Shapes: query `[b, a, s, d]`, key and value `[b, g, s, d]`; result as query.
        """
        ...


class Form(Enum):
    """A form of attention."""

    DENSE = "one call, with a bias of s x s entries if attention is neither plainly causal nor unbounded"
    DOCUMENTS = "one call per document"
    WINDOWS = "blocks as wide as the window"
    VARLEN = "flash attention over packed documents"
    FLEX = "compiled flex attention over visible blocks"


def plan_attention(query: torch.Tensor, bounds: Bounds, softcap: float | None = None) -> AttentionPlan | None:
    """The plan for a micro-batch without dropout and cached keys; None to use `attention` with a bias.

    Shapes: query `[b, a, s, d]`.
    """
    on_gpu = query.is_cuda
    match choose_form(query, bounds, softcap, varlen=on_gpu and has_varlen(), flex=on_gpu and has_flex()):
        case Form.DOCUMENTS if bounds.segment_ids is not None:
            return DocumentBlocks.plan(bounds, bounds.segment_ids, query, softcap)
        case Form.WINDOWS:
            return WindowBlocks.plan(bounds, softcap)
        case Form.VARLEN:
            return VarlenAttention.plan(bounds, query)
        case Form.FLEX:
            return FlexAttention.plan(bounds, query, softcap)
    return None


def choose_form(query: torch.Tensor, bounds: Bounds, softcap: float | None, *, varlen: bool, flex: bool) -> Form:
    """The fastest form for queries of this device, dtype and shape.

    On CPU, a call per document takes 0.15 to 0.6 times as long as one call with a mask, forward and backward at 1,024
    and 2,048 tokens (`benchmarks/attention.py`); only half-precision documents of a few tokens are slower.

    Shapes: query `[b, a, s, d]`.

    Args:
        varlen: torch has variable-length attention.
        flex: flex attention can be compiled.
    """
    length, size = query.shape[2:]
    has_documents = bounds.segment_ids is not None
    has_window = bounds.window is not None and bounds.window < length
    has_prefixes = bounds.prefix_mask is not None
    if query.device.type != "cuda":
        if has_documents:
            return Form.DOCUMENTS
        if has_prefixes or bounds.bidirectional:
            return Form.DENSE
        return Form.WINDOWS if has_window and bounds.window is not None and 2 * bounds.window <= length else Form.DENSE
    is_plain = softcap is None and not bounds.slopes and not has_prefixes
    if is_plain and not has_documents and not has_window:
        return Form.DENSE
    if varlen and is_plain and fits_flash(query.dtype, size):
        return Form.VARLEN
    return Form.FLEX if flex and size >= SMALLEST_FLEX_HEAD else Form.DENSE


def fits_flash(dtype: torch.dtype, size: int) -> bool:
    """True if the kernels of flash attention support this dtype and head size."""
    return dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= LARGEST_FLASH_HEAD
