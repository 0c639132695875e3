"""Dataclass fields become flags, and all problems of a command line are reported at once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.config.flags.command_line import areas_of, parse_flags
from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError, ExitCode

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Tool(ConfigSection):
    """A tool's flags, one of every kind."""

    input: tuple[str, ...] = flag(help="files to read", nargs="+")
    workers: int = flag(1, "processes", at_least=1, at_most=64)
    rate: float = flag(0.5, "a share", above=0, below=1)
    kind: str = flag("a", "which kind", choices=("a", "b"), remedy="Kind c went away.")
    vocab_file: str | None = flag(None, "vocabulary", spelled=("--vocab",))
    append_eod: bool = flag(False, "ends documents")
    dry_run: bool = flag(False, "do nothing", numeric=True)
    fast: bool = flag(True, "be fast", spelled=("--no-quick", "--quick"))
    no_save: bool = flag(False, "save nothing")
    pair: tuple[int, int] | None = flag(None, "two numbers")
    sizes: tuple[int, ...] = flag((), "numbers in an order")
    blend: tuple[str, ...] = flag((), "weights and names", once=True)
    settings: str = flag("", "a file", once=True)

    def problems(self) -> Iterator[str]:
        if self.workers == 13:
            yield "--workers 13 is unlucky. Use 12."


def read(text: str) -> Tool:
    return parse_flags(Tool, text.split(), prog="tool")


def test_every_kind_of_flag_is_read() -> None:
    tool = read("--input a b --workers 3 --rate .25 --kind b --vocab v --append-eod --no-fast --no-save --pair 1 -2")
    assert tool == Tool(
        input=("a", "b"), workers=3, rate=0.25, kind="b", vocab_file="v", append_eod=True, fast=False, no_save=True,
        pair=(1, -2),
    )  # fmt: skip
    assert read("--input x") == Tool(input=("x",))


def test_what_is_given_twice_adds_up_or_counts_as_written_last() -> None:
    numbers = "--sizes 1 2 --sizes 1 2 --pair 1 2 --pair 3 4"
    tool = read(f"--input a --workers 3 --kind b --input b c --workers 4 --fast --no-fast {numbers}")
    assert tool == Tool(input=("a", "b", "c"), workers=4, kind="b", fast=False, sizes=(1, 2), pair=(3, 4))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sizes 1 2 --sizes 3", "--sizes is given twice: 1 2, then 3. Give it once, with all values."),
        ("--blend 1 a --blend 1 b", "--blend is given twice: 1 a, then 1 b. Give it once, with all values."),
        ("--settings a --settings b", "--settings is given twice: a, then b. Give it once."),
    ],
)
def test_values_that_would_be_lost_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read(f"--input x {words}")


def test_the_first_words_may_belong_to_a_flag_that_is_not_named() -> None:
    def tool(text: str) -> Tool:
        return parse_flags(Tool, text.split(), prog="tool", positional="--input")

    assert tool("a b --workers 3") == tool("--workers 3 --input a b") == Tool(input=("a", "b"), workers=3)
    with pytest.raises(ConfigError, match="--input is required"):
        tool("")


@pytest.mark.parametrize(
    ("words", "value"),
    [("", True), ("--fast", True), ("--no-fast", False), ("--fast false", False), ("--fast True", True)]
    + [("--no-fast false", True), ("--no-quick", False), ("--quick", True), ("--fast --no-fast", False)],
)
def test_a_switch_can_be_turned_on_and_off_and_takes_a_value(words: str, value: bool) -> None:
    assert read(f"--input x {words}").fast is value


def test_only_a_switch_that_says_so_takes_a_number() -> None:
    assert read("--input x --dry-run 1").dry_run and not read("--input x --dry-run 0").dry_run
    with pytest.raises(ConfigError, match='--append-eod expects no value, true or false, got "1"'):
        read("--input x --append-eod 1")


