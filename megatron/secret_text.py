"""Masking of secrets, such as the password in the address of a database.

`guarded` converts a text with a secret to a `SecretText`: a string whose value is the masked form, so that no message,
record or log contains the secret by accident. `reveal` returns the original and is called only to open a connection.

Of an address only harmless parts are shown: scheme, user name, hosts, path, and the options listed here; the values of
all other options are masked. `masked` also masks secrets in ordinary text by their form: `user:password@host`,
authorization headers, tokens of well-known services. It leaves an e-mail address or `tp2@pp2` unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

MASK = "***"
_SCHEME = r"(?:(?i:mongodb(?:\+srv)?):/+|[A-Za-z][\w+.-]*://|[\w+.-]*//(?=[^\s/:@]*:\S*@))"  # the last, mistyped
_STARTS_AS_ADDRESS = re.compile(rf"\s*{_SCHEME}")
# In a longer text an address ends at a space; only a password may contain spaces, and is followed by an @. After an
# already masked password, words with an @ may follow.
_ADDRESS = re.compile(rf"{_SCHEME}(?:[^\s:/@?]*:(?!\d*(?:[,/?\s]|$)|\*{{3}}(?!\w))[^@]*@\S*|\S*)")
_WITHOUT_USER = ("sqlite:", "hf:", "file:")
_USER_IS_NO_SECRET = "mongodb"
_PLAIN_USER = re.compile(r"[\w.%+~$-]*")
_WRONG_PORT = re.compile(r":(?!\d*$)(.*)$", re.DOTALL)
# Harmless options of connection strings in lower case, and the options of our addresses.
_HARMLESS = """
    table collection column field split
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
# Every match contains one of these in lower case; a cheap test for ordinary lines.
_AUTHORIZATION_SIGNS = ("authorization", "api-key", "bearer")
_ASSIGNED_SIGNS = ("_token", "_key", "_secret", "password")
_TOKEN_SIGNS = ("hf_", "api_org_", "sk-", "gh", "github_pat_", "glpat-", "akia", "asia", "xox", "eyj")
# Not after a label of an e-mail address; a host without dots or port needs a password of some length.
_USER_AND_PASSWORD = re.compile(
    r"""(?<![\w/.@:%+~-])
    (?!(?i:mailto|e-?mail|mail|to|from|cc|bcc|reply-to|sender|contact|authors?|maintainers?|sip|xmpp|acct|sqlite|hf|file):)
    (?P<kept>[A-Za-z_][\w.%+~-]{0,63}:)(?!//|/[^\s@]{0,64}:\*\*\*@)
    (?: [^\s"'<>`]{1,256} (?=@(?:localhost|\d+(?:\.\d+){3}|\[[0-9a-fA-F:.]+\]|[\w-]+(?:\.[\w-]+)+|[\w-]+:\d+)(?![\w@]))
      | [^\s"'<>`]{6,256} (?=@[A-Za-z][\w-]*(?![\w@.])) )""",
    re.VERBOSE,
)
_AUTHORIZATION = re.compile(
    r"""(?P<kept>\b(?i:authorization|x-api-key|api-key)["']?\s*[:=]\s*["']?(?:(?i:bearer|basic|token|digest)\s+)?)[^\s"']+
    | (?P<bearer>\b(?i:bearer)\s+)(?:(?=[\w.~+/=-]*[\d_.~+/=])[\w.~+/=-]{8,}|[\w.~+/=-]{20,})(?<![.])""",
    re.VERBOSE,
)
_ASSIGNED = re.compile(
    r"""(?P<kept>(?<![A-Za-z0-9])(?i:hf_token|hugging_?face_hub_token|wandb_api_key|aws_secret_access_key
    |aws_session_token|openai_api_key|anthropic_api_key|github_token|gh_token|pgpassword)["']?\s*[:=]\s*["']?)
    [^\s"',;]+
    | (?P<name>(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]{0,64}_(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|PRIVATE_KEY)=)
    (?!\d+(?:\s|$))[^\s"',;]+""",
    re.VERBOSE,
)
_TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}           # Hugging Face
    | sk-(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])[\w-]{20,}              # OpenAI, Anthropic
    | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{22,} | glpat-[\w-]{20,}
    | (?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])               # Amazon
    | xox[abeoprs]-[\w-]{10,}                                # Slack
    | eyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]+                    # JSON Web Tokens
    )""",
    re.VERBOSE,
)
_FORMS = ((_AUTHORIZATION, _AUTHORIZATION_SIGNS), (_ASSIGNED, _ASSIGNED_SIGNS), (_TOKEN, _TOKEN_SIGNS))


class SecretText(str):
    """A string whose value is the masked form; only `reveal` returns the original.

    Two are equal if their masked forms are: a password may change between starts of a run. Anything derived from one (a
    slice, a sum, JSON, a copy by `dataclasses.asdict`) is a plain string without the secret. Only pickling the object
    for a worker process includes it.

    Args:
        shown: the masked form.
        secret: the original text.
    """

    __slots__ = ("_secret",)
    _secret: str

    def __new__(cls, shown: str, secret: str) -> SecretText:
        made = super().__new__(cls, shown)
        made._secret = secret
        return made

    def reveal(self) -> str:
        return self._secret

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self)

    def __copy__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SecretText, (str(self), self._secret)


def guarded(text: str) -> str:
    """The text, as a `SecretText` if an address in it has a secret."""
    if isinstance(text, SecretText):
        return text
    shown = _with_masked_addresses(text)
    return text if shown == text else SecretText(shown, text)


def reveal(text: str) -> str:
    """The original text, including secrets."""
    return text.reveal() if isinstance(text, SecretText) else text


def masked(text: str) -> str:
    """Replaces every secret in a text by `***`."""
    shown = _with_masked_addresses(text)
    small = shown.lower()
    for form, signs in _FORMS:
        if any(sign in small for sign in signs):
            shown = form.sub(_masked_form, shown)
    return _USER_AND_PASSWORD.sub(_masked_form, shown) if "@" in shown else shown


def masked_values(value: Any) -> Any:
    """Masks all strings in a JSON tree, for records of a program's arguments."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {key: masked_values(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(masked_values(one) for one in value)
    return value


