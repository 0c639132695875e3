"""The compiled operations refuse operands that do not fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, logit_gradient, logit_statistics
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.embedding import lookup
from megatron.kernels.multi_tensor import add_, norm
from megatron.kernels.native.library import Library
from megatron.kernels.norms import add_norm, layer_norm

LINES = Path(__file__).with_name("refusals.txt").read_text().splitlines()
FUNCTIONS = (scaled_softmax, logit_gradient, logit_statistics, dropout_add, lookup, add_, norm, add_norm, layer_norm)
NAMES: dict[str, Any] = {
    function.__name__: partial(function, implementation=Implementation.CSRC) for function in FUNCTIONS
}
NAMES |= {"ops": torch.ops.megatron, "zeros": torch.zeros, "ones": torch.ones}
NAMES |= {"Dropout": Dropout, "LossGradients": LossGradients}


@pytest.mark.parametrize(("call", "sentence"), [line.split(" | ") for line in LINES if not line.startswith("#")])
def test_operands_that_do_not_fit_are_refused(compiled: Library, call: str, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        eval(call, NAMES)
