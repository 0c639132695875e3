"""Tokens, hosts and origins: who may use the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.secret_text import SecretText
from trident.serve.access import Access, allowed_hosts, host_name, is_loopback, read_token
from trident.serve.requests.refusals import Refusal

TOKEN = "0123456789abcdefGHIJ"


def refused(access: Access, path: str = "/v1/models", **headers: str) -> int:
    """The status of a request with these headers; 200 if it is not refused."""
    try:
        access.check(path, {name.replace("_", "-"): value for name, value in headers.items()})
    except Refusal as refusal:
        return refusal.status
    return 200


def test_the_token_is_required_except_for_the_page_and_for_health() -> None:
    access = Access(SecretText("***", TOKEN))
    for wrong in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"):
        assert refused(access, authorization=wrong) == 401, wrong
    assert refused(access, authorization=f"Bearer {TOKEN}") == refused(access, authorization=f"bearer  {TOKEN}") == 200
    assert [refused(access, path) for path in ("/", "/health", "/metrics", "/generate", "/v1/completions")] == [
        200, 200, 401, 401, 401,
    ]  # fmt: skip
    with pytest.raises(Refusal, match="Authorization: Bearer TOKEN") as caught:
        access.check("/v1/models", {})
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"} and TOKEN not in str(caught.value) + repr(access)


def test_a_server_on_the_loopback_answers_to_its_own_names_only() -> None:
    access = Access(hosts=allowed_hosts("127.0.0.1", ("Proxy.Example",)))
    for host in ("localhost:4000", "127.0.0.1", "[::1]:4000", "LOCALHOST:1", "proxy.example:80"):
        assert refused(access, host=host) == 200, host
    for host in ("evil.example", "evil.example:4000", "localhost.evil.example", "", "[::2]:4000", "127.0.0.1.nip.io"):
        assert refused(access, host=host) == 421, host
    assert refused(access) == 200  # HTTP/1.0 names no host, and no browser speaks it
    with pytest.raises(Refusal, match=r"Unknown host 'evil\.example'.*--allowed-host"):
        access.check("/", {"host": "evil.example"})


def test_other_machines_may_use_any_name() -> None:
    assert allowed_hosts("0.0.0.0", ()) is None
    assert refused(Access(hosts=None), host="whatever.example") == 200


def test_another_page_is_refused_unless_it_is_allowed() -> None:
    here, there = {"host": "localhost:4000", "origin": "http://localhost:4000"}, "https://other.example"
    assert refused(Access(), **here) == 200
    assert refused(Access(), host="localhost:4000", origin=there) == 403
    assert refused(Access(), host="localhost:4000", origin="http://localhost:4001") == 403
    assert refused(Access(), host="localhost:4000", origin="null") == 403
    assert refused(Access(origins=(there,)), host="localhost:4000", origin=there) == 200
    assert refused(Access(origins=("*",)), host="localhost:4000", origin=there) == 200
    with pytest.raises(Refusal, match=r"another web page \(https://other\.example\).*--cors-origin"):
        Access().check("/", {"host": "localhost:4000", "origin": there})


def test_an_image_on_another_page_starts_no_generation() -> None:
    """A browser sends no Origin with it, but Sec-Fetch-Site."""
    headers = {"host": "localhost:4000", "sec_fetch_site": "cross-site"}
    assert refused(Access(), "/generate", **headers) == 403
    assert refused(Access(), "/", **headers) == 200  # a link to the chat page
    assert refused(Access(), "/generate", host="localhost:4000", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize(
    ("host", "name"), [("a.b:80", "a.b"), ("A", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), (":80", ""), ("[x", "x")]
)
def test_the_port_is_no_part_of_a_host(host: str, name: str) -> None:
    assert host_name(host) == name


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.0.1", "::", "example.org", "")))


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    path.chmod(0o600)
    for found in (read_token(str(path), None), read_token(None, TOKEN)):
        assert found is not None and found.reveal() == TOKEN and TOKEN not in f"{found} {found!r}"
    assert read_token(None, None) is None and capsys.readouterr().err == ""
    path.chmod(0o644)
    read_token(str(path), None)
    assert f"other users can read {path}" in capsys.readouterr().err


def test_an_unusable_token_is_refused_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for wrong in ("short", "two words are no token", "ş" * 20, "x" * 5000, ""):
        path.write_text(wrong)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"token \(--token-file\) holds no usable token") as caught:
            read_token(str(path), None)
        assert not wrong or wrong not in str(caught.value).replace(str(path), "")
    with pytest.raises(ConfigError, match="MEGATRON_SERVE_TOKEN holds no usable token"):
        read_token(None, "short")
    with pytest.raises(ConfigError, match="are both given"):
        read_token(str(path), TOKEN)
    with pytest.raises(StorageError, match="absent .*cannot be read: No such file"):
        read_token(str(tmp_path / "absent"), None)
