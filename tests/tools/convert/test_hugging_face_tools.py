"""`import_hf.py` and `export_hf.py`: their flags, and the guide's first section from end to end."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import CheckpointError, ConfigError, ConversionError
from tests.helpers.programs import forking_python
from tests.trident.convert.tiny_models import END, write_tiny_model, write_tokenizer
from tools.convert import export_hf, import_hf

ROOT = Path(__file__).resolve().parents[3]


def section() -> list[str]:
    """The commands of the guide's first section, one block after another."""
    text = (ROOT / "docs" / "hugging_face.md").read_text().partition("## Import and export")[2].partition("\n## ")[0]
    found: list[str] = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    return found


@pytest.mark.full
@pytest.mark.slow
def test_the_guide_brings_a_model_trains_it_and_takes_it_away(tmp_path: Path) -> None:
    for name in ("tools", "pretrain_gpt.py", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    source = tmp_path / "models" / "llama"
    source.mkdir(parents=True)
    write_tiny_model("llama", source)
    (tmp_path / "data").mkdir()
    with IndexedWriter(str(tmp_path / "data" / "llama_text_document"), np.uint16) as writer:
        writer.add_document([np.random.default_rng(1).integers(0, END, 4000)])
    convert, train = section()
    assert len(convert.strip().splitlines()) == 2, "two commands"
    small = "--seq-length 32 --train-iters 1 --save-interval 1 --eval-iters 0 --global-batch-size 4"
    program = "\n".join(
        [
            "set -euo pipefail",
            f'python() {{ "{forking_python()}" "$@"; }}',
            convert,
            re.sub(r"--(seq-length|train-iters|save-interval|global-batch-size) \d+", "", train).rstrip() + f" {small}",
            "python tools/convert/export_hf.py --load checkpoints/continued --output exported/continued "
            "--dtype bfloat16",
        ]
    )
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "imported models/llama to checkpoints/llama" in done.stdout
    assert "finetuning the weights of checkpoints/llama/iter_0000000 from iteration 0" in done.stderr
    stored, again = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "exported" / "llama"))
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / "continued", dtype="auto")
    assert changed.dtype == torch.bfloat16 and not torch.equal(changed.lm_head.weight, stored["lm_head.weight"])


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


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        export_hf.main(["--load", str(tmp_path), "--output", str(tmp_path / "out")])


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"cannot read {tmp_path}/config.json, the configuration of the model"):
        import_hf.main([str(tmp_path), "--save", str(tmp_path / "out")])


def test_an_import_may_be_moved(tmp_path: Path) -> None:
    write_tiny_model("llama", tmp_path / "model")
    import_hf.main([str(tmp_path / "model"), "--save", str(tmp_path / "made")])
    record = json.loads(next((tmp_path / "made").rglob("manifest.json")).read_text())
    assert ".made." not in json.dumps(record)
    (tmp_path / "made").rename(tmp_path / "moved")
    assert export_hf.main(["--load", str(tmp_path / "moved"), "--output", str(tmp_path / "exported")]) == 0
    assert load_file(tmp_path / "exported" / "model.safetensors").keys()
