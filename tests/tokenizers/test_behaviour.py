"""Tokenizers compared by what they do: two forms of one are the same, and a changed entry is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron.errors import DataError
from megatron.tokenizers.behaviour import parts_of
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import write_vocabulary

END = "<|endoftext|>"
Description = dict[str, Any]


def as_library_writes(choice: TokenizerChoice, folder: Path) -> Path:
    """The `tokenizer.json` that Hugging Face has of a `vocab.json` and `merges.txt`."""
    vocabulary = json.loads(Path(str(choice.vocab_file)).read_text())
    lines = Path(str(choice.merge_file)).read_text().splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens([AddedToken(END, normalized=True)])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerChoice, Path]:
    """One tokenizer as two files of GPT-2 and as a folder with a `tokenizer.json`."""
    folder = tmp_path_factory.mktemp("forms")
    choice = write_vocabulary(folder)
    return choice, as_library_writes(choice, folder / "described")


def described(
    forms: tuple[TokenizerChoice, Path], folder: Path, change: Callable[[Description], None]
) -> TokenizerChoice:
    """A `tokenizer.json` with something changed."""
    description = json.loads((forms[1] / "tokenizer.json").read_text())
    change(description)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return of_folder(folder)


def of_folder(folder: Path) -> TokenizerChoice:
    return TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(folder))


def record_of(choice: TokenizerChoice) -> TokenizerRecord:
    """A record as it comes back from where it was stored."""
    return TokenizerRecord.from_json(json.loads(json.dumps(asdict(TokenizerRecord.of(build_tokenizer(choice))))))


def test_two_forms_are_one_tokenizer(forms: tuple[TokenizerChoice, Path]) -> None:
    one, other = build_tokenizer(forms[0]), build_tokenizer(of_folder(forms[1]))
    assert one.fingerprint != other.fingerprint
    assert one.behaviour == other.behaviour
    check_same_tokenizer("x was made", record_of(forms[0]), other)
    check_same_tokenizer("x was made", record_of(of_folder(forms[1])), one)


def swap(description: Description) -> None:
    merges = description["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def change_merge(description: Description) -> None:
    """The same token made of two others."""
    vocabulary, merges = description["model"]["vocab"], description["model"]["merges"]
    ways = (
        (place, [text[:cut], text[cut:]])
        for place, text in enumerate(map("".join, merges))
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary and [text[:cut], text[cut:]] not in merges
    )
    place, merge = next(ways)
    merges[place] = merge


def drop_merge(description: Description) -> None:
    del description["model"]["merges"][-1]


def change_token(description: Description) -> None:
    vocabulary = description["model"]["vocab"]
    taken = {piece for merge in description["model"]["merges"] for piece in merge}
    text = next(text for text in vocabulary if text not in taken and "\u0120" in text and len(text) > 2)
    description["model"]["merges"] = [merge for merge in description["model"]["merges"] if "".join(merge) != text]
    vocabulary["other"] = vocabulary.pop(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_merge, r"merge \d+ \(.* here\) differs"),
        (swap, r"several merges differ, or their order"),
        (drop_merge, r"it has \d+ merges, not \d+"),
        (change_token, r"token \d+ \('other' here\) differs"),
        (lambda d: d.update(normalizer={"type": "NFC"}), "the normalization differs"),
        (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "the pre-tokenization differs"),
        (
            lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 0, "content": "!"}),
            "the special tokens differ",
        ),
        (lambda d: d["model"].update(ignore_merges=True), "the algorithm differs"),
        (
            lambda d: d.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {END: {"id": END, "ids": [d["added_tokens"][0]["id"]], "tokens": [END]}},
                }
            ),
            "the ids around a text differ",
        ),
    ],
)
def test_what_differs_is_refused_and_named(
    change: Callable[[Description], None], says: str, forms: tuple[TokenizerChoice, Path], tmp_path: Path
) -> None:
    changed = build_tokenizer(described(forms, tmp_path, change))
    with pytest.raises(DataError, match=f"x was made with another tokenizer .*{says}.*, so its ids would mean"):
        check_same_tokenizer("x was made", record_of(forms[0]), changed)


def test_another_end_of_document_is_refused(forms: tuple[TokenizerChoice, Path], tmp_path: Path) -> None:
    tokenizers = []
    for end in (END, "a"):
        folder = tmp_path / end.strip("<|>")
        shutil.copytree(forms[1], folder)
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": end, "extra_special_tokens": [END, "a"]})
        )
        tokenizers.append(build_tokenizer(of_folder(folder)))
    one, other = tokenizers
    assert one.fingerprint == other.fingerprint and one.eod_id != other.eod_id
    record = TokenizerRecord.of(one)
    with pytest.raises(DataError, match=rf"documents end with {other.eod_id}, not {one.eod_id} \(eos_token\), so"):
        check_same_tokenizer("x was made", record, other)
    check_same_tokenizer("x was made", record, other, ends_matter=False)
    check_same_tokenizer("x was made", replace(record, eod_id=None), other)


def test_records_of_older_versions_are_compared_by_their_files(forms: tuple[TokenizerChoice, Path]) -> None:
    tokenizer = build_tokenizer(forms[0])
    older = replace(TokenizerRecord.of(tokenizer), behaviour={})
    check_same_tokenizer("x was made", older, tokenizer)
    with pytest.raises(DataError, match="tokens\\): its ids would mean other text"):
        check_same_tokenizer("x was made", older, build_tokenizer(of_folder(forms[1])))


def test_merges_as_texts_and_as_pairs_are_the_same(forms: tuple[TokenizerChoice, Path]) -> None:
    pairs = json.loads((forms[1] / "tokenizer.json").read_text())
    model = {**pairs["model"], "merges": [" ".join(pair) for pair in pairs["model"]["merges"]]}
    assert parts_of(pairs, ([], [])) == parts_of({**pairs, "model": model}, ([], []))
