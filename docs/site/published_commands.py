"""Says of every published launch command whether it trains here as it stands.

    python docs/site/published_commands.py
    python docs/site/published_commands.py --json
    python docs/site/published_commands.py --markdown

The commands are those that the example scripts of the Megatron family start, with the shell expanded and the paths
replaced: `tests/config/published/*.json`. Each is read together with its DeepSpeed file and completed for as many CUDA
devices as its script starts; nothing is trained. Works from a checkout of the project.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import process_exit
from megatron.config import ConfigSection, Machine, PathUse, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.errors import ConfigError, DataError, ExitCode

LIST = Path(__file__).resolve().parents[2] / "tests" / "config" / "published"
SETTINGS = "ds_config.json"  # the name of the DeepSpeed file in the flags
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class PublishedFlags(ConfigSection):
    """Flags of this program."""

    list: str = flag(str(LIST), "folder with the commands, one JSON file a repository", path=PathUse.FOLDER)
    json: bool = flag(False, "print one JSON object")
    markdown: bool = flag(False, "print the table of docs/published_commands.md")


@dataclass(frozen=True)
class Command:
    """One `pretrain_gpt.py` command of a published script.

    Attributes:
        variant: which of the script's commands it is, if it starts several.
        processes: devices that the script starts it on; if it takes those it finds, a number that its layout fits.
        vocabulary: entries of the tokenizer that it names.
        deepspeed: the DeepSpeed file, None without one.
    """

    repository: str
    script: str
    commit: str
    flags: tuple[str, ...]
    processes: int
    variant: str = ""
    vocabulary: int = GPT2_VOCABULARY
    deepspeed: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The script and the variant."""
        return f"{self.script} ({self.variant})" if self.variant else self.script


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command: the messages that refuse it, none if it is accepted."""

    command: Command
    refusals: tuple[str, ...] = ()
    notices: tuple[str, ...] = field(default=(), repr=False)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The flags and the keys of the DeepSpeed file that it is refused for."""
        return tuple(dict.fromkeys(subject(sentence) for sentence in self.refusals))


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the commands and prints what becomes of them."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(PublishedFlags, words, description=__doc__ or "")
    outcomes = [check(command) for command in read_commands(Path(flags.list))]
    if flags.json:
        print(json.dumps(_as_json(outcomes), indent=1))
    else:
        print("\n".join(table_lines(outcomes) if flags.markdown else report_lines(outcomes)))
    return int(ExitCode.DONE)


def read_commands(folder: Path) -> list[Command]:
    """Reads the list.

    Raises:
        DataError: there is none.
    """
    from megatron.files.plain import read_plain_json

    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(
            f"{folder} holds no list of commands. Run this program in a checkout of the project, or give --list."
        )
    commands = []
    for path in files:
        content = read_plain_json(path)
        for entry in content["commands"]:
            words = tuple(word for line in entry["flags"] for word in shlex.split(line))
            commands.append(Command(repository=content["repository"], **{**entry, "flags": words}))
    return commands


def check(command: Command) -> Outcome:
    """Reads and completes a command as the trainer does."""
    from megatron.engine.ds_config import deepspeed_config

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / SETTINGS
        settings.write_text(json.dumps(command.deepspeed or {}), encoding="utf-8")
        words = [word.replace(SETTINGS, str(settings)) for word in command.flags]
        try:
            request = parse(words)
            machine = Machine("cuda", command.processes, supports_fp16=True, supports_bf16=True, supports_fp8=True)
            config = resolve(request, machine, TokenizerFacts(command.vocabulary, 0, ""))
            deepspeed_config(config)
        except ConfigError as failure:
            return Outcome(command, tuple(text.replace(str(settings), SETTINGS) for text in failure.problems))
        said = (*config.notices, *config.ignored)
        return Outcome(command, notices=tuple(text.replace(str(settings), SETTINGS) for text in said))


def subject(sentence: str) -> str:
    """The subject of a message: the key of the DeepSpeed file, or the flag."""
    key = re.match(rf'--deepspeed_config {re.escape(SETTINGS)}: "([^"]+)"', sentence)
    if key:
        return key[1]
    flags = re.findall(r"(?<![\w-])--[\w-]+", sentence)
    return flags[0] if flags else sentence


def report_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line a command, with the sentences that refuse it below, and the totals."""
    for outcome in outcomes:
        word = "refused " if outcome.refusals else "accepted"
        yield f"{word} {outcome.command.repository} {outcome.command.name}"
        yield from (f"         {sentence}" for sentence in outcome.refusals)
    yield ""
    yield from (
        f"{accepted} of {total} commands of {repository} are accepted"
        for repository, accepted, total in totals(outcomes)
    )


def table_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The same as a table in Markdown."""
    yield "| repository | commands | accepted |"
    yield "|---|---|---|"
    yield from (f"| {repository} | {total} | {accepted} |" for repository, accepted, total in totals(outcomes))
    for repository, _, _ in totals(outcomes)[:-1]:
        yield ""
        yield f"### {repository}"
        yield ""
        yield "| script | outcome |"
        yield "|---|---|"
        for outcome in outcomes:
            if outcome.command.repository == repository:
                yield f"| `{outcome.command.script}`{_variant(outcome)} | {_verdict(outcome)} |"


def totals(outcomes: Sequence[Outcome]) -> list[tuple[str, int, int]]:
    """Repository, accepted commands and commands; the last row counts all of them."""
    rows = []
    for repository in dict.fromkeys(outcome.command.repository for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.command.repository == repository]
        rows.append((repository, sum(not outcome.refusals for outcome in own), len(own)))
    return [*rows, ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def _variant(outcome: Outcome) -> str:
    return f" ({outcome.command.variant})" if outcome.command.variant else ""


def _verdict(outcome: Outcome) -> str:
    reasons = ", ".join(f"`{name}`" for name in outcome.subjects)
    return f"refused: {reasons}" if reasons else "accepted"


def _as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "commands": [
            {
                **{name: getattr(outcome.command, name) for name in ("repository", "script", "commit", "variant")},
                "accepted": not outcome.refusals,
                "refused_for": outcome.subjects,
                "refusals": outcome.refusals,
                "notices": outcome.notices,
            }
            for outcome in outcomes
        ],
        "totals": {name: {"accepted": accepted, "commands": total} for name, accepted, total in totals(outcomes)},
    }


if __name__ == "__main__":
    process_exit.exit_with(main)
