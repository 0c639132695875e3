"""Messages are read from source code as templates, and found again by what a program printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site.messages import VALUE, Message, read_messages
from megatron import errors

ROOT = Path(__file__).resolve().parents[3]

SOURCE = """
class MegatronError(Exception):
    exit_code = ExitCode.HUMAN

class DataError(MegatronError):
    exit_code = ExitCode.DATA

class TornError(DataError):
    pass

class OtherError(Exception):
    pass

def read(path, count):
    text = f"{path}: the file has {count} bytes."
    if count:
        raise DataError(text + " Copy it again.")
    if path:
        raise TornError("cut in two" if count else f"cut after {count}")
    raise OtherError("nobody is shown this")

class Flags:
    def problems(self):
        yield f"--lr {self.lr} is out of range. Use less."
        return "short."

def elsewhere():
    yield "this is a sentence, but of no check."
"""


def test_templates_of_a_source_file(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "errors.py").write_text(SOURCE)
    found = read_messages(tmp_path)
    assert found.exit_codes == {"MegatronError": "HUMAN", "DataError": "DATA", "TornError": "DATA"}
    assert {(one.error, one.template) for one in found.messages} == {
        ("DataError", f"{VALUE}: the file has {VALUE} bytes. Copy it again."),
        ("TornError", "cut in two"),
        ("TornError", f"cut after {VALUE}"),
        ("ConfigError", f"--lr {VALUE} is out of range. Use less."),
    }
    assert {one.path for one in found.messages} == {"megatron/errors.py"}


def test_every_error_type_of_the_package_is_found() -> None:
    found = read_messages(ROOT)
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MegatronError):
            assert found.exit_codes[name] == kind.exit_code.name
    assert len(found.messages) > 800
    assert {one.error for one in found.messages} <= {*found.exit_codes}


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (f"{VALUE} is not a flag of this program. {VALUE}", "--num is not a flag of this program. See --help.", True),
        (f"{VALUE} is not a flag of this program. {VALUE}", "error: --x is not a flag of this program", True),
        (f"no room in {VALUE}. Free some.", "no room in /tmp", False),  # too short to be known by its beginning
        (f"no room in {VALUE}. Free some.", "no room in /tmp. Free some.", True),
        (f"{VALUE} holds {VALUE} (two).", "out holds 3 (three).", False),
    ],
)
def test_a_message_is_recognized(template: str, text: str, expected: bool) -> None:
    assert Message("megatron/x.py", 1, "DataError", template).matches(text) is expected
