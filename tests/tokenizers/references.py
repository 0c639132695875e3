"""Tokenizers built by the `tokenizers` library alone, whose ids the product's tokenizers must give."""

import json
from pathlib import Path

import tokenizers

from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import write_vocabulary


def reference_of(choice: TokenizerChoice) -> tokenizers.Tokenizer:
    """GPT-2's rules, built from the files by the `tokenizers` library alone."""
    assert choice.vocab_file and choice.merge_file
    reference = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(choice.vocab_file, choice.merge_file))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return reference


def write_folder(
    folder: Path, *, begin: bool = False, eos: str | dict[str, str] | None = "<eot>"
) -> tokenizers.Tokenizer:
    """Writes a Hugging Face folder, whose tokenizer.json truncates, and gives its tokenizer without truncation.

    Args:
        begin: every text begins with `<bos>`.
        eos: the `eos_token` of tokenizer_config.json; None leaves that file out.
    """
    choice = write_vocabulary(folder)
    reference = reference_of(choice)
    reference.decoder = tokenizers.decoders.ByteLevel()
    reference.add_special_tokens(["<bos>", "<eot>"])
    if begin:
        single = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", reference.token_to_id("<bos>"))]
        )
        reference.post_processor = single
    reference.enable_truncation(max_length=4)
    reference.save(str(folder / "tokenizer.json"))
    reference.no_truncation()
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return reference
