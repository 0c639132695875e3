"""Generation: cache and recompute agree, texts end where they must, and the tool from flags to JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError, DataError, StorageError
from megatron.inference.generate import Continuation, Limits, generate
from megatron.inference.sampling import Sampling
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import build_gpt, forward, tiny_config
from tests.helpers.ranks import RankFailure, run_ranks
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tools import generate_samples_gpt

PROMPTS = "def main(argument):\nimport os\r\n\nstop here\nthe last line without an end"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_bytes(PROMPTS.encode())
    return path


def _model() -> LayerStack:
    return build_gpt(tiny_config(init_method_std=0.4), ParallelMesh.single()).eval()


def _generate(prompts: list[list[int]], sampling: Sampling, **changes: object) -> list[Continuation]:
    limits = Limits(new_tokens=10, positions=16, eod_id=None)
    settings: dict = {"vocab_size": 101, **changes}
    limits = settings.pop("limits", limits)
    return generate(_model(), ParallelMesh.single(), prompts, limits, sampling, **settings)


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(top_p=0.9, seed=5)], ids=["greedy", "top_p"])
def test_the_cache_does_not_change_the_output(sampling: Sampling) -> None:
    prompts = [[1, 2, 3, 4], [9, 8, 7, 6]]
    assert _generate(prompts, sampling) == _generate(prompts, sampling, recompute=True)


def test_the_cache_is_filled_anew_where_all_rotations_change() -> None:
    scaling = {"rope_short_factors": (1.0,) * 4, "rope_long_factors": (3.0,) * 4, "rope_original_max_positions": 8}
    config = tiny_config(init_method_std=0.4, position_embedding_type="rope", rope_scaling_type="longrope", **scaling)
    model, mesh, greedy = build_gpt(config, ParallelMesh.single()).eval(), ParallelMesh.single(), Sampling(greedy=True)
    settings: dict = {"vocab_size": 101}
    limits = Limits(10, 16, None, config.short_context)
    whole = generate(model, mesh, [[1, 2, 3, 4]], limits, greedy, recompute=True, **settings)
    assert config.short_context == 8
    assert generate(model, mesh, [[1, 2, 3, 4]], limits, greedy, **settings) == whole
    assert generate(model, mesh, [[1, 2, 3, 4]], Limits(10, 16, None), greedy, **settings) != whole


def test_greedy_takes_the_most_probable_token_given_the_whole_text() -> None:
    model = _model()
    (found,) = _generate([[5, 6, 7]], Sampling(greedy=True))
    text = [5, 6, 7]
    for token in found.tokens:
        scores = forward(model, torch.tensor([text]), torch.tensor([0]))[0, -1, :101]
        assert token == int(scores.argmax())
        text.append(token)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    sampling = Sampling(temperature=1.3, seed=11)
    together = _generate([[1], [1], [1]], sampling)
    alone = [_generate([[1]], sampling, first_sample=number)[0] for number in range(3)]
    assert together == alone
    assert len({found.tokens for found in together}) == 3


def test_padding_ids_are_never_generated() -> None:
    found = _generate([[1]] * 8, Sampling(temperature=50.0), limits=Limits(15, 16, None))
    assert max(token for one in found for token in one.tokens) < 101


def test_a_text_ends_at_end_of_document() -> None:
    (free,) = _generate([[5, 6, 7]], Sampling(greedy=True))
    eod_id = free.tokens[4]
    first = free.tokens.index(eod_id)
    (ended,) = _generate([[5, 6, 7]], Sampling(greedy=True), limits=Limits(10, 16, eod_id))
    assert ended == Continuation(free.tokens[:first], True)


def test_a_finished_text_does_not_stop_the_others() -> None:
    sampling = Sampling(seed=2, temperature=2.0)
    free = _generate([[1]] * 4, sampling)
    eod_id = free[0].tokens[2]
    ended = _generate([[1]] * 4, sampling, limits=Limits(10, 16, eod_id))
    for before, after in zip(free, ended, strict=True):
        cut = before.tokens.index(eod_id) if eod_id in before.tokens else len(before.tokens)
        assert after.tokens == before.tokens[:cut]
    assert ended[0].is_finished


@pytest.mark.parametrize(("new_tokens", "expected"), [(1, 1), (5, 5), (13, 13), (99, 13)])
def test_length_is_bounded_by_flag_and_positions(new_tokens: int, expected: int) -> None:
    (found,) = _generate([[1, 2, 3]], Sampling(), limits=Limits(new_tokens, 16, None))
    assert len(found.tokens) == expected
    assert not found.is_finished


def test_prompts_that_cannot_be_continued() -> None:
    with pytest.raises(ConfigError, match=r"prompt 0 has 16 tokens, and the model has 16 positions.*at most 15"):
        _generate([[1] * 16], Sampling())
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        _generate([[]], Sampling())
    with pytest.raises(ConfigError, match=r"different lengths \(1, 2 tokens\)"):
        _generate([[1], [1, 2]], Sampling())


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _tool(rank: int, argv: list[str]) -> int:
    return generate_samples_gpt.main(argv)


def test_every_prompt_of_a_file_is_continued(checkpoints: Path, prompt_file: Path) -> None:
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "6", "--greedy"]
    assert generate_samples_gpt.main(argv) == 0
    records = _records(prompt_file.with_name("prompts.txt.out"))
    assert [record["prompt"] for record in records] == [
        "def main(argument):",
        "import os",
        "",
        "stop here",
        "the last line without an end",
    ]
    assert all(record["length"] == len(record["tokens"]) <= 6 for record in records)


def test_output_lines_belong_to_prompt_lines(checkpoints: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out"
    path.write_text("\ndef f\n\nimport os\n")
    argv = ["--load", str(checkpoints), "--sample-input-file", str(path), "--sample-output-file", str(out)]
    assert generate_samples_gpt.main([*argv, "--out-seq-length", "3", "--greedy"]) == 0
    records = _records(out)
    assert [record["prompt"] for record in records] == ["", "def f", "", "import os"]
    assert records[0]["tokens"] == records[2]["tokens"]


@pytest.mark.parametrize(("length", "warns"), [(None, 0), (str(POSITIONS - 1), 0), ("100000", 1)])
def test_requesting_more_tokens_than_positions_warns_once(
    checkpoints: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str], length: str | None, warns: int
) -> None:
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--greedy"]
    assert generate_samples_gpt.main([*argv, *(["--out-seq-length", length] if length else [])]) == 0
    said = capsys.readouterr().err
    assert said.count(f"--out-seq-length {length} does not fit a model of {POSITIONS} positions") == warns
    assert ("warning" in said) == bool(warns)


def test_tokenizer_files_recorded_in_the_checkpoint_can_be_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_file: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = (tmp_path / make_checkpoint(Path("."))).resolve()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    argv = ["--load", str(saved), "--sample-input-file", str(prompt_file), "--out-seq-length", "2"]
    message = (
        rf"--vocab-file .* is not a file.*recorded in the checkpoint {saved}.*--vocab-file .*, --merge-file .* "
        rf"\(a relative path is relative to the current folder, {elsewhere}\).*or --tokenizer-name-or-path"
    )
    with pytest.raises(ConfigError, match=message):
        generate_samples_gpt.main(argv)
    with pytest.raises(ConfigError, match=r"--vocab-file none is not a file\. .*recorded .*: --merge-file \S+ \("):
        generate_samples_gpt.main([*argv, "--vocab-file", "none"])
    with pytest.raises(ConfigError, match=r"--vocab-file none is not a file\. Give the path of an existing one\.$"):
        generate_samples_gpt.main([*argv, "--vocab-file", "none", "--merge-file", "none"])
    from tests.helpers.vocabulary import write_vocabulary

    same = write_vocabulary(elsewhere)
    files = ["--vocab-file", str(same.vocab_file), "--merge-file", str(same.merge_file)]
    assert generate_samples_gpt.main([*argv, *files]) == 0


def test_terminal_input_is_announced_and_empty_input_is_rejected(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate_samples_gpt, "_ask", lambda: None)
    argv = ["--load", str(checkpoints), "--num-samples", "0"]
    with pytest.raises(ConfigError, match=r"--num-samples N \(0 means none\).*contains no prompt"):
        generate_samples_gpt.main(argv)
    monkeypatch.setattr(generate_samples_gpt, "_is_terminal", lambda: True)
    assert generate_samples_gpt.main(argv) == 0
    assert capsys.readouterr().err.count("prompts are read from this terminal") == 1


def test_without_standard_input_there_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert generate_samples_gpt._ask() is None and not generate_samples_gpt._is_terminal()


def test_unconditional_samples_depend_only_on_seed_and_index(checkpoints: Path, tmp_path: Path) -> None:
    def run(*flags: str) -> list[dict]:
        path = tmp_path / "samples.jsonl"
        common = ["--load", str(checkpoints), "--genfile", str(path), "--out-seq-length", "8", "--top_p", "0.95"]
        assert generate_samples_gpt.main([*common, *flags]) == 0
        return _records(path)

    five = run("--num-samples", "5", "--micro-batch-size", "2")
    assert [record["prompt"] for record in five] == [""] * 5
    assert run("--num-samples", "3", "--micro-batch-size", "3") == five[:3]
    assert run("--num-samples", "5", "--seed", "99") != five


def test_only_tokens_of_the_tokenizer_are_generated(tmp_path: Path) -> None:
    """Most entries of this network stand for no token, and an untrained network would choose among all of them."""
    wide = make_checkpoint(tmp_path, "--vocab-size", "20000")
    out = tmp_path / "samples.jsonl"
    flags = ["--load", str(wide), "--num-samples", "2", "--out-seq-length", "12", "--genfile", str(out)]
    assert generate_samples_gpt.main([*flags, "--load-tag", "global_step3"]) == 0
    tokens = [token for line in out.read_text().splitlines() for token in json.loads(line)["tokens"]]
    assert len(tokens) >= 12 and max(tokens) < 2000
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 2"):
        generate_samples_gpt.main([*flags, "--ckpt-step", "2"])


def test_two_ranks_generate_the_same_text_as_one(checkpoints: Path, prompt_file: Path) -> None:
    common = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "20", "--greedy"]
    one, two = prompt_file.with_name("one"), prompt_file.with_name("two")
    assert generate_samples_gpt.main([*common, "--sample-output-file", str(one)]) == 0
    argv = [*common, "--sample-output-file", str(two), "--tensor-model-parallel-size", "2"]
    assert run_ranks(_tool, 2, argv) == [0, 0]
    assert _records(two) == _records(one)
    assert any(record["length"] == 20 for record in _records(one))


def test_the_trainers_flags_may_be_given_too(checkpoints: Path, prompt_file: Path) -> None:
    argv = [
        *("--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "3"),
        *("--num-layers", "2", "--hidden-size", "32", "--bf16", "--tokenizer-type", "GPT2BPETokenizer"),
    ]
    assert generate_samples_gpt.main(argv) == 0


def test_typed_prompts_are_continued(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["import os", "", "a " * 400, "def f"])
    monkeypatch.setattr(generate_samples_gpt, "_ask", lambda: next(typed, None))
    assert generate_samples_gpt.main(["--load", str(checkpoints), "--out-seq-length", "4"]) == 0
    printed = capsys.readouterr()
    assert "\nimport os" in printed.out
    assert "def f" in printed.out
    assert "positions" in printed.err


def test_a_flag_that_contradicts_the_checkpoint(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match="--num-layers 24 is given, but the checkpoint holds a network with 2"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--num-layers", "24"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-samples", "3"], "--num-samples 3 needs --genfile"),
        (["--genfile", "a"], "--genfile a is for --num-samples"),
        (["--num-samples", "3", "--genfile", "a", "--sample-input-file", "b"], "Give one of them"),
        (["--temperature", "0"], "--temperature 0.0 is out of range"),
        (["--top_p", "1.5"], "--top-p 1.5 is out of range"),
        (["--pipeline-model-parallel-size", "2"], "--pipeline-model-parallel-size 2 is not supported here"),
    ],
)
def test_contradicting_flags_are_rejected(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate_samples_gpt.main(["--load", "nowhere", *flags])


def test_load_is_required() -> None:
    with pytest.raises(ConfigError, match="--load is required"):
        generate_samples_gpt.main([])


def test_unusable_files_are_reported(checkpoints: Path, tmp_path: Path, prompt_file: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path / 'nothing'}"):
        generate_samples_gpt.main(["--load", str(tmp_path / "nothing")])
    with pytest.raises(DataError, match="missing.txt .*cannot be read"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--sample-input-file", str(tmp_path / "missing.txt")])
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    with pytest.raises(DataError, match="contains no prompt"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--sample-input-file", str(blank)])
    with pytest.raises(StorageError, match="cannot be written"):
        argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "1"]
        generate_samples_gpt.main([*argv, "--sample-output-file", str(tmp_path / "no" / "folder")])


def test_a_prompt_that_is_too_long_is_rejected_before_any_is_continued(checkpoints: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("short\n" + "x y " * 300 + "\n")
    with pytest.raises(ConfigError, match=rf"prompt 2 of .*long.txt has \d+ tokens, and the model has {POSITIONS}"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--sample-input-file", str(path)])
    assert not path.with_name("long.txt.out").exists()


def test_another_tokenizer_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    from tests.helpers.vocabulary import write_vocabulary

    other = write_vocabulary(tmp_path, 400)
    flags = ["--vocab-file", str(other.vocab_file), "--merge-file", str(other.merge_file)]
    with pytest.raises(CheckpointError, match="was trained with another tokenizer"):
        generate_samples_gpt.main(["--load", str(checkpoints), *flags])


def test_too_many_processes_are_refused(checkpoints: Path) -> None:
    with pytest.raises(RankFailure, match="2 processes were started, but the network is split over 1"):
        run_ranks(_tool, 2, ["--load", str(checkpoints), "--greedy"])
