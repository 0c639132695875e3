"""Access control: a bearer token, and the origins and hosts that the server accepts.

A browser lets any page send requests to this machine's own addresses, and DNS rebinding gives a page's own name such an
address. So requests with a foreign Origin or a foreign Host header are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.errors import ConfigError, StorageError, printable
from megatron.files.plain import open_stream
from megatron.secret_text import MASK, SecretText
from trident.serve.requests.refusals import Refusal

TOKEN_VARIABLE = "MEGATRON_SERVE_TOKEN"
ANY_ORIGIN = "*"
_MIN_LETTERS = 16
_MAX_LETTERS = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Checks requests before anything else is done for them.

    Args:
        token: required with every request, except for `open_paths`; None requires none.
        origins: other web origins that may send requests; `*` allows all.
        hosts: accepted names in the Host header; None accepts all.
        open_paths: paths that need no token, and that a link on another page may open.
    """

    token: SecretText | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    open_paths: frozenset[str] = frozenset({"/", "/health"})

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Checks one request.

        Args:
            headers: keyed by lower-case name.

        Raises:
            Refusal: a foreign host or origin, or no valid token.
        """
        self._check_host(headers.get("host"))
        self._check_origin(path, headers)
        if self.token is not None and path not in self.open_paths:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            is_valid = hmac.compare_digest(token.strip().encode(), self.token.reveal().encode())
            if scheme.lower() != "bearer" or not is_valid:
                raise Refusal(
                    401,
                    "This server requires a token: send the header Authorization: Bearer TOKEN.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _check_host(self, host: str | None) -> None:
        if self.hosts is None or host is None:
            return
        name = host_name(host)
        if name not in self.hosts:
            raise Refusal(
                421,
                f"Unknown host {printable(name, 100)}. To accept it, start the server with --allowed-host.",
                code="wrong_host",
            )

    def _check_origin(self, path: str, headers: Mapping[str, str]) -> None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if ANY_ORIGIN in self.origins or origin in self.origins:
            return
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site") and path not in self.open_paths
        else:
            is_foreign = origin not in (f"http://{host}", f"https://{host}")
        if is_foreign:
            raise Refusal(
                403,
                f"The request comes from another web page ({printable(origin or 'unknown', 100, quoted=False)}). To "
                "allow that, start the server with --cors-origin.",
                code="foreign_origin",
            )


def host_name(host: str) -> str:
    """The name or address in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def is_loopback(host: str) -> bool:
    """True if a name or address is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_hosts(host: str, more: tuple[str, ...]) -> frozenset[str] | None:
    """The accepted Host names of a server bound to `host`; None (any) unless it is bound to the loopback."""
    if not is_loopback(host) and not more:
        return None
    return _LOOPBACK_NAMES | {host.lower()} | {name.lower() for name in more}


def read_token(path: str | None, from_environment: str | None) -> SecretText | None:
    """The token, from a file or from the environment: a command line is visible to every user of the machine.

    Raises:
        ConfigError: both are given, or the token is unusable.
        StorageError: the file cannot be read.
    """
    if path is not None and from_environment is not None:
        raise ConfigError(f"--token-file {path} and {TOKEN_VARIABLE} are both given. Remove one of them.")
    if path is None:
        return None if from_environment is None else _checked(from_environment, TOKEN_VARIABLE)
    try:
        if Path(path).stat().st_mode & 0o077:
            log.warning(f"other users can read {path} (--token-file). Restrict it with chmod 600 {path}.")
        with open_stream(path) as stream:
            content = stream.read(_MAX_LETTERS + 1)
    except OSError as failure:
        raise StorageError(f"{path} (--token-file) cannot be read: {failure.strerror or failure}.") from failure
    return _checked(content.decode("latin-1").strip(), f"{path} (--token-file)")


def _checked(token: str, source: str) -> SecretText:
    if not _MIN_LETTERS <= len(token) <= _MAX_LETTERS or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(
            f"{source} holds no usable token: it must be {_MIN_LETTERS} to {_MAX_LETTERS} visible ASCII characters "
            f'without spaces. Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))".'
        )
    return SecretText(MASK, token)
