"""The callbacks of companions, which the trainer imports by name."""

from __future__ import annotations

from importlib import import_module

import pytest

from megatron.train.callback import Callback
from megatron.train.callbacks.table import COMPANION_CALLBACKS
from tests.train.samples import run_config


@pytest.mark.parametrize("flag", COMPANION_CALLBACKS)
def test_a_flag_names_a_callback_that_exists(flag: str) -> None:
    module, name = COMPANION_CALLBACKS[flag]
    assert flag in run_config().flat() and issubclass(getattr(import_module(module), name), Callback)
