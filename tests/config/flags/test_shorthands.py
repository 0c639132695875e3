"""Flags of published scripts that stand for values of other fields."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.config.flags.shorthands import expand_shorthands
from tests.config.command_lines import small


def test_a_file_may_hold_them_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"swiglu": True, "use-rotary-position-embeddings": True}))
    config = small(f"--config {path}")
    assert (config.model.activation_function, config.model.ffn_hidden_size) == ("silu", 128)
    assert config.provenance["model.activation_function"] == config.provenance["model.ffn_hidden_size"] == "file"
    config = small(f"--config {path} --squared-relu --no-gated-linear-unit")
    assert (config.model.activation_function, config.model.gated_linear_unit) == ("squared_relu", False)
    assert config.provenance["model.activation_function"] == "given"


def test_a_width_of_a_weaker_layer_holds() -> None:
    (weak, strong), problems = expand_shorthands(
        [{"model.ffn_hidden_size": 77, "model.hidden_size": 48}, {"shorthand.swiglu": True}]
    )
    assert problems == [] and weak["model.ffn_hidden_size"] == 77
    assert strong == {"model.activation_function": "silu", "model.gated_linear_unit": True}


def test_a_tool_asks_only_for_what_a_flag_says() -> None:
    layers = [{"shorthand.swiglu": True, "model.hidden_size": 48}]
    (found,), _ = expand_shorthands(layers, with_defaults=False)
    assert "model.ffn_hidden_size" not in found and found["model.gated_linear_unit"]
