"""`import_hf.py` and `export_hf.py`: their flags, and the guide's first section from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron.errors import CheckpointError, ConfigError
from tests.trident.convert.tiny_models import write_tiny_model, write_tokenizer
from tools.convert import export_hf, import_hf


def test_flags_reach_the_conversion(tmp_path: Path) -> None:
    for name in ("model", "tokenizer"):
        (tmp_path / name).mkdir()
    source, made = str(write_tiny_model("mistral", tmp_path / "model")), str(tmp_path / "in")
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = str(tmp_path / "tokenizer")
    assert import_hf.main([source, "--save", made, "--tokenizer-name-or-path", tokenizer, "--proof-layers", "1"]) == 0
    assert json.loads((tmp_path / "in" / "proof.json").read_text())["layers"] == 1
    flags = ["--load", made, "--output", str(tmp_path / "out"), "--dtype", "float16", "--max-shard-size", "100KB"]
    assert export_hf.main([*flags, "--proof-layers", "2", "--model-type", "mistral"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["layers"] == 2
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    with pytest.raises(CheckpointError, match="Drop --averaged-weights"):
        export_hf.main(["--load", made, "--output", str(tmp_path / "means"), "--averaged-weights"])


@pytest.mark.parametrize("size", ["5", "GB", "0GB", "-1GB", "5 PB", "1.5GB"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-shard-size {size} is not a size"):
        export_hf.main(["--load", "here", "--output", "there", f"--max-shard-size={size}"])


def test_an_import_may_be_moved(tmp_path: Path) -> None:
    write_tiny_model("llama", tmp_path / "model")
    import_hf.main([str(tmp_path / "model"), "--save", str(tmp_path / "made")])
    record = json.loads(next((tmp_path / "made").rglob("manifest.json")).read_text())
    assert ".made." not in json.dumps(record)
    (tmp_path / "made").rename(tmp_path / "moved")
    assert export_hf.main(["--load", str(tmp_path / "moved"), "--output", str(tmp_path / "exported")]) == 0
    assert load_file(tmp_path / "exported" / "model.safetensors").keys()
