"""Small tokenizers whose vocabularies have the special tokens of chat templates."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import decoders

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from tests.tokenizers.references import reference_of

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
DSGPT2_TOKENS = ("<s>", "<pad>", "</s>", "<sys>", "<usr>")


def gpt2_with(folder: Path, tokens: Sequence[str]) -> Tokenizer:
    """A GPT2BPETokenizer with more tokens, as `tools/train_tokenizer.py --special-tokens` makes them."""
    choice = write_vocabulary(folder)
    path = Path(str(choice.vocab_file))
    vocabulary = json.loads(path.read_text())
    vocabulary |= {token: len(vocabulary) + place for place, token in enumerate(tokens)}
    path.write_text(json.dumps(vocabulary))
    return build_tokenizer(choice)


def hugging_face_with(folder: Path, tokens: Sequence[str], eos_token: str, template: str | None = None) -> Tokenizer:
    """A tokenizer.json in which the tokens are special, with a tokenizer_config.json."""
    reference = reference_of(write_vocabulary(folder))
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens(list(tokens))
    reference.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config if template is None else config | {"chat_template": template})
    )
    return build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(folder)))


def written(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each id is by itself."""
    return [tokenizer.decode([number]) for number in ids]
