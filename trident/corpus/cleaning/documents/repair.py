"""Repairing texts: characters that were decoded wrongly, control characters, odd spaces.

Source: the defaults of ftfy's `fix_text`, which upstream's `cleanup_dataset.py` calls (`tools/openwebtext/`).
"""

from __future__ import annotations

import re

from megatron.errors import ConfigError

# Text that ftfy may change: anything but printable ASCII, tabs and newlines, and HTML entities.
_SUSPECT = re.compile("[^\t\n -~]|&#?[0-9A-Za-z]+;")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_MANY_BLANK_LINES = re.compile("\n{4,}")


class TextRepair:
    """Repairs mojibake and similar damage with ftfy.

    Args:
        straighten_quotes: also replace curly quotes by straight ones, like upstream.

    Raises:
        ConfigError: ftfy is not installed.
    """

    def __init__(self, straighten_quotes: bool = True) -> None:
        try:
            import ftfy
        except ImportError as failure:
            raise ConfigError("--fix-text requires the ftfy package (pip install ftfy).") from failure
        self._fix = ftfy.fix_text
        plain = ftfy.TextFixerConfig(explain=False, uncurl_quotes=straighten_quotes)
        self._configs = (plain, plain._replace(unescape_html=False))

    def repaired(self, text: str) -> str:
        """Returns the text repaired by ftfy, which works line by line.

        Lines of plain ASCII without entities, which ftfy never changes, are skipped; from the first line with a `<` on,
        entities are kept.
        """
        suspect = _SUSPECT.search(text)
        if suspect is None:
            return text
        markup_at = text.find("<")
        markup_line_at = text.rfind("\n", 0, markup_at) + 1 if markup_at >= 0 else len(text)
        parts = []
        done = 0
        while suspect is not None:
            start = text.rfind("\n", done, suspect.start()) + 1 or done
            stop = text.find("\n", suspect.start()) + 1 or len(text)
            parts.append(text[done:start])
            parts.append(self._fix(text[start:stop], self._configs[start >= markup_line_at]))
            done = stop
            suspect = _SUSPECT.search(text, done)
        parts.append(text[done:])
        return "".join(parts)


def with_plain_spaces(text: str) -> str:
    """Returns the text with one kind of space and line end, and without invisible characters.

    Indentation and runs of spaces inside a line are kept for code and tables. Trailing spaces are removed, as are all
    but two consecutive blank lines, and blank lines at the ends of the text. The joiners of Arabic and Indian scripts
    and of emoji (U+200C, U+200D) are kept.
    """
    if not text.replace("\n", "").replace("\t", "").isprintable():  # everything replaced below is not printable
        text = _LINE_ENDS.sub("\n", text)
        text = _CONTROLS.sub("", text)
        text = _SPACES.sub(" ", text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if "\n\n\n\n" in text:
        text = _MANY_BLANK_LINES.sub("\n\n\n", text)
    return text.lstrip("\n").rstrip()
