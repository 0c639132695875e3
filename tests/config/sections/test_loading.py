"""Which checkpoint a run starts from."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import LoadingConfig
from tests.config.command_lines import small


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        ({}, None),
        ({"ckpt_step": 0}, 0),
        ({"load_tag": "global_step500"}, 500),
        ({"load_tag": "iter_0000020"}, 20),
        ({"load_tag": "iter_0000000", "ckpt_step": 0}, 0),
    ],
)
def test_the_step_to_load(flags: dict[str, Any], step: int | None) -> None:
    assert LoadingConfig(load="x", **flags).load_step == step


def test_a_fork_has_another_name_for_a_reset_of_the_iteration() -> None:
    loading = small("--load x --reset-progress").loading
    assert loading.finetune and loading.takes_optimizer_state
