"""The commands of the documents mean the same in bash and in zsh, which does not split unquoted variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands.recording_shell import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
# Another project's script as it was published; the page says that it is for bash.
FOR_BASH = ("docs/seeds/turkish_gpt2.md",)
# Patterns of files that earlier commands of the page write; where nothing is written, the shells differ.
_ON_WRITTEN_FILES = ("docs/seeds/hello_deepspeed.md", "docs/seeds/gpt2_all_in.md", "docs/tutorial_deepspeed.md")

_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?(.*?)\n.*?\n\1\n", re.S)
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'", re.S)
_WORDS = re.compile(r"^\s*(?:export )?(\w+)=(?:\"[^\"]*\s[^\"]*\"|'[^']*\s[^']*')", re.M)


def commands_of(text: str) -> str:
    """The shell blocks of a page, in order."""
    return "\n".join(_BLOCK.findall(text))


def split_variables(commands: str) -> list[str]:
    """Variables that hold several words and are used without quotes, so that only some shells split them."""
    names = _WORDS.findall(commands)
    bare = _QUOTED.sub("''", commands)
    return [name for name in names if re.search(rf"\$(?:{name}\b|\{{{name}\}})", bare)]


def commented_lines(commands: str) -> list[str]:
    """Lines with a comment, which an interactive zsh takes for words of the command."""
    bare = _QUOTED.sub("''", _HERE_DOCUMENT.sub(r"<<\2\n", commands))
    return [line for line in bare.splitlines() if re.search(r"(?:^|\s)#", line)]


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        ('A="--x 1"\nprogram $A', ["A"]),
        ("export A='--x 1'\nprogram ${A} --y", ["A"]),
        ('A="--x 1\n    --y 2"\nB=1\nprogram $B $A', ["A"]),
        ('A="--x 1"\nprogram "$A" \'$A\'', []),
        ('A=(--x 1)\nprogram "${A[@]}"', []),
        ("A=file\nprogram $A $AB", []),
    ],
)
def test_a_variable_that_a_shell_has_to_split_is_found(commands: str, names: list[str]) -> None:
    assert split_variables(commands) == names


def test_comments_are_found_outside_of_quotes_and_files() -> None:
    assert commented_lines("rm x  # gone\n# whole\necho 'a # b'\ncat <<'END'\n# text\nEND\necho a#b") == [
        "rm x  # gone",
        "# whole",
    ]


def test_no_page_relies_on_a_shell_that_splits_or_on_comments() -> None:
    pages = {page: commands_of((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    assert sum(map(bool, pages.values())) > 10
    assert {
        page: split_variables(text) for page, text in pages.items() if page not in FOR_BASH and split_variables(text)
    } == {}
    assert {page: commented_lines(text) for page, text in pages.items() if commented_lines(text)} == {}
    for page in FOR_BASH:
        assert split_variables(pages[page]), f"{page} no longer needs its exception"
        assert "bash" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_bash_and_an_interactive_zsh_start_the_same_commands(tmp_path: Path) -> None:
    compared = 0
    for page in PAGES:
        commands = commands_of((ROOT / page).read_text(encoding="utf-8"))
        if commands and page not in (*FOR_BASH, *_ON_WRITTEN_FILES):
            by_bash = started(["bash", "-s"], commands, tmp_path / "bash" / page)
            assert by_bash, page
            assert started(["zsh", "-f", "-i", "-s"], commands, tmp_path / "zsh" / page) == by_bash, page
            compared += len(by_bash)
    assert compared > 50


def started(shell: list[str], commands: str, folder: Path) -> list[str]:
    """The words of each command, sorted; a function that writes them down stands in for it."""
    (folder / "data").mkdir(parents=True)
    record = folder / "record"
    stand_ins = [
        # One write for each command: one in the background may write at the same time.
        f"{name}() {{ local words; words=$(printf '%s\\t' {name} \"$@\"); printf '%s\\n' \"$words\" >>'{record}'; }}"
        for name in (*PROGRAMS, "bash")
    ]
    program = "\n".join([*stand_ins, commands, ""])
    subprocess.run(
        shell, input=program, cwd=folder, env={**os.environ, "HISTFILE": ""}, capture_output=True, text=True, timeout=60
    )
    return sorted(record.read_text(encoding="utf-8").splitlines())  # one may run in the background
