"""Texts that hold a secret: whatever is made of one shows its masked form, and only `reveal` gives the secret."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing.reduction
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.flags.blends import read_weighted_group
from megatron.config.flags.command_line import parse_flags
from megatron.config.flags.fields import flag
from megatron.errors import ConfigError
from megatron.secret_text import MASK, SecretText, guarded, masked, masked_values, reveal, without_secret

ADDRESS = "mongodb://me:s3same@host/corpus?collection=web"
SHOWN = "mongodb://me:***@host/corpus?collection=web"


@dataclasses.dataclass(frozen=True)
class Paths:
    """A section of flags that holds an address."""

    data_path: tuple[str, ...] = flag((), "sources", nargs="+")
    count: int = flag(1, "a number")


def test_everything_made_of_a_secret_text_is_masked() -> None:
    text = guarded(ADDRESS)
    paths = Paths(data_path=(text,))
    made: list[Any] = [text, f"{text:>80}", "".join([text]), text + "", text[:], text.partition("?"), text.split("/")]
    made += [json.dumps({text: [text]}), str(paths), dataclasses.asdict(paths), dataclasses.astuple(paths), vars(paths)]
    made += [copy.copy(text), copy.deepcopy([text]), text.encode(), text.replace("corpus", "x"), text.lower()]
    assert not [one for one in made if "s3same" in f"{one} {one!r}"]
    assert text == SHOWN and hash(text) == hash(SHOWN) and text == guarded(ADDRESS.replace("s3same", "other"))
    assert reveal(text) == ADDRESS and guarded(text) is text
    assert type(dataclasses.asdict(paths)["data_path"][0]) is str
    sent = multiprocessing.reduction.ForkingPickler.loads(multiprocessing.reduction.ForkingPickler.dumps(text))
    assert isinstance(sent, SecretText) and sent.reveal() == ADDRESS  # a worker opens the store too
    assert type(guarded("mongodb://host/corpus?collection=web")) is str and reveal("data/x") == "data/x"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("mongodb://u:s3same@h1:1,h2:2/db?authSource=admin", "mongodb://u:***@h1:1,h2:2/db?authSource=admin"),
        ("mongodb+srv://u:s3same@h/db", "mongodb+srv://u:***@h/db"),
        ("mongodb://u:s3@same@h/db", "mongodb://u:***@h/db"),
        ("mongodb://u:s3/same?x#y@h/db?w=1", "mongodb://u:***@h/db?w=1"),
        ("mongodb://u:s3 same@h/db", "mongodb://u:***@h/db"),
        ("mongodb://u:p:s3same@h/db", "mongodb://u:***@h/db"),
        ("mongodb:/u:s3same@h/db", "mongodb:/u:***@h/db"),
        ("MongoDB://u:s3same@h/db", "MongoDB://u:***@h/db"),
        ("mongodb//u:s3same@h/db", "mongodb//u:***@h/db"),
        ("//u:s3same@h/db", "//u:***@h/db"),
        ("mongodb://u;s3same@h/db", "mongodb://***@h/db"),
        ("mongodb://u:s3same", "mongodb://u:***"),
        ("mongodb://u:s3same/db", "mongodb://u:***/db"),
        ("mongodb://h/db?tlsCertificateKeyFilePassword=s3same;w=1", "mongodb://h/db?tlsCertificateKeyFilePassword=***;w=1"),
        ("mongodb://h/db?authMechanismProperties=AWS_SESSION_TOKEN:s3same", "mongodb://h/db?authMechanismProperties=***"),
        ("mongodb://h/db?proxyPassword=s3same&w=1", "mongodb://h/db?proxyPassword=***&w=1"),
        ("mongodb://h/db?brandNewOption=s3same", "mongodb://h/db?brandNewOption=***"),
        ("mongodb://h/db?s3same", "mongodb://h/db?***"),
        ("mongodb://h/db#s3same", "mongodb://h/db#***"),
        ("mongodb://h/db?a=x:s3same@y", "mongodb://***:***@y"),
        ("https://s3same@hub/name", "https://***@hub/name"),
        ("redis://:s3same@h", "redis://:***@h"),
        ("a: 1 0:1 mongodb://u:s3same@h/db, 1 0:1 x@v2", "a: 1 0:1 mongodb://u:***@h/db, 1 0:1 x@v2"),
        ("a: 1 0:1 mongodb://u:s3 same@h/db, 1 0:1 x", "a: 1 0:1 mongodb://u:***@h/db, 1 0:1 x"),
    ],
)  # fmt: skip
def test_what_is_shown_of_an_address(written: str, shown: str) -> None:
    assert masked(written) == shown and masked(shown) == shown and "s3" not in shown


@pytest.mark.parametrize(
    "text",
    ["mongodb://[::1]:27017/db?readPreference=nearest", "sqlite:////a@b:c/x.db?table=t", "hf://o/n@r:s",
     "hf://data/one?split=train",
     "a/b-?.parquet",
     "mongodb://me@h/db", "mongodb://me:*** holds a character that must be encoded. Write %40 for @, %2F for /",
     "mongodb://me:***@h/db holds %40 for @",
     "train: 1 0:1 a, 1 0:1 b", "sub:/folder/x", "/a//b:c/d", "//server/share@v2"],
)  # fmt: skip
def test_what_holds_no_secret_is_left_alone(text: str) -> None:
    assert masked(text) == text


PARTS = st.text(string.ascii_letters + string.digits, min_size=24, max_size=48).map(lambda text: "A1" + text)
WORDS = st.sampled_from(["the", "tp2@pp2", "a@b.com", "0:1", "see", "x=1", "--flag", "(", '"', ","])
PASSWORDS = st.text(string.ascii_letters + string.digits + "!#$%&*+,-./:;=?@^_|~", min_size=6, max_size=20).filter(
    lambda text: not text.startswith("//") and len(set(text) - set("@")) > 3
)
FORMS = (
    "Authorization: Bearer {}", "authorization: basic {}", "{{'Authorization': 'Bearer {}'}}", "bearer {}",
    '-H "Authorization: {}"', "X-Api-Key: {}", "hf_{}", "api_org_{}", "sk-{}", "sk-proj-{}", "ghp_{}1234567",
    "github_pat_{}", "glpat-{}", "HF_TOKEN={}", "aws_secret_access_key = {}", 'export WANDB_API_KEY="{}"',
    "xoxb-{}", "MY_SECRET={}", "env OUR_API_KEY={} python x.py", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{}",
    "user:{}@host", "user:{}@db.example.com:5432/x",
)  # fmt: skip


@settings(max_examples=60)
@given(st.sampled_from(FORMS), PARTS, st.lists(WORDS), st.lists(WORDS))
def test_a_secret_in_a_known_form_never_appears(form: str, secret: str, before: list[str], after: list[str]) -> None:
    shown = masked(" ".join([*before, form.format(secret), *after]))
    assert secret not in shown and MASK in shown and masked(shown) == shown
    assert shown.startswith(" ".join(before)) and shown.endswith(" ".join(after))


@given(PASSWORDS, st.sampled_from(["host", "db.example.com", "10.0.0.1:5432", "localhost/db", "[::1]:22", "node-3:22"]))
def test_a_password_before_a_host_never_appears(password: str, host: str) -> None:
    assert masked(f"cannot reach me:{password}@{host} now") == f"cannot reach me:{MASK}@{host} now"


@given(st.text(string.ascii_letters + " .,;()/=_-\n", max_size=200))
def test_words_are_left_alone(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "text",
    ["mail joe@example.com or mailto:joe@example.com", "tp2@pp2, tp2:pp2@dp2", "the bearer of this token", "0:1@v2",
     "bearer authentication", "Bearer token", "To:joe@example.com", "git@github.com:owner/name.git", "hf_config",
     "ssh me@node-3", "hf_model_with_a_rather_long_name_of_many_words", "sk-learn-compatible-estimators-for-everyone",
     "--vocab-file /data/hf_tokenizer_files/vocab.json", "AKIAS are no keys", "127.0.0.1:29500", "node1:8@node2",
     "HF_TOKEN is not set", "at 12:30@noon", '{"a":"joe@example.com"}', "iter_0000100: 1.5@bf16", "ghp_short",
     "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "rank0:loss@1", "eyJ.x.y",
     "authorized by: nobody", "tokenizer: GPT2BPETokenizer", "eod_token=50256", "EOD_TOKEN=50256", "std::vector<a>@x"],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert masked(text) == text


def test_records_of_what_was_given_are_masked() -> None:
    tree = {"a": ["x", f"see {ADDRESS}"], "b": (1, "bearer A1b2C3d4E5"), "c": None}
    assert masked_values(tree) == {"a": ["x", f"see {SHOWN}"], "b": (1, f"bearer {MASK}"), "c": None}


def test_flags_keep_what_only_looks_like_a_token() -> None:
    path = "/data/hf_abcdefghijklmnopqrstuvwxyz0123456789/vocab.json"
    assert type(guarded(path)) is str and guarded(path) == path and masked(path) == "/data/***/vocab.json"


def test_what_a_driver_says_of_an_address() -> None:
    text = guarded("mongodb://u:s3%40same@h/db?proxyPassword=other%2Fone")
    for message in ("wrong password s3%40same", "user u, s3@same", "other/one", repr("other%2Fone")):
        assert "omitted" in without_secret(message, text)
    assert without_secret("no such database", text) == "no such database"
    assert without_secret("no server at mongodb://x:y@h", text) == "no server at mongodb://x:***@h"


@pytest.mark.parametrize(
    "words",
    [["--count", ADDRESS], [ADDRESS], ["--data-pth", ADDRESS], [f"--data-pth={ADDRESS}"], [f"--{ADDRESS}"],
     ["--count=" + ADDRESS], ["--count", "1", ADDRESS], ["--data-path", "", ADDRESS]],
)  # fmt: skip
def test_no_error_of_a_command_line_shows_a_secret(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(Paths, words, prog="x")
    assert "s3same" not in str(caught.value)


def test_addresses_of_a_command_line_and_of_groups_are_guarded() -> None:
    for words in (["--data-path", "0.5", ADDRESS], [f"--data-path={ADDRESS}"]):
        found = parse_flags(Paths, words, prog="x").data_path
        assert found[-1] == SHOWN and reveal(found[-1]) == ADDRESS
    group = read_weighted_group(guarded(f"a: 1 0:0.5 {ADDRESS}, 2 0.5:1 plain"), "--train-weighted-split-paths")
    assert [reveal(entry.prefix) for entry in group.entries] == [ADDRESS, "plain"]
    assert "s3same" not in repr(group)
    text = guarded("a: 1 0:1 mongodb://u:s3,same@h/db, 1 0:1 x")
    with pytest.raises(ConfigError, match=r"mongodb://u:\*\*\*@h/db.*contains a comma or a blank.*Write %2C") as caught:
        read_weighted_group(text, "--train-weighted-split-paths")
    assert "same" not in str(caught.value)
