"""Texts that hold a secret: whatever is made of one shows its masked form, and only `reveal` gives the secret."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing.reduction
from typing import Any

import pytest

from megatron.config.flags.blends import read_weighted_group
from megatron.config.flags.command_line import parse_flags
from megatron.config.flags.fields import flag
from megatron.errors import ConfigError
from megatron.secret_text import SecretText, guarded, masked, reveal, without_secret

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
    made: list[Any] = [text, repr(text), f"{text}", f"{text:>80}", "".join([text]), text + "", text[:]]
    made += [json.dumps([text]), json.dumps({text: 1}), str(paths), dataclasses.asdict(paths), text.partition("?")]
    made += [
        copy.copy(text),
        copy.deepcopy([text]),
        text.encode(),
        text.replace("corpus", "x"),
        dataclasses.astuple(paths),
    ]
    made += [
        json.loads(json.dumps(dataclasses.asdict(paths))),
        text.format(),
        text.split("/"),
        text.lower(),
        [text],
        vars(paths),
    ]
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
     "a/b-?.parquet",
     "mongodb://me@h/db", "train: 1 0:1 a, 1 0:1 b", "sub:/folder/x", "/a//b:c/d", "//server/share@v2"],
)  # fmt: skip
def test_what_holds_no_secret_is_left_alone(text: str) -> None:
    assert masked(text) == text


def test_what_a_driver_says_of_an_address() -> None:
    text = guarded("mongodb://u:s3%40same@h/db?proxyPassword=other%2Fone")
    for message in ("wrong password s3%40same", "user u, s3@same", "other/one", repr("other%2Fone")):
        assert "left out" in without_secret(message, text)
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
    with pytest.raises(ConfigError, match=r"mongodb://u:\*\*\*@h/db.*holds a comma or a blank.*Write %2C") as caught:
        read_weighted_group(text, "--train-weighted-split-paths")
    assert "same" not in str(caught.value)
