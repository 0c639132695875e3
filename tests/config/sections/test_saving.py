"""Second names of checkpoints, and what retention asks for."""

from __future__ import annotations

import pytest

from megatron.config import SavingConfig
from megatron.errors import ConfigError
from tests.config.command_lines import small


def test_a_second_name_has_the_step_and_may_have_the_epoch() -> None:
    assert SavingConfig().link_name(2, 500) is None
    assert SavingConfig(checkpoint_link="epoch{epoch}-step{step}").link_name(2, 500) == "epoch2-step500"
    assert SavingConfig(checkpoint_link="step_{step}.ckpt").link_name(2, 500) == "step_500.ckpt"


@pytest.mark.parametrize("name", ["epoch{epoch}", "iter_{step}", "../{step}", "a/{step}", "{step:d}", "{rank}-{step}"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint-link .* is not a valid link name") as failure:
        SavingConfig(checkpoint_link=name)
    assert name in str(failure.value)


def test_a_folder_without_an_interval_holds_the_end_of_a_run_and_says_so() -> None:
    (notice,) = small("--save out").notices
    assert notice.startswith("--save out without --save-interval: a checkpoint is only written at the end")
    for told in ("--save-interval 5", "--save-interval 0", "--load out --eval-only"):
        assert not any("--save-interval" in notice for notice in small(f"--save out {told}").notices)


def test_an_address_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="--save s3://bucket/run is an address, but must be a folder"):
        SavingConfig(save="s3://bucket/run", save_interval=1)
    assert SavingConfig(save_secondary="s3://bucket/run").save_secondary == "s3://bucket/run"
    assert SavingConfig(save_secondary="C-drive/run:1").save_secondary == "C-drive/run:1"
