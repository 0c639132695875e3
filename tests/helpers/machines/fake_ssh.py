"""A stand-in for `ssh` that runs the command in a folder of this machine, which plays the other one."""

from __future__ import annotations

from pathlib import Path

import pytest

_PROGRAM = """#!/bin/sh
printf '%s\\n' "$*" >> '{folder}/calls'
if [ -e '{folder}/calls_left' ]; then
    left=$(cat '{folder}/calls_left')
    [ "$left" -gt 0 ] || {{ echo 'Connection closed by remote host' >&2; exit 255; }}
    echo $((left - 1)) > '{folder}/calls_left'
fi
while [ "$1" != -- ]; do shift; done
shift 2
cd '{folder}/home' && exec sh -c "$*"
"""


class FakeSsh:
    """The stand-in, first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        self.home.mkdir()
        program = folder / "bin" / "ssh"
        program.write_text(_PROGRAM.format(folder=folder))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    @property
    def home(self) -> Path:
        """The folder that relative paths of the other machine are in."""
        return self.folder / "home"

    @property
    def calls(self) -> list[str]:
        """The words of every call, options included."""
        return (self.folder / "calls").read_text().splitlines()

    def breaks_after(self, calls: int | None) -> None:
        """Makes the connection fail after this many calls; None repairs it."""
        if calls is None:
            (self.folder / "calls_left").unlink()
        else:
            (self.folder / "calls_left").write_text(str(calls))
