"""When the run saves, evaluates, reports and stops."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ControlConfig, SavingConfig
from megatron.errors import ConfigError


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
    assert ControlConfig(load="x", **flags).load_step == step


@pytest.mark.parametrize(
    ("texts", "ranges"),
    [
        ((), ()),
        (("3-5",), ((3, 5),)),
        (("10-11", "3-5"), ((3, 5), (10, 11))),
        (("3-5", "5-8"), ((3, 8),)),
        (("3-9", "4-5"), ((3, 9),)),
        (("3-5", "6-8"), ((3, 5), (6, 8))),
        (("7-7", "7-7"), ((7, 7),)),
    ],
)
def test_ranges_are_sorted_and_merged_where_they_overlap(texts: tuple[str, ...], ranges: tuple[object, ...]) -> None:
    assert ControlConfig(skip_train_iteration_range=texts).skip_ranges == ranges


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"skip_train_iteration_range": ("5-2",)}, "--skip-train-iteration-range 5-2 is not a range of steps"),
        ({"save": "out"}, "--save out needs --save-interval"),
        ({"from_scratch": True, "finetune": True}, "--from-scratch and --finetune contradict each other"),
        ({"log_level": "loud"}, "--log-level loud is not known"),
        ({"log_interval": 0}, "--log-interval 0 is out of range"),
    ],
)
def test_invalid_values_are_rejected(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ControlConfig(**flags)


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket", "file:/tmp/run", "hdfs://node:8020/run"])
@pytest.mark.parametrize("name", ["save", "load", "run_dir"])
def test_an_address_is_no_folder(name: str, address: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--{name.replace('_', '-')} {address} is an address, and a folder is needed"
    ):
        ControlConfig(**{name: address, **({"save_interval": 1} if name == "save" else {})})


def test_an_address_is_no_folder_for_copies() -> None:
    with pytest.raises(ConfigError, match="--save-secondary s3://bucket/run is an address"):
        SavingConfig(save_secondary="s3://bucket/run")
    assert SavingConfig(save_secondary="C-drive/run:1").save_secondary == "C-drive/run:1"
