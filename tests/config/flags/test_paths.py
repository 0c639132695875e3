"""What may lie at the path of a flag, for every flag of every program."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import PathUse, parse
from megatron.config.flags.command_line import check_paths
from megatron.config.flags.fields import flags_of
from megatron.config.flags.paths import path_problems
from megatron.config.sections.data import TokenizerFileFlags
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
_ABOUT_PATHS = re.compile(r"path|file|\bdir|folder|prefix|pattern")
# Flags whose names or descriptions speak of files, though their values are no paths of them, and why.
NO_PATHS = {
    "--checkpoint-link": "the name of a link inside of --save",
    "--columns": "keys of JSON",
    "--document-separator": "a text",
    "--freeze": "patterns of parameter names",
    "--hosts": "names of hosts",
    "--json-keys": "keys of JSON",
    "--keep-columns": "names of columns",
    "--log-style": "a name",
    "--max-shard-size": "a size",
    "--model-preset": "the name of a file of the project",
    "--names": "names in a legend",
    "--only": "names of operations",
    "--profile-steps": "numbers",
    "--program-flags": "JSON",
    "--python": "a program on other machines",
    "--run-files": "a name",
    "--served-model-name": "a name",
    "--shard": "numbers",
    "--split": "shares",
    "--tensors": "patterns of tensor names",
    "--vocab-id-dir": "a name inside of --vocab-load-dir",
    "--wandb-dir": "a project of Weights & Biases",
    "--workspace": "a name inside of --ckpt-dir",
    "--workspace-finetune": "a name inside of --ckpt-dir",
}


def test_every_path_flag_of_every_program_refuses_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.commands.path_flags", str(pipe)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)
    wrong = [
        f"{program['program']} {name}: {answer[:300]}"
        for program in programs
        for name, answer in program["answers"].items()
        if f"{name} {pipe} is a pipe. Give " not in answer
    ]
    assert not wrong and sum(len(program["answers"]) for program in programs) > 140, "\n".join(wrong)
    unmarked = {
        f"{program['program']} {name}: {text}"
        for program in programs
        for name, text in program["flags"].items()
        if name not in NO_PATHS and _ABOUT_PATHS.search(f"{name} {text}")
    }
    assert not unmarked, "say what these flags do with their paths (flag(path=PathUse...)):\n" + "\n".join(unmarked)


@pytest.mark.parametrize("use", list(PathUse))
def test_what_is_there_is_named(tmp_path: Path, use: PathUse) -> None:
    """Every use refuses all that it cannot use, and takes what it can and what is not there yet."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    (tmp_path / "file").write_text("x")
    said = {name: "".join(path_problems("--flag", use, str(tmp_path / name))) for name in os.listdir(tmp_path)}
    for name, words in (
        ("pipe", "is a pipe"),
        ("device", "is a device"),
        ("socket", "is a socket"),
        ("loop", f"is a symbolic link loop (to {tmp_path}/loop)"),
    ):
        assert said[name].startswith(f"--flag {tmp_path}/{name} {words}. Give "), said[name]
    is_written = use in (PathUse.NEW_FILE, PathUse.NEW_STREAM, PathUse.NEW_PREFIX)
    assert bool(said["dangling"]) is not is_written
    takes_folders = use in (PathUse.FOLDER, PathUse.FILE_OR_FOLDER, PathUse.CORPUS, PathUse.PREFIX, PathUse.NEW_PREFIX)
    assert ("is a folder" in said["folder"]) is not takes_folders
    assert not said["file"] and not list(path_problems("--flag", use, str(tmp_path / "absent")))


def test_small_files_are_bounded_and_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = next(flag for flag in flags_of(TokenizerFileFlags) if flag.field == "vocab_file")
    path = tmp_path / "vocab.json"
    path.touch()
    with pytest.raises(ConfigError, match=r"--vocab .*vocab\.json is empty\. Give the path of a regular file"):
        check_paths(flag, "--vocab", str(path))
    with path.open("r+b") as file:
        file.truncate(5 << 30)
    with pytest.raises(ConfigError, match=r"has 5,368,709,120 bytes; the limit is 268,435,456"):
        check_paths(flag, "--vocab", str(path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"vocab\.json is not readable by this user"):
        check_paths(flag, "--vocab", str(path))


def test_pipes_of_the_shell_are_streams(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        for use in PathUse:
            wanted = use in (PathUse.STREAM, PathUse.CORPUS, PathUse.NEW_STREAM)
            assert bool(list(path_problems("--input", use, f"/dev/fd/{read}"))) is not wanted
        assert not list(path_problems("--genfile", PathUse.NEW_STREAM, "/dev/null"))
    finally:
        os.close(read)
        os.close(write)


def test_the_files_of_a_prefix_and_of_a_group_are_looked_at(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.idx")
    for value in (f"{tmp_path}/c", f"train: 0.5 0:1 {tmp_path}/c, 1 0:1 other"):
        assert [*path_problems("--data-path", PathUse.PREFIX, value)] == [
            f"--data-path {tmp_path}/c.idx is a pipe. Give the path of a regular file."
        ]


def test_a_path_in_a_file_of_flags_is_refused_with_its_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"vocab_file": str(tmp_path / "pipe")}))
    with pytest.raises(ConfigError, match=rf'run\.json: "vocab_file" {tmp_path}/pipe is a pipe\. Give the path'):
        parse(["--config", str(config)])
