"""A byte-level tokenizer that puts `<s>` before texts, `</s>` after them, both or neither."""

import json
from pathlib import Path

from tokenizers import AddedToken, ByteLevelBPETokenizer
from tokenizers import Tokenizer as Reference
from tokenizers.processors import TemplateProcessing

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import write_vocabulary

FRAMES = ("$A", "<s> $A", "$A </s>", "<s> $A </s>")


def framed_tokenizer(folder: Path, frame: str = "<s> $A </s>") -> Tokenizer:
    """Writes a tokenizer with this template around texts to the folder `tokenizer`, and loads it."""
    return build_tokenizer(framed_choice(folder, frame))


def framed_choice(folder: Path, frame: str) -> TokenizerChoice:
    """The same as the flags that name it."""
    choice = write_vocabulary(folder)
    reference = Reference.from_str(
        ByteLevelBPETokenizer(str(choice.vocab_file), str(choice.merge_file))._tokenizer.to_str()
    )
    reference.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    special = [(text, int(reference.token_to_id(text))) for text in ("<s>", "</s>")]
    if frame != "$A":
        reference.post_processor = TemplateProcessing(single=frame, special_tokens=special)
    home = folder / "tokenizer"
    home.mkdir(exist_ok=True)
    reference.save(str(home / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (home / "tokenizer_config.json").write_text(json.dumps(named))
    return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(home))
