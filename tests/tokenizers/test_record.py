"""Which tokenizer made ids: records and the check of a run's tokenizer."""

import json
from dataclasses import asdict, replace

import pytest

from megatron.errors import CheckpointError, DataError
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer

RECORD = TokenizerRecord("GPT2BPETokenizer", "ab" * 32, 500, 499)


def test_a_record_round_trips_through_json() -> None:
    assert TokenizerRecord.from_json(json.loads(json.dumps(asdict(RECORD)))) == RECORD
    older = TokenizerRecord.from_json({"fingerprint": None, "vocab_size": 7})
    assert older == TokenizerRecord("unnamed", None, 7, None)


def test_the_same_tokenizer_passes_and_so_does_an_unknown_fingerprint() -> None:
    check_same_tokenizer("x was made", RECORD, replace(RECORD, name="HFTokenizer"))
    check_same_tokenizer("x was made", replace(RECORD, fingerprint=None), RECORD)


@pytest.mark.parametrize("changed", [{"fingerprint": "cd" * 32}, {"vocab_size": 501}])
def test_another_tokenizer_is_refused_with_both(changed: dict[str, object]) -> None:
    other = replace(RECORD, name="HFTokenizer", **changed)  # type: ignore[arg-type]
    text = (
        r"x was made with another tokenizer \(GPT2BPETokenizer, fingerprint abababababab, 500 tokens\) than this run's "
        rf"\(HFTokenizer, {str(other.fingerprint)[:12]}, {other.vocab_size} tokens\): .*--vocab-file.*, or stop\."
    )
    with pytest.raises(DataError, match=text):
        check_same_tokenizer("x was made", RECORD, other, advice=", or stop")
    with pytest.raises(CheckpointError, match=str(other.vocab_size)):
        check_same_tokenizer("x was trained", RECORD, other, CheckpointError)
