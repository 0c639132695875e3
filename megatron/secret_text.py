"""Texts that hold a secret, such as the address of a database with its password, and what is shown of them.

`guarded` turns such a text into a `SecretText`: a string that reads as its masked form wherever a string is read, so
that no message, record or log can hold the secret by accident. `reveal` gives the text as it was written and is called
where a connection is opened, nowhere else.

What is shown of an address is what is known to be harmless: scheme, user name, hosts, path, and the options listed
here. The values of all other options are masked.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

MASK = "***"
_SCHEME = r"(?:(?i:mongodb(?:\+srv)?):/+|[A-Za-z][\w+.-]*://|[\w+.-]*//(?=[^\s/:@]*:\S*@))"  # the last, mistyped
_STARTS_AS_ADDRESS = re.compile(rf"\s*{_SCHEME}")
# In a longer text an address ends at a blank; only a password may hold blanks, and then an @ follows.
_ADDRESS = re.compile(rf"{_SCHEME}(?:[^\s:/@?]*:(?!\d*(?:[,/?\s]|$))[^@]*@\S*|\S*)")
_WITHOUT_USER = ("sqlite:", "hf:", "file:")
_USER_IS_NO_SECRET = "mongodb"
_PLAIN_USER = re.compile(r"[\w.%+~$-]*")
_WRONG_PORT = re.compile(r":(?!\d*$)(.*)$", re.DOTALL)
# Options of a connection string that hold nothing secret, in small letters, and those of our own addresses.
_HARMLESS = """
    table collection column field
    appname authmechanism authsource compressors connect connecttimeoutms datetime_conversion directconnection
    gssapiservicename heartbeatfrequencyms j journal loadbalanced localthresholdms maxconnecting maxidletimems
    maxpoolsize maxstalenessseconds minpoolsize proxyhost proxyport readconcernlevel readpreference readpreferencetags
    replicaset retryreads retrywrites safe servermonitoringmode serverselectiontimeoutms serverselectiontryonce
    sockettimeoutms srvmaxhosts srvservicename ssl timeoutms tls tlsallowinvalidcertificates tlsallowinvalidhostnames
    tlscafile tlscertificatekeyfile tlscrlfile tlsdisableocspendpointcheck tlsinsecure tz_aware
    unicode_decode_error_handler uuidrepresentation w waitqueuemultiple waitqueuetimeoutms wtimeout wtimeoutms
    zlibcompressionlevel
"""
_SHOWN_OPTIONS = frozenset(_HARMLESS.split())


class SecretText(str):
    """A text whose characters are its masked form; `reveal` alone gives what was written.

    Two of them are equal when their masked forms are: a password may change between the starts of a run. Whatever is
    made of one (a slice, a sum, JSON, a copy by `dataclasses.asdict`) is a plain text without the secret. Only handing
    the object itself to a worker process carries the secret along.

    Args:
        shown: the masked form.
        secret: the text as it was written.
    """

    __slots__ = ("_secret",)
    _secret: str

    def __new__(cls, shown: str, secret: str) -> SecretText:
        made = super().__new__(cls, shown)
        made._secret = secret
        return made

    def reveal(self) -> str:
        """The text with its secret."""
        return self._secret

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self)

    def __copy__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SecretText, (str(self), self._secret)


def guarded(text: str) -> str:
    """The text, as a `SecretText` if an address in it holds a secret."""
    if isinstance(text, SecretText):
        return text
    shown = masked(text)
    return text if shown == text else SecretText(shown, text)


def reveal(text: str) -> str:
    """The text as it was written, with its secret if it holds one."""
    return text.reveal() if isinstance(text, SecretText) else text


def masked(text: str) -> str:
    """A text with `***` in place of every secret of the addresses in it."""
    if isinstance(text, SecretText):
        return str(text)
    if "//" not in text and ":/" not in text:
        return text
    if _STARTS_AS_ADDRESS.match(text):
        return _mask_address(text)[0]
    return _ADDRESS.sub(lambda found: _mask_address(found.group())[0], text)


def without_secret(message: str, text: str) -> str:
    """What a foreign program says of an address, unless it repeats a secret of it.

    Args:
        message: of a driver, for example.
        text: the address that it was given.
    """
    forms: set[str] = set()
    for found in _ADDRESS.findall(reveal(text)) or [reveal(text)]:
        for part in _mask_address(found)[1]:
            for plain in (part, unquote(part), unquote_plus(part)):
                forms |= {plain, quote(plain), quote(plain, safe=""), quote_plus(plain), repr(plain)[1:-1]}
    if any(form and form in message for form in forms):
        return "the message of the driver is left out, since it repeats a part of the address that is secret"
    return masked(message)


def _mask_address(address: str) -> tuple[str, list[str]]:
    """The masked form of an address, and what was masked."""
    start, scheme, rest = re.split(rf"({_SCHEME})", address, maxsplit=1)
    secrets: list[str] = []
    shown = start + scheme
    at = -1 if scheme.lower().startswith(_WITHOUT_USER) else rest.rfind("@")
    if at >= 0:
        shown += _mask_user(scheme, rest[:at], secrets) + "@"
        rest = rest[at + 1 :]
    place, mark, options = rest.partition("?")
    place, fragment_mark, fragment = place.partition("#")
    hosts, slash, path = place.partition("/")
    if not scheme.lower().startswith(_WITHOUT_USER):
        hosts = ",".join(_mask_port(host, secrets) for host in hosts.split(","))
    shown += hosts + slash + path + fragment_mark + _mask_whole(fragment, secrets) + mark
    return shown + "".join(_mask_option(option, secrets) for option in re.split("([&;])", options)), secrets


def _mask_user(scheme: str, user: str, secrets: list[str]) -> str:
    name, colon, password = user.partition(":")
    is_shown = (colon or scheme.lower().startswith(_USER_IS_NO_SECRET)) and _PLAIN_USER.fullmatch(name)
    return (name if is_shown else _mask_whole(name, secrets)) + colon + _mask_whole(password, secrets)


def _mask_port(host: str, secrets: list[str]) -> str:
    """Masks what stands in place of a port: a password whose @ and host were forgotten."""
    start = host.find("]") + 1  # behind an IPv6 address
    found = _WRONG_PORT.search(host, start)
    if found is None:
        return host
    return host[: found.start(1)] + _mask_whole(found.group(1), secrets)


def _mask_option(option: str, secrets: list[str]) -> str:
    name, equals, value = option.partition("=")
    if option in ("&", ";", "") or (equals and name.lower() in _SHOWN_OPTIONS):
        return option
    return f"{name}={_mask_whole(value, secrets)}" if equals else _mask_whole(option, secrets)


def _mask_whole(part: str, secrets: list[str]) -> str:
    if part and part != MASK:
        secrets.append(part)
    return MASK if part else part