def test_a_flag_that_begins_with_no_turns_on() -> None:
    assert read("--input x --no-save").no_save and not read("--input x --no-save off").no_save


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", r"--input is required: files to read\."),
        ("--input", r"--input expects at least one value"),
        ("--input x --workers", r"--workers expects one value, got none"),
        ("--input x --workers 1 2", r"--workers expects one value, got 2 \(1 2\)"),
        ("--input x --workers many", r'--workers expects an integer, got "many"'),
        ("--input x --workers 1.5", r'--workers expects an integer, got "1.5"'),
        ("--input x --rate much", r'--rate expects a number, got "much"'),
        ("--input x --pair 1", r"--pair expects 2 values, got 1 \(1\)"),
        ("--input x --append-eod maybe", r'--append-eod expects no value, true or false, got "maybe"'),
        ("--input x --workers 0", r"--workers 0 is out of range\. It must be at least 1\."),
        ("--input x --workers 65", r"--workers 65 is out of range\. It must be at most 64\."),
        ("--input x --rate 0", r"--rate 0.0 is out of range\. It must be more than 0\."),
        ("--input x --rate 1", r"--rate 1.0 is out of range\. It must be less than 1\."),
        ("--input x --kind c", r"--kind c is unknown\. Use one of: a, b\. Kind c went away\."),
        ("--input x --workers 13", r"--workers 13 is unlucky"),
        ("--input x --worker 3", r"unknown flag --worker\. Did you mean --workers\?"),
        ("--input x --append_eod", r"unknown flag --append_eod\. Did you mean --append-eod\?"),
        ("--input x --zzz=3", r"unknown flag --zzz\. See --help"),
        ("--input x --rate nan", r'--rate expects a number, got "nan"'),
        ("--input x --rate inf", r'--rate expects a number, got "inf"'),
        ("--input x --rate -1e-3", r"--rate -0\.001 is out of range"),
        ("--input x --vocab-file=", r"--vocab-file expects a string, got an empty one\. Is a variable"),
        ("stray --input x", r'"stray". Values must follow their flag'),
        ("--input x --help=3", r"--help 3 matches no flag and no group"),
    ],
)
def test_errors_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(words)
    assert len(caught.value.problems) == 1
    assert caught.value.exit_code == ExitCode.USAGE


def test_all_problems_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--bogus 1 --workers x --rate 7 --kind q")
    assert [text.split()[0] for text in caught.value.problems] == [
        "unknown",
        "--workers",
        "--input",
        "--rate",
        "--kind",
    ]


def test_help_names_type_default_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read("--help")
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: tool [flags]" in text
    assert "--workers int processes (default: 1)" in text
    assert "--kind str which kind {a, b} (default: a)" in text
    assert "--vocab-file str vocabulary (default: None; also --vocab)" in text
    assert "--no-fast turns off: be fast (default: on; also --no-quick)" in text


@dataclass(frozen=True)
class Sized(ConfigSection):
    """Flags that several tools have."""

    help_title = "how large it is"

    size: int = flag(1, "how much of it")
    largest_size: int = flag(9, "how much at most")


@dataclass(frozen=True)
class SizedTool(Sized):
    """A tool with flags of its own."""

    name: str = flag("x", "what it is called")


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse_flags(SizedTool, words, prog="tool", description="Does it.\n\n    tool --size 2\n    tool")
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_keeps_lines_and_groups_flags_by_area(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("--help", capsys=capsys)
    assert text.startswith(
        "usage: tool [flags]\n\nDoes it.\n\n    tool --size 2\n    tool\n\noptions:\n  -h, --help [WORD ...]"
    )
    own, shared = text.index("\nflags:\n  --name"), text.index("\nhow large it is:\n  --size")
    assert own < shared < text.index("--largest-size")
    assert areas_of(Sized) == [("flags", ["size", "largest_size"])], "a title is for the tools that extend it"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["name"], ["--name"]),
        (["large"], ["--size", "--largest-size"]),
        (["how large"], ["--size", "--largest-size"]),
        (["largest_size"], ["--largest-size"]),
        (["largest", "name"], ["--name", "--largest-size"]),
    ],
)
def test_help_shows_the_areas_and_flags_that_are_named(
    words: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("--help", *words, capsys=capsys)
    assert re.findall(r"^  (--[\w-]+)", text, flags=re.M) == shown
    assert "Does it." not in text


def test_help_for_nothing_names_the_areas() -> None:
    with pytest.raises(ConfigError, match=r"--help zebra matches no flag and no group. Groups: options; flags; how "):
        parse_flags(SizedTool, ["--help", "zebra"])


@pytest.mark.parametrize("words", [["--help"], ["--num-layer", "3"]])
def test_neither_help_nor_a_wrong_flag_imports_anything_heavy(words: list[str]) -> None:
    """NumPy is there for a wrong flag: the files of the data are looked at, too."""
    code = (
        "import sys\nimport pretrain_gpt\n"
        "try:\n    pretrain_gpt.main(sys.argv[1:])\nexcept BaseException:\n    pass\n"
        "found = {'torch', 'deepspeed', 'yaml', *(['numpy'] if '--help' in sys.argv else [])} & set(sys.modules)\n"
        "raise SystemExit(str(found) if found else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_wrong_flag_ends_the_trainer_with_code_64() -> None:
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--num-layer", "3", "--lr", "x"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    assert "Did you mean --num-layers?" in done.stderr
    assert '--lr expects a number, got "x".' in done.stderr
    assert "Traceback" not in done.stderr
