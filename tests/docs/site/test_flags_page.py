"""The pages of flags have every flag with its values, default, status and what a resume does with it."""

import html
import re
from pathlib import Path

from docs.site.flags_page import flags_page, programs_page
from megatron.config.flags.fields import FROM_CHECKPOINT, MUST_MATCH
from megatron.config.parse import field_flags
from tests.config.command_lines import flag_table

ROOT = Path(__file__).resolve().parents[3]


def row_of(page: str, name: str) -> str:
    """The row of a table that has the flag."""
    (row,) = [line for line in page.splitlines() if f'<code id="{name}">' in line]
    return html.unescape(row)


def test_every_flag_is_there_once_with_what_the_program_says() -> None:
    page = flags_page()
    names = re.findall(r'<code id="([\w-]+)">', page)
    assert len(names) == len(set(names)) == len(flag_table())
    assert {f"--{name}" for name in names} == {row[0] for row in flag_table()}
    for entry in field_flags().values():
        row = row_of(page, entry.name.removeprefix("--"))
        assert entry.facts.resume in row and entry.facts.help in row
        assert all(f"`{spelling}`" in row for spelling in entry.facts.spelled if spelling != entry.name)
    assert f"| {MUST_MATCH} |" in row_of(page, "num-layers") and "int, ≥ 1" in row_of(page, "num-layers")
    assert "default: `1`" in row_of(page, "zero-stage") and "`0`, `1`, `2`, `3`" in row_of(page, "zero-stage")
    assert "turns off: " in row_of(page, "no-exit-on-signal")
    assert FROM_CHECKPOINT in page
    assert not re.findall(r"^#+ \w*[a-z][A-Z].*", page, flags=re.M), "a class is a title"


def test_ignored_and_refused_flags_say_why() -> None:
    fields, _, rest = flags_page().partition("## Accepted and ignored")
    ignored, _, refused = rest.partition("## Refused")
    for name, _, _, status in flag_table():
        anchor = f'<code id="{name.removeprefix("--")}">'
        part = refused if status == "refused" else fields + ignored if status == "ignored" else fields
        assert anchor in part, (name, status)
    assert "Use --bf16," in row_of(refused, "fp32-residual-connection")


def test_every_program_is_there_with_its_flags() -> None:
    page = programs_page(ROOT)
    for path in (ROOT / "tools").rglob("*.py"):
        assert f"\n## {path.name}\n" in page
    chapter = page.partition("## plot_run.py\n")[2].partition("\n## ")[0]
    assert "```shell\npython tools/runs/plot_run.py" in chapter and "default: `lm_loss`" in row_of(chapter, "metric")
    assert "### checkpoints.py prune" in page, "a program of several commands"
