"""Examples as cached ids: those of the template, made once, found to be bad at the start, noticed when changed."""

import json

import pytest

from megatron.data.datasets.examples.tokenized_examples import RecordSource, TokenizedExamples
from megatron.data.order.index_cache import IndexCache
from megatron.data.stores.store_source import stored_records
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.chat import load_chat_template
from megatron.tokenizers.chat.template import ChatTemplate
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.data.databases import new_database, numbered
from tests.tokenizers.chat.tokenizers_with_tokens import hugging_face_with

PAIRS = [{"prompt": f"what is {number}?", "answer": "a " * number + "ğ"} for number in range(1, 30)]
PLAIN = load_chat_template("plain", None)


def opened(path, tokenizer, folder, template=PLAIN):
    return TokenizedExamples(path, RecordSource.of_files(path), template, tokenizer, IndexCache(folder / "cache"))


def test_ids_are_those_of_the_template(write, tokenizer, tmp_path):
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2
    path = write([*PAIRS, {"messages": conversation}])
    examples = opened(path, tokenizer, tmp_path)
    assert len(examples) == 30
    for number, pair in enumerate(PAIRS):
        messages = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["answer"]}]
        ids, is_answer = PLAIN.example_ids(messages, tokenizer)
        assert examples.ids(number).tolist() == ids
        assert examples.is_answer(number).tolist() == is_answer
        assert examples.lengths[number] == len(ids)
        assert examples.last_answers[number].tolist() == [is_answer.index(True), len(ids)]
    ids, is_answer = PLAIN.example_ids(conversation, tokenizer)
    assert examples.is_answer(29).tolist() == is_answer
    assert examples.first_answers[29, 0] == is_answer.index(True)
    assert examples.last_answers[29, 0] > examples.first_answers[29, 1]


def test_ids_are_made_once_and_again_when_something_changes(write, tokenizer, tmp_path, monkeypatch):
    made = []
    original = ChatTemplate.examples
    monkeypatch.setattr(ChatTemplate, "examples", lambda *given: made.extend(given[1]) or original(*given))
    path = write(PAIRS)
    first = opened(path, tokenizer, tmp_path)
    assert len(made) == len(PAIRS)
    assert opened(path, tokenizer, tmp_path).fingerprint == first.fingerprint
    assert len(made) == len(PAIRS)
    changed = opened(
        path, tokenizer, tmp_path, ChatTemplate("mine", "{% for one in messages %}{{ one.content }}:{% endfor %}")
    )
    assert len(made) == 2 * len(PAIRS)
    write([{**PAIRS[0], "answer": "another"}, *PAIRS[1:]])
    again = opened(path, tokenizer, tmp_path)
    assert len({first.fingerprint, changed.fingerprint, again.fingerprint}) == 3
    assert len(made) == 3 * len(PAIRS)


def test_ids_are_made_again_with_another_end_of_document(write, tmp_path):
    """The file of the tokenizer stays the same: what ends a document is recorded next to it."""
    hugging_face_with(tmp_path, ("<|endoftext|>", "</s>"), "</s>")
    path, found = write(PAIRS[:3]), []
    for end in ("</s>", "<|endoftext|>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        tokenizer = build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(tmp_path)))
        examples = opened(path, tokenizer, tmp_path)
        assert examples.ids(0)[-1] == tokenizer.eod_id == tokenizer.special_ids[end]
        found.append((tokenizer.fingerprint, examples.fingerprint))
    assert found[0] == found[1], "the same data to a run that resumes, whose checkpoint knows the end of a document"


def test_an_example_without_a_token_of_an_answer_is_refused(write, tokenizer, tmp_path):
    """By a template that leaves out some answers; it took the place of the answer before."""
    source = (
        "{% for one in messages %}{% if one.role == 'assistant' and one.content != 'hidden' %}{% generation %}"
        "{{ one.content }}{% endgeneration %}{% else %}Q{% endif %}{% endfor %}"
    )
    template = ChatTemplate("hiding", source)
    for records, line in (([PAIRS[0], {"prompt": "q", "answer": "hidden"}], 2), ([{"q": "q", "a": "hidden"}], 1)):
        with pytest.raises(
            DataError, match=rf"chat.jsonl:{line}: the chat template hiding renders no token of the answer"
        ):
            opened(write(records), tokenizer, tmp_path, template)


def test_places_of_several_files(write, tokenizer, tmp_path):
    for name, records in {"a.jsonl": PAIRS[:3], "b.jsonl": [], "c.jsonl": PAIRS[3:5]}.items():
        write(records, name)
    examples = opened(f"{tmp_path}/*.jsonl", tokenizer, tmp_path)
    assert [examples.locate(number) for number in (0, 2, 3, 4)] == [
        f"{tmp_path}/a.jsonl:1",
        f"{tmp_path}/a.jsonl:3",
        f"{tmp_path}/c.jsonl:1",
        f"{tmp_path}/c.jsonl:2",
    ]


def test_bad_records_are_refused_with_file_and_line(write, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"chat.jsonl:3: its answer is empty. .*Correct or remove the record"):
        opened(write([*PAIRS[:2], {"prompt": "q", "answer": ""}]), tokenizer, tmp_path)
    with pytest.raises(DataError, match=r"chat.jsonl:1: the chat template dsgpt2 rejects .*no system messages"):
        system = {"system": "s", **PAIRS[0]}
        template = load_chat_template("dsgpt2", None)
        template.check_tokenizer = lambda tokenizer: None
        opened(write([system]), tokenizer, tmp_path, template)
    with pytest.raises(ConfigError, match=r"chat.jsonl:1: the chat template broken fails on a conversation"):
        opened(write(PAIRS), tokenizer, tmp_path, ChatTemplate("broken", "{{ messages + 1 }}"))
    with pytest.raises(DataError, match=r"chat.jsonl holds no examples"):
        opened(write([]), tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"--chat-template chatml requires the special tokens"):
        opened(write(PAIRS), tokenizer, tmp_path, load_chat_template("chatml", None))


@pytest.mark.parametrize("kind", ["sqlite", "mongomock"])
def test_pairs_of_a_store_are_those_of_a_file(kind, write, tokenizer, tmp_path):
    pairs = [(pair["prompt"], pair["answer"]) for pair in PAIRS]
    expected = opened(write(PAIRS), tokenizer, tmp_path)
    with new_database(kind, tmp_path) as database:
        database.write_pairs({"chat": numbered(pairs[:20]), "more": numbered(pairs[20:])})
        records = stored_records(database.address("chat", "more"))
        cache = IndexCache(tmp_path / "other")
        found = TokenizedExamples(database.address("chat", "more"), records, PLAIN, tokenizer, cache)
    for number in range(len(PAIRS)):
        assert found.ids(number).tolist() == expected.ids(number).tolist()
    assert found.locate(21).endswith(":21")
