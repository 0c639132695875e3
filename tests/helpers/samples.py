"""How much of a campaign of random cases the suite does; `--cases` asks for more."""

from __future__ import annotations

DEFAULT_CASES = 800
