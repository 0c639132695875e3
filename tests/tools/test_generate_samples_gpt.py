"""The tool that generates samples, from flags to JSON lines: files, layouts, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron.errors import CheckpointError, ConfigError, DataError, StorageError
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
    path.write_text("\ufeff\ndef f\n\nimport os\n", encoding="utf-8")
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
    assert said.count(f"--out-seq-length {length} exceeds the {POSITIONS} positions of the model") == warns
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
    monkeypatch.setattr(generate_samples_gpt, "_read_prompt", lambda number: None)
    argv = ["--load", str(checkpoints), "--num-samples", "0"]
    with pytest.raises(ConfigError, match=r"--num-samples N .*contains no prompt"):
        generate_samples_gpt.main(argv)
    monkeypatch.setattr(generate_samples_gpt, "_is_terminal", lambda: True)
    assert generate_samples_gpt.main(argv) == 0
    assert capsys.readouterr().err.count("prompts are read from this terminal") == 1


def test_without_standard_input_there_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert generate_samples_gpt._read_prompt(1) is None and not generate_samples_gpt._is_terminal()


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


def test_two_stages_generate_the_same_text_as_one(checkpoints: Path, prompt_file: Path) -> None:
    common = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "20", "--greedy"]
    one, two = prompt_file.with_name("one"), prompt_file.with_name("two")
    assert generate_samples_gpt.main([*common, "--sample-output-file", str(one)]) == 0
    argv = [*common, "--sample-output-file", str(two), "--pipeline-model-parallel-size", "2"]
    assert run_ranks(_tool, 2, argv) == [0, 0]
    assert _records(two) == _records(one)
    assert any(record["length"] == 20 for record in _records(one))


def test_several_samples_of_each_prompt(checkpoints: Path, prompt_file: Path) -> None:
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "8"]
    assert generate_samples_gpt.main([*argv, "--num-return-sequences", "3"]) == 0
    records = _records(prompt_file.with_name("prompts.txt.out"))
    assert [record["prompt"] for record in records[:6]] == ["def main(argument):"] * 3 + ["import os"] * 3
    assert len({tuple(record["tokens"]) for record in records}) == len(records) == 15
    assert generate_samples_gpt.main(argv) == 0
    assert _records(prompt_file.with_name("prompts.txt.out")) == records[::3]


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
    monkeypatch.setattr(generate_samples_gpt, "_read_prompt", lambda number: next(typed, None))
    assert generate_samples_gpt.main(["--load", str(checkpoints), "--out-seq-length", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("import os")
    assert "def f" in printed.out
    assert "positions" in printed.err


def test_beams_are_written_best_first(checkpoints: Path, prompt_file: Path, tmp_path: Path) -> None:
    common = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "4"]
    out = tmp_path / "beams"
    flags = ["--num-beams", "3", "--num-return-sequences", "2", "--sample-output-file", str(out)]
    assert generate_samples_gpt.main([*common, *flags]) == 0
    records = _records(out)
    assert [record["prompt"] for record in records[:4]] == ["def main(argument):"] * 2 + ["import os"] * 2
    for best, second in zip(records[::2], records[1::2], strict=True):
        assert best["score"] >= second["score"] and best["tokens"] != second["tokens"]
    free = ["--load", str(checkpoints), "--num-samples", "3", "--num-beams", "3", "--genfile", str(out)]
    assert generate_samples_gpt.main([*free, "--out-seq-length", "4"]) == 0
    assert len({tuple(record["tokens"]) for record in _records(out)}) == 3


def test_a_flag_that_contradicts_the_checkpoint(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match="--num-layers 24 contradicts the checkpoint, whose network has 2"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--num-layers", "24"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-samples 3", "--num-samples 3 requires --genfile"),
        ("--genfile a", "--genfile a requires --num-samples"),
        ("--num-samples 3 --genfile a --sample-input-file b", "Drop one of them"),
        ("--temperature -1", "--temperature -1.0 is out of range"),
        ("--num-samples 3 --genfile a --num-return-sequences 2", "Use --num-samples 6 instead"),
        ("--num-return-sequences 0", "--num-return-sequences 0 is out of range"),
        ("--num-beams 2 --num-return-sequences 3", "--num-beams 2 is less than the 3 requested texts per prompt"),
        ("--num-beams 2 --recompute", "--recompute cannot be combined with --num-beams"),
        ("--speculative-tokens 2 --recompute", "--speculative-tokens 2 cannot be combined with --recompute"),
        ("--speculative-tokens 2 --num-beams 3", "--speculative-tokens 2 cannot be combined with --num-beams 3"),
    ],
)
def test_contradicting_flags_are_rejected(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate_samples_gpt.main(["--load", "nowhere", *flags.split()])


def test_unusable_files_are_reported(checkpoints: Path, tmp_path: Path, prompt_file: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path / 'nothing'}"):
        generate_samples_gpt.main(["--load", str(tmp_path / "nothing")])
    with pytest.raises(DataError, match="missing.txt .*cannot be read"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--sample-input-file", str(tmp_path / "missing.txt")])
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    with pytest.raises(DataError, match="contains no prompt"):
        generate_samples_gpt.main(["--load", str(checkpoints), "--sample-input-file", str(blank)])


@pytest.mark.parametrize(("place", "says"), [(".", "is a folder. Give"), ("prompts.txt/out", "Cannot write .*out: ")])
def test_an_output_that_cannot_be_written_is_refused_before_the_weights_are_read(
    prompt_file: Path, place: str, says: str
) -> None:
    output = prompt_file.parent / place
    argv = ["--load", "nowhere", "--sample-input-file", str(prompt_file), "--sample-output-file", str(output)]
    with pytest.raises((ConfigError, StorageError), match=says):
        generate_samples_gpt.main(argv)


@pytest.mark.parametrize("way", ["name", "relative", "symbolic link", "hard link", "default", "partial"])
def test_the_prompts_are_never_overwritten(prompt_file: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.chdir(prompt_file.parent)
    output = {"name": str(prompt_file), "relative": "../" + prompt_file.parent.name + "/prompts.txt"}.get(way, "other")
    given = ["--sample-output-file", output]
    if way == "symbolic link":
        Path("other").symlink_to(prompt_file)
    if way == "hard link":
        Path("other").hardlink_to(prompt_file)
    if way == "default":
        Path("prompts.txt.out").symlink_to(prompt_file)
        given = []
    if way == "partial":
        prompt_file = prompt_file.rename(Path("other.partial").absolute())
    with pytest.raises(ConfigError, match=r"would overwrite the prompts \(--sample-input-file "):
        generate_samples_gpt.main(["--load", "nowhere", "--sample-input-file", str(prompt_file), *given])
    assert prompt_file.read_bytes() == PROMPTS.encode()


def test_a_refused_request_leaves_the_older_file(checkpoints: Path, prompt_file: Path) -> None:
    output = prompt_file.with_name("prompts.txt.out")
    output.write_text("older")
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--logit-bias", "7=1", "8000=5"]
    with pytest.raises(ConfigError, match="--logit-bias has token 8000, but the tokenizer's ids are 0 to"):
        generate_samples_gpt.main(argv)
    assert output.read_text() == "older" and len(list(prompt_file.parent.iterdir())) == 2


def test_texts_before_a_failure_are_kept_next_to_the_older_file(
    checkpoints: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, partial = prompt_file.with_name("new") / "texts", prompt_file.with_name("new") / "texts.partial"
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--sample-output-file", str(output)]
    argv += ["--greedy", "--out-seq-length", "3"]
    assert generate_samples_gpt.main(argv) == 0
    complete = _records(output)
    assert len(complete) == 5 and not partial.exists()

    def ends_early(generator: object, prompts: object, of: object = generate_samples_gpt.Generator.records):
        for count, record in enumerate(of(generator, prompts)):  # type: ignore[operator]
            assert count == 0 or _records(partial) == complete[:count]  # every text is there at once
            if count == 2:
                raise KeyboardInterrupt
            yield record

    with monkeypatch.context() as patched:
        patched.setattr(generate_samples_gpt.Generator, "records", ends_early)
        with pytest.raises(KeyboardInterrupt):
            generate_samples_gpt.main(argv)
    assert _records(output) == complete and _records(partial) == complete[:2]
    assert f"2 texts written so far are in {partial}." in capsys.readouterr().err
    assert generate_samples_gpt.main(argv) == 0
    assert _records(output) == complete and not partial.exists()


def test_a_link_and_a_device_stay_what_they_are(checkpoints: Path, prompt_file: Path) -> None:
    link, target = prompt_file.with_name("link"), prompt_file.with_name("target")
    link.symlink_to(target)
    argv = ["--load", str(checkpoints), "--sample-input-file", str(prompt_file), "--out-seq-length", "2"]
    assert generate_samples_gpt.main([*argv, "--sample-output-file", str(link)]) == 0
    assert link.is_symlink() and len(_records(target)) == 5
    assert generate_samples_gpt.main([*argv, "--sample-output-file", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device() and not Path("/dev/null.partial").exists()


def test_a_prompt_that_is_not_utf8_is_refused_and_the_next_continued(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"\n\xff\xfe hi\nimport os\n"))
    monkeypatch.setattr("sys.stdin", typed)
    assert generate_samples_gpt.main(["--load", str(checkpoints), "--out-seq-length", "4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("error: line 2 of standard input is not UTF-8.") == 1
    assert said.out.startswith("import os")  # standard output holds nothing but texts


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
    with pytest.raises(RankFailure, match="this run has 2 processes, but the network is split over 1"):
        run_ranks(_tool, 2, ["--load", str(checkpoints), "--greedy"])
