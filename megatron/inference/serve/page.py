"""The chat page: one file without network access, and the headers that keep it so."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Page:
    """The page and the headers that it is sent with."""

    content: bytes
    headers: Mapping[str, str]


def read_page() -> Page:
    """Reads the page; the browser may run its own script and style only, and talk to this server only."""
    content = _FILE.read_bytes()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(content, 'script')}",
            f"style-src {_hashes(content, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(
        content,
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hashes(content: bytes, element: str) -> str:
    """The sources that a policy allows: one hash for each inline element of that kind."""
    found = re.findall(rf"<{element}>(.*?)</{element}>".encode(), content, flags=re.S)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
