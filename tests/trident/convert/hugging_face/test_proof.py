"""What a proof compares: tokens, lengths, and how far apart logits may be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.errors import ConversionError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.convert.hugging_face import proof, reference
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.proof import Expected, ProofSide, expected_logits, proof_text, prove
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
    expected = expected_logits(ProofSide(family, source, family.read_config(config), tokenizer, ()))
    return expected, checkpoint, read_manifest(checkpoint)


def shifted(expected: Expected, share: float) -> Expected:
    """The same with one logit off by a share of the largest."""
    values = [logits.clone() for logits in expected.logits.values]
    values[0][0, -1, 0] += share * expected.largest
    return dataclasses.replace(expected, logits=dataclasses.replace(expected.logits, values=tuple(values)))


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


def test_another_gradient_is_refused_by_its_token(compared: tuple[Expected, Path, Manifest]) -> None:
    expected, checkpoint, manifest = compared
    gradient = expected.logits.gradient
    assert gradient is not None
    for value in (0.0, float("nan")):
        other = gradient.clone()
        row = int(gradient.abs().amax(1).argmax())
        other[row] *= value
        token = int(expected.logits.learned.tokens.unique()[row])
        with pytest.raises(ConversionError, match=f"gradient of the embedding of token {token} differs from transfor"):
            prove(
                dataclasses.replace(expected, logits=dataclasses.replace(expected.logits, gradient=other)),
                checkpoint,
                manifest,
            )


def test_a_padding_token_is_compared_unless_it_is_declared(
    compared: tuple[Expected, Path, Manifest], tmp_path: Path
) -> None:
    """`transformers` gives the embedding of a padding token no gradient from the tokens that have it."""
    expected, checkpoint, manifest = compared
    folder = shutil.copytree(expected.side.folder, tmp_path / "padded")
    config = read_json_file(folder / "config.json", "")
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 5}))
    declared, undeclared = (
        expected_logits(dataclasses.replace(expected.side, folder=folder, paddings=paddings)) for paddings in ((5,), ())
    )
    assert 5 not in declared.logits.learned.tokens
    assert prove(declared, checkpoint, manifest)["gradient"]["left_out"] == 5
    with pytest.raises(ConversionError, match="the gradient of the embedding of token 5 differs"):
        prove(undeclared, checkpoint, manifest)


def test_a_gradient_that_does_not_fit_into_memory_is_left_out(
    compared: tuple[Expected, Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, checkpoint, manifest = compared
    monkeypatch.setattr(reference, "available_memory_bytes", lambda: 4 * 280 * 48 * 4 - 1)
    report = prove(expected_logits(expected.side), checkpoint, manifest)
    assert report["gradient"] == "not compared: the gradient of the embedding does not fit into memory"
