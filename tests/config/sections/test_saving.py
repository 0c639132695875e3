"""Second names of checkpoints, and what retention asks for."""

from __future__ import annotations

import pytest

from megatron.config import SavingConfig
from megatron.errors import ConfigError


def test_a_second_name_has_the_step_and_may_have_the_epoch() -> None:
    assert SavingConfig().link_name(2, 500) is None
    assert SavingConfig(checkpoint_link="epoch{epoch}-step{step}").link_name(2, 500) == "epoch2-step500"
    assert SavingConfig(checkpoint_link="step_{step}.ckpt").link_name(2, 500) == "step_500.ckpt"


def test_an_address_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="--save s3://bucket/run is an address, but must be a folder"):
        SavingConfig(save="s3://bucket/run", save_interval=1)
    assert SavingConfig(save_secondary="s3://bucket/run").save_secondary == "s3://bucket/run"
    assert SavingConfig(save_secondary="C-drive/run:1").save_secondary == "C-drive/run:1"
