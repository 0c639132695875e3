"""Published architectures by name: which file, what wins, and what is said of an unknown name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.config.files import flag_files
from megatron.config.files.flag_files import preset_names, preset_path
from megatron.errors import ConfigError
from tests.config.command_lines import small

SIZES = "--num-layers --hidden-size --num-attention-heads --max-position-embeddings"


RECIPES = ("laptop", "workstation")  # say how to train as well
ENCODERS = ("bert-", "roberta-")


@pytest.mark.parametrize("name", [name for name in preset_names() if name not in RECIPES])
def test_a_preset_says_only_what_the_network_is(name: str) -> None:
    objective = "--objective masked" if name.startswith(ENCODERS) else ""
    config = small(f"--model-preset {name} {objective}", drop=SIZES)
    sources = {field: source for field, source in config.provenance.items() if source == "preset"}
    assert len(sources) >= 5 and all(field.startswith("model.") for field in sources)
    assert config.model.vocab_size and config.notices == ()
    text = preset_path(name).read_text(encoding="utf-8")
    assert text.startswith("# ") and "Source: " in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_a_whole_run_without_data(recipe: str) -> None:
    config = parse(shlex.split(f"--model-preset {recipe} --data-path corpus --vocab-file v.json --merge-file m.txt"))
    assert config.notices == () and config.provenance["optim.lr"] == "preset"
    assert not any(source == "preset" for name, source in config.provenance.items() if name.endswith("_path"))


def test_a_file_wins_over_a_preset_and_the_command_line_over_both(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_preset: llama-3.2-1b\nnum_layers: 3\nrotary_base: 7\n")
    config = small(f"--config {path} --rotary-base 9", drop=SIZES)
    assert (config.model.num_layers, config.model.rotary_base, config.model.hidden_size) == (3, 9.0, 2048)
    assert [config.provenance[f"model.{name}"] for name in ("num_layers", "rotary_base", "hidden_size")] == [
        "file", "given", "preset",
    ]  # fmt: skip
    assert config.was_given("model.hidden_size")
    assert small(f"--config {path} --model-preset gpt2-124m", drop=SIZES).model.num_query_groups == 12


def test_an_unknown_name_is_rejected_with_its_neighbours() -> None:
    with pytest.raises(ConfigError, match=r"--model-preset Llama-3\.2-1B is unknown\. Similar: llama-3\.2-1b, "):
        small("--model-preset Llama-3.2-1B", drop=SIZES)
    with pytest.raises(ConfigError, match=r"--model-preset \.\./x is unknown\. Similar: bert-\.\.\., .*qwen3-"):
        preset_path("../x")


def test_hyphens_of_a_name_may_be_left_out() -> None:
    assert preset_path("llama3-70b") == preset_path("llama-3-70b")
    assert preset_path("gpt2124m").stem == "gpt2-124m"
    names = preset_names()
    assert len({name.replace("-", "") for name in names}) == len(names)


def test_after_an_unknown_preset_nothing_is_asked_for_that_it_would_have_set() -> None:
    with pytest.raises(ConfigError) as refused:
        small("--model-preset llama4-70b", drop=SIZES)
    (problem,) = refused.value.problems
    assert problem.startswith("--model-preset llama4-70b is unknown. Similar: llama-3-70b, ")


def test_an_installed_package_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "megatron" / "config" / "files" / "flag_files.py"
    monkeypatch.setattr(flag_files, "__file__", str(place))
    (tmp_path / "examples" / "configs").mkdir(parents=True)
    (tmp_path / "examples" / "configs" / "beside.yaml").touch()
    assert preset_names() == ["beside"]
    (tmp_path / "megatron" / "presets").mkdir(parents=True)
    (tmp_path / "megatron" / "presets" / "inside.yaml").touch()
    assert preset_names() == ["inside"]