def _masked_form(match: re.Match[str]) -> str:
    return "".join(kept for kept in match.groupdict().values() if kept) + MASK


def _with_masked_addresses(text: str) -> str:
    if isinstance(text, SecretText):
        return str(text)
    if "//" not in text and ":/" not in text:
        return text
    if _STARTS_AS_ADDRESS.match(text) and MASK not in text:
        return _mask_address(text)[0]
    return _ADDRESS.sub(lambda match: _mask_address(match.group())[0], text)


def without_secret(message: str, text: str) -> str:
    """The message of a foreign program about an address, unless it repeats a secret.

    Args:
        message: of a driver, for example.
        text: the address.
    """
    forms: set[str] = set()
    for address in _ADDRESS.findall(reveal(text)) or [reveal(text)]:
        for part in _mask_address(address)[1]:
            for plain in (part, unquote(part), unquote_plus(part)):
                forms |= {plain, quote(plain), quote(plain, safe=""), quote_plus(plain), repr(plain)[1:-1]}
    if any(form and form in message for form in forms):
        return "the driver's message is omitted, since it contains a secret part of the address"
    return masked(message)


def _mask_address(address: str) -> tuple[str, list[str]]:
    """The masked form of an address, and the masked parts."""
    start, scheme, rest = re.split(rf"({_SCHEME})", address, maxsplit=1)
    secrets: list[str] = []
    shown = start + scheme
    at = -1 if scheme.lower().startswith(_WITHOUT_USER) else rest.rfind("@")
    if at >= 0:
        shown += _mask_user(scheme, rest[:at], secrets) + "@"
        rest = rest[at + 1 :]
    location, mark, options = rest.partition("?")
    location, fragment_mark, fragment = location.partition("#")
    hosts, slash, path = location.partition("/")
    if not scheme.lower().startswith(_WITHOUT_USER):
        hosts = ",".join(_mask_port(host, secrets) for host in hosts.split(","))
    shown += hosts + slash + path + fragment_mark + _mask_whole(fragment, secrets) + mark
    return shown + "".join(_mask_option(option, secrets) for option in re.split("([&;])", options)), secrets


def _mask_user(scheme: str, user: str, secrets: list[str]) -> str:
    name, colon, password = user.partition(":")
    is_shown = (colon or scheme.lower().startswith(_USER_IS_NO_SECRET)) and _PLAIN_USER.fullmatch(name)
    return (name if is_shown else _mask_whole(name, secrets)) + colon + _mask_whole(password, secrets)


def _mask_port(host: str, secrets: list[str]) -> str:
    """Masks an invalid port: a password whose @ and host were forgotten."""
    start = host.find("]") + 1  # after an IPv6 address
    match = _WRONG_PORT.search(host, start)
    if match is None:
        return host
    return host[: match.start(1)] + _mask_whole(match.group(1), secrets)


def _mask_option(option: str, secrets: list[str]) -> str:
    name, equals, value = option.partition("=")
    if option in ("&", ";", "") or (equals and name.lower() in _SHOWN_OPTIONS):
        return option
    return f"{name}={_mask_whole(value, secrets)}" if equals else _mask_whole(option, secrets)


def _mask_whole(part: str, secrets: list[str]) -> str:
    if part and part != MASK:
        secrets.append(part)
    return MASK if part else part
