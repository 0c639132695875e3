"""The keys that DeepSpeed reads, and suggestions for misspelled keys."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megatron.config.files.deepspeed_file import GOVERNED
from megatron.config.files.deepspeed_keys import SECTION_KEYS, TOP_LEVEL_KEYS, unknown_keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train_batch_sise", "train_batch_size"),
        ("zeroOptimization", "zero_optimization"),
        ("gradient_clip", "gradient_clipping"),
        ("warp_drive", None),
    ],
)
def test_a_misspelled_key_is_recognized(key: str, meant: str | None) -> None:
    assert unknown_keys({key: 1, "train_batch_size": 2, "_comment": "ours", "//": "too"}) == [(key, meant)]


def test_nested_sections_are_checked() -> None:
    assert unknown_keys({"fp16": {"enable": True, "hysteresis": 1}}) == [("fp16.enable", "fp16.enabled")]
    assert unknown_keys({"zero_optimization": 3}) == []


def test_every_key_deepspeed_reads_is_known() -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed")
    folder = Path(spec.origin).parent
    zero = (folder / "runtime/zero/config.py").read_text()
    fields = zero.partition("class DeepSpeedZeroConfig")[2]
    keys = set(re.findall(r"^    ([a-z]\w*): ", fields, re.MULTILINE)) | set(re.findall(r'alias="(\w+)"', fields))
    assert keys and keys <= SECTION_KEYS["zero_optimization"]
    precision = (folder / "runtime/precision_config.py").read_text()
    bf16, fp16 = precision.partition("class DeepSpeedFP16Config")[::2]
    for section, text in (("bf16", bf16.partition("class DeepSpeedBF16Config")[2]), ("fp16", fp16)):
        keys = set(re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE))
        assert keys and keys <= SECTION_KEYS[section]
    constants = (folder / "runtime/constants.py").read_text()
    names = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", (folder / "runtime/config.py").read_text()))
    keys = {
        found[1] for found in re.findall(r"^([A-Z_]+) = ['\"](\w+)['\"]", constants, re.MULTILINE) if found[0] in names
    }
    assert len(keys) > 10 and keys <= TOP_LEVEL_KEYS


def test_our_own_keys_are_known() -> None:
    assert {place[0] for place in GOVERNED} <= TOP_LEVEL_KEYS
    assert all(place[1] in SECTION_KEYS[place[0]] for place in GOVERNED if len(place) == 2)
