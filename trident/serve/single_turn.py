"""dsGPT2's `GET /generate?sentence=TEXT`: answers one sentence.

Source: jisngprk/dsGPT2 `api.py` (the JSON and the headers) and `utils/generator.py` (the defaults of generation).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.errors import printable
from megatron.inference.sampling import Sampling
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import GenerationRequest
from trident.serve.requests.refusals import invalid
from trident.serve.requests.served_model import ServedModel

HEADERS = {"Cache-Control": "no-cache,no-store,must-revalidate"}

# The special tokens of dsGPT2's vocabularies, and the one that ends GPT-2's documents.
_SPECIAL = re.compile(r"<(?:s|/s|pad|unk|mask|sys|usr|unused\d{1,3}|\|endoftext\|)>")


@dataclass(frozen=True)
class SingleTurn:
    """The generation settings of `/generate`.

    Args:
        new_tokens: most tokens of an answer.
        has_seed: use the seed of `sampling` for every sentence, instead of a fresh one.
    """

    sampling: Sampling
    new_tokens: int
    has_seed: bool = False

    def read(self, query: Mapping[str, str], served: ServedModel, limits: ServerLimits) -> GenerationRequest:
        """Reads a query: a question to a chat model, or a text that any other model continues.

        Raises:
            Refusal: no sentence, one that is too long, or an unknown parameter.
        """
        sentence = query.get("sentence")
        if sentence is None or not sentence.strip():
            raise invalid("The sentence is missing. Use /generate?sentence=TEXT.", "sentence")
        unknown = [name for name in query if name != "sentence"]
        if unknown:
            raise invalid(f"Unknown parameter {printable(unknown[0], 60)}: /generate has only sentence.", "sentence")
        if served.is_chat:
            prompt = served.prompt_of_messages([{"role": "user", "content": sentence}])
            stop_texts = served.template.stop_texts
        else:
            prompt, stop_texts = served.prompt_of_text(sentence), ()
        room = served.new_tokens(len(prompt), None, limits.new_tokens)
        sampling = self.sampling if self.has_seed else replace(self.sampling, seed=secrets.randbits(62))
        return GenerationRequest(
            prompts=(prompt,),
            echoes=("",),
            choices=1,
            new_tokens=(min(room, self.new_tokens),),
            sampling=sampling,
            stop_texts=tuple(stop_texts),
            stop_ids=served.chat_stop_ids if served.is_chat else served.stop_ids,
        )


def response_of(sentence: str, text: str) -> dict[str, str]:
    """dsGPT2's response object; special tokens are stripped from the text."""
    return {"input": sentence, "response": _SPECIAL.sub("", text).strip()}
