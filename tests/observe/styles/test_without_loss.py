"""What the styles show of steps without a counted token."""

from __future__ import annotations

from typing import Any

import pytest

from examples.dsgpt2 import log_style as dsgpt2
from examples.gpt2_all_in import log_style as all_in_one
from examples.hello_deepspeed import log_style as hello_deepspeed
from examples.jax_lm_training.jax_lm import log_style as jax_lm
from megatron.observe.console import LogPosition
from megatron.observe.styles import megatron, short
from tests.train.samples import metrics


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        (all_in_one, "Loss: none"),
        (dsgpt2, "[Loss] none |"),
        (hello_deepspeed, "Loss: none"),
        (jax_lm, "loss: none"),
        (short, "| loss none |"),
        (megatron, "| lm loss: none |"),
    ],
)
def test_there_is_no_number(style: Any, shown: str) -> None:
    (line,) = style.iteration_lines(metrics(lm_loss=None), LogPosition(7, 20))
    assert shown in line
