"""The programs that look into checkpoints and average them, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import read_tensors
from megatron.errors import CheckpointError, ConfigError
from tests.inference.checkpoints import make_checkpoint
from tools import checkpoints, generate_samples_gpt


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of checkpoints of one network with other weights."""
    folder = tmp_path_factory.mktemp("runs")
    return make_checkpoint(folder / "a"), make_checkpoint(folder / "b", "--init-method-std", "0.3")


def test_a_folder_is_summarized(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints.main(["inspect", str(folders[0]), "--verify"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"checkpoint {folders[0] / 'iter_0000003'}\n")
    assert "decoder.final_layernorm.weight" in text and "model.num_layers = 2" in text
    words = ["--load", str(folders[0] / "iter_0000003"), "--json", "--tensors", "*.1.mlp.*", "--moments"]
    assert checkpoints.main(["inspect", *words]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["step"] == 3 and len(value["tensors"]) == 4


def test_two_checkpoints_are_compared(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = map(str, folders)
    assert checkpoints.main(["inspect", first, "--compare", first]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("EQUAL: all ")
    assert checkpoints.main(["inspect", first, "--compare", second]) == 77
    text = capsys.readouterr().out
    assert "model.init_method_std: 0.4 and 0.3" in text and "DIFFERENT: " in text
    with pytest.raises(ConfigError, match="--manifest-only cannot be combined with --compare"):
        checkpoints.main(["inspect", first, "--compare", second, "--manifest-only"])


def test_the_mean_generates_text(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*map(str, folders), "--save", str(tmp_path / "mean"), "--coefficients", "1", "3"]
    assert checkpoints.main(["average", *words]) == 0
    assert capsys.readouterr().out.endswith(
        f"wrote the mean of 2 checkpoints to {tmp_path / 'mean' / 'iter_0000003'}\n"
    )
    one, two, mean = (dict(read_tensors(path / "iter_0000003")) for path in (*folders, tmp_path / "mean"))
    assert all(torch.allclose(mean[name], one[name] / 4 + two[name] * 3 / 4) for name in one)
    words = ["--load", str(tmp_path / "mean"), "--num-samples", "1", "--genfile", str(tmp_path / "texts.jsonl")]
    assert generate_samples_gpt.main([*words, "--out-seq-length", "3"]) == 0
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 1


def test_the_checkpoints_to_average_are_checked(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second, save = str(folders[0]), str(folders[1]), ["--save", str(tmp_path / "mean")]
    with pytest.raises(ConfigError, match=f"averaging requires at least two checkpoints, got only {first}"):
        checkpoints.main(["average", first, *save])
    with pytest.raises(ConfigError, match="--last 2 requires one folder of checkpoints, got 2"):
        checkpoints.main(["average", first, second, "--last", "2", *save])
    with pytest.raises(ConfigError, match="--coefficients has 3 values for 2 checkpoints"):
        checkpoints.main(["average", first, second, "--coefficients", "1", "2", "3", *save])
    with pytest.raises(CheckpointError, match=r"--last 3: .* holds 1 checkpoints"):
        checkpoints.main(["average", first, "--last", "3", *save])
