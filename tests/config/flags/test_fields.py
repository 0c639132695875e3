"""Declarations of flags, read back from a dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.flags.fields import MAY_CHANGE, MUST_MATCH, derived, flag, flags_of, resume_rule


@dataclass(frozen=True)
class Declared:
    """One field of every kind."""

    size: int = flag(help="a size", resume=MUST_MATCH)
    rate: float | None = flag(None, "a rate")
    names: tuple[str, ...] = flag((), "names", nargs="+")
    pair: tuple[int, int] | None = flag(None, "two numbers")
    fast: bool = flag(True, "be fast", spelled=("--no-quick",))
    doubled: int = flag(help="twice the size", computed=lambda declared: 2 * declared.size)
    rank: int = derived("where it runs", resume=MUST_MATCH)


FLAGS = {found.field: found for found in flags_of(Declared)}


def test_types_are_read_from_the_annotations() -> None:
    kinds = {name: (found.type_name, found.required) for name, found in FLAGS.items()}
    assert kinds == {
        "size": ("int", True),
        "rate": ("float", False),
        "names": ("str ...", False),
        "pair": ("int x 2", False),
        "fast": ("bool", False),
        "doubled": ("int", False),
    }


def test_defaults_in_the_help_text() -> None:
    shown = {name: found.shown_default for name, found in FLAGS.items()}
    assert shown == {"size": "None", "rate": "None", "names": "none", "pair": "None", "fast": "on", "doubled": "None"}
    assert [FLAGS[name].empty_value for name in ("size", "names", "fast")] == [0, (), False]


def test_names_and_spellings() -> None:
    fast = FLAGS["fast"]
    assert (fast.name, fast.positive_name) == ("--no-fast", "--fast")
    assert fast.spellings == {"--fast": True, "--no-fast": False, "--no-quick": False}
    assert FLAGS["size"].spellings == {"--size": True}


def test_the_resume_rule_of_a_field() -> None:
    rules = {field.name: resume_rule(field) for field in dataclasses.fields(Declared)}
    assert (rules["size"], rules["rank"], rules["rate"]) == (MUST_MATCH, MUST_MATCH, MAY_CHANGE)
