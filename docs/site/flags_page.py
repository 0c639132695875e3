"""The pages of flags: the trainer's, from the typed fields, and each program's, from its own flags."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.config import ConfigSection, RunRequest
from megatron.config.flags.fields import FROM_CHECKPOINT, MAY_CHANGE, MUST_MATCH, RUN_MUST_MATCH, Flag, flags_of
from megatron.config.flags.legacy import Legacy, legacy_flags
from megatron.config.flags.shorthands import shorthand_flags
from megatron.config.flags.status_table import IGNORED, REFUSED
from megatron.config.run_config import sections_of

_FLAGS_BEGIN = """# Flags

Every flag of `pretrain_gpt.py`, with its values, its default, and what a resumed run does with it. The page is made
from the typed fields that the program itself reads, so it cannot be out of date.

A field of `--config FILE` has the flag's name without dashes in front and with underscores (`num_layers: 12`); the
command line wins over the file, and the file over a preset. A switch that is on by default is listed by the flag that
turns it off.

| on resume | meaning |
|---|---|
| {may_change} | the new value holds; where it changes the course of training, a notice says so |
| {must_match} | another value than the checkpoint's is refused, with both values |
| {run_must_match} | the same, except that `--finetune` may change it |
| {from_checkpoint} | the checkpoint's value holds |

"""
_PROGRAMS_BEGIN = """# Programs

What each program in `tools/` does, and its flags. With `--help` it prints the same.

"""


def flags_page() -> str:
    """Markdown of all flags of training, by section, with those that are ignored or refused at the end."""
    text = _FLAGS_BEGIN.format(
        may_change=MAY_CHANGE, must_match=MUST_MATCH, run_must_match=RUN_MUST_MATCH, from_checkpoint=FROM_CHECKPOINT
    )
    for section in sections_of(RunRequest).values():
        flags = flags_of(section)
        if flags:
            text += f"## {_title(section)}\n\n{_sentence(section)}\n\n{_table(flags, with_resume=True)}\n"
    shorthands = [entry.flag for entry in shorthand_flags().values()]
    text += (
        "## Flags that replace others\n\nUpstream's names for what other flags say here; [the network](../models.md) "
        f"explains them.\n\n{_table(shorthands, with_resume=False)}\n"
    )
    legacy = legacy_flags().values()
    for status, title, verb in (
        (IGNORED, "Accepted and ignored", "A script that has one of these runs, and a notice says what happens"),
        (
            REFUSED,
            "Refused",
            "These would change what is trained, so a run does not start",
        ),
    ):
        text += f"## {title}\n\n{verb}.\n\n{_legacy_table(entry for entry in legacy if entry.status == status)}\n"
    return text


def programs_page(root: Path) -> str:
    """Markdown of the programs of the folder `tools`, with their flags."""
    text = _PROGRAMS_BEGIN
    for path in sorted((root / "tools").rglob("*.py"), key=lambda path: path.name):
        module = importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
        sections = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, ConfigSection) and value.__module__ == module.__name__
        ]
        text += f"## {path.name}\n\n{_program_text(module.__doc__ or '')}\n\n"
        for section in sections:
            own = flags_of(section)
            command = section.__name__.removesuffix("Flags").lower()
            if own:
                title = "" if len(sections) == 1 else f"### {path.name} {command}\n\n"
                text += f"{title}{_table(own, with_resume=False)}\n"
    return text


def _program_text(text: str) -> str:
    """A docstring as Markdown: its paragraphs as they are, its indented commands as code."""
    shown = []
    for paragraph in text.strip().split("\n\n"):
        is_command = paragraph.lstrip().startswith(("python ", "torchrun ", "deepspeed "))
        shown.append(f"```shell\n{_dedented(paragraph)}\n```" if is_command else html.escape(paragraph, quote=False))
    return "\n\n".join(shown)


def _dedented(paragraph: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in paragraph.splitlines())


def _title(section: type) -> str:
    words = section.__name__.removesuffix("Request").removesuffix("Config")
    return {
        "Model": "Network",
        "Recompute": "Recomputing activations",
        "Document": "Documents within a sample",
        "Loss": "Objective and loss",
        "Masking": "Masked samples",
        "Finetuning": "Fine-tuning",
        "Random": "Random numbers",
        "Kernel": "Kernels",
        "Parallel": "Layout",
        "Optim": "Optimizer, batch and schedule",
        "Data": "Data and tokenizer",
        "FlagFiles": "Files of flags, and presets",
        "Loading": "What a run starts from",
        "Saving": "Saving checkpoints",
        "Report": "Logs and reports",
        "Safety": "Safeguards",
    }.get(words, words)


def _sentence(section: type) -> str:
    return html.escape((section.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "), quote=False)


def _table(flags: Sequence[Flag], *, with_resume: bool) -> str:
    head = "| flag | what it does |" + (" on resume |" if with_resume else "")
    rows = [head, "|---" * (3 if with_resume else 2) + "|"]
    for flag in flags:
        cells = [f"{_names(flag)}<br>{_values(flag)}", _meaning(flag)]
        rows.append("| " + " | ".join(cells + ([_cell(flag.facts.resume)] if with_resume else [])) + " |")
    return "\n".join(rows) + "\n"


def _names(flag: Flag) -> str:
    anchor = flag.name.removeprefix("--")
    also = [text for text in flag.facts.spelled if text != flag.name]
    shown = f'<code id="{anchor}">{flag.name}</code>'
    return shown + "".join(f"<br>also `{text}`" for text in also)


def _values(flag: Flag) -> str:
    default = _default(flag)
    if flag.element is bool and not flag.is_tuple:
        return default
    if flag.facts.choices:
        kind = ", ".join(f"`{choice}`" for choice in flag.facts.choices)
    else:
        kind = flag.type_name + "".join(f", {bound}" for bound in _bounds(flag))
    return f"{kind}; {default}" if default else kind


def _bounds(flag: Flag) -> Iterator[str]:
    facts = flag.facts
    for sign, bound in (("≥", facts.at_least), (">", facts.above), ("≤", facts.at_most), ("<", facts.below)):
        if bound is not None:
            yield f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}"


def _default(flag: Flag) -> str:
    if flag.required:
        return "required"
    if flag.facts.computed is not None:
        return "default: computed"
    if flag.default in (None, "", ()):
        return ""
    return f"default: `{flag.shown_default}`"


def _meaning(flag: Flag) -> str:
    text = f"turns off: {flag.facts.help}" if flag.default is True and flag.element is bool else flag.facts.help
    if flag.facts.ignored:
        text += f". **Ignored:** {flag.facts.ignored}"
    return _cell(text)


def _legacy_table(entries: Iterable[Legacy]) -> str:
    rows = ["| flag | why, and what to use |", "|---|---|"]
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        anchor = entry.flag.positive_name.removeprefix("--")
        by_reason.setdefault(entry.reason, []).append(f'<code id="{anchor}">{entry.flag.positive_name}</code>')
    rows += [f"| {'<br>'.join(names)} | {_cell(reason)} |" for reason, names in by_reason.items()]
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """A text that can be put in a cell: with nothing in it that Markdown would take for a column or emphasis."""
    escaped = html.escape(text, quote=False)
    for sign in "|*_[]":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return escaped
