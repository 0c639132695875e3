"""What a proof compares: tokens, lengths, and how far apart logits may be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.errors import ConversionError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.convert.hugging_face import proof
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.proof import Expected, Side, expected_logits, proof_text, prove
from trident.convert.hugging_face.reference import ReferenceLogits
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.weight_files import read_json_file


def test_a_proof_has_one_entry_a_line() -> None:
    text = proof_text({"is_equal": True, "sequences": [{"tokens": [1, 2]}]})
    assert json.loads(text) == {"is_equal": True, "sequences": [{"tokens": [1, 2]}]}
    assert text.count("\n") == 4


@pytest.fixture(scope="module")
def compared(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Expected, Path, Manifest]:
    """A model, what transformers says of it, and its import."""
    source = tiny_model("mistral")
    checkpoint = import_model(ModelImportRequest(source, tmp_path_factory.mktemp("proof") / "made")) / "iter_0000000"
    config = read_json_file(source / "config.json", "")
    family = family_of(config)
    tokenizer = build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(source)))
    expected = expected_logits(Side(family, source, family.read_config(config), tokenizer))
    return expected, checkpoint, read_manifest(checkpoint)


def shifted(expected: Expected, share: float) -> Expected:
    """The same with one logit off by a share of the largest."""
    values = [logits.clone() for logits in expected.logits.values]
    values[0][0, -1, 0] += share * expected.largest
    return dataclasses.replace(expected, logits=ReferenceLogits(tuple(values), "sdpa"))


def test_positions_and_tokens_of_both_kinds(compared: tuple[Expected, Path, Manifest]) -> None:
    expected, *_ = compared
    (batch,), (logits,) = expected.batches, expected.logits.values
    tokens = batch.tokens
    assert tokens.shape == (2, 64) and logits.shape == (2, 64, 280) and logits.dtype == torch.float32
    decoded = expected.side.tokenizer.decode(tokens[1].tolist())
    assert decoded.startswith("The treaty was signed in 1648")
    assert expected.logits.attention == "sdpa"


def test_a_difference_beyond_the_tolerance_is_allowed_only_as_large_as_the_reference_itself_has(
    compared: tuple[Expected, Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, checkpoint, manifest = compared
    off = shifted(expected, 3e-5)

    def eager(share: float) -> None:
        monkeypatch.setattr(proof, "expected_logits", lambda side, attention: shifted(expected, share))

    eager(3e-5)  # the same as sdpa
    with pytest.raises(ConversionError, match=r"differ from transformers' by \S+, and \S+ is allowed"):
        prove(off, checkpoint, manifest)
    eager(-1e-5)
    report = prove(off, checkpoint, manifest)
    assert report["eager_to_sdpa_difference"] == pytest.approx(4e-5 * expected.largest, rel=0.1)
    eager(5.0)  # no implementation is that inexact
    with pytest.raises(ConversionError, match="the logits differ"):
        prove(shifted(expected, 2e-4), checkpoint, manifest)


def test_what_is_no_number_is_not_equal(compared: tuple[Expected, Path, Manifest]) -> None:
    expected, checkpoint, manifest = compared
    with pytest.raises(ConversionError, match="differ from transformers' by inf"):
        prove(shifted(expected, float("nan")), checkpoint, manifest)
