"""What attention with sinks cannot do is refused with the way out."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.config.command_lines import small


def test_sinks_have_no_dropout() -> None:
    sentence = "--attention-dropout 0.1 does not go with --softmax-type learnable, .* Use --attention-dropout 0"
    with pytest.raises(ConfigError, match=sentence):
        small("--softmax-type learnable --attention-dropout 0.1")
    assert small("--softmax-type off-by-one --attention-dropout 0").model.softmax_type == "off-by-one"


def test_other_types_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="--softmax-type lucky is unknown. Use one of: vanilla, off-by-one, learnable"
    ):
        small("--softmax-type lucky")
