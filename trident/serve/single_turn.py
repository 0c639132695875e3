"""dsGPT2's `GET /generate?sentence=TEXT`: one sentence in, one answer out.

Source: jisngprk/dsGPT2 `api.py` (the JSON and the headers) and `utils/generator.py` (the defaults of generation).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.errors import printable
from megatron.inference.sampling import Sampling
from trident.serve.requests.asks import Ask
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import invalid
from trident.serve.requests.served import Served

HEADERS = {"Cache-Control": "no-cache,no-store,must-revalidate"}

# The special tokens of dsGPT2's vocabularies, and the one that ends GPT-2's documents.
_SPECIAL = re.compile(r"<(?:s|/s|pad|unk|mask|sys|usr|unused\d{1,3}|\|endoftext\|)>")


@dataclass(frozen=True)
class SingleTurn:
    """How the server answers a sentence.

    Args:
        new_tokens: of an answer, at most.
        has_seed: whether the seed of `sampling` is used for every sentence; otherwise each has a fresh one.
    """

    sampling: Sampling
    new_tokens: int
    has_seed: bool = False

    def ask(self, query: Mapping[str, str], served: Served, limits: ServerLimits) -> Ask:
        """A question to a chat model; a text to be continued by any other.

        Raises:
            Refusal: there is no sentence, or it is too long.
        """
        sentence = query.get("sentence")
        if sentence is None or not sentence.strip():
            raise invalid("There is no sentence. Ask for /generate?sentence=TEXT.", "sentence")
        unknown = [name for name in query if name != "sentence"]
        if unknown:
            raise invalid(f"{printable(unknown[0], 60)} is not a parameter of /generate, only sentence is.", "sentence")
        if served.is_chat:
            prompt = served.prompt_of_messages([{"role": "user", "content": sentence}])
            stop_texts = served.template.stop_texts
        else:
            prompt, stop_texts = served.prompt_of_text(sentence), ()
        room = served.new_tokens(len(prompt), None, limits.new_tokens)
        sampling = self.sampling if self.has_seed else replace(self.sampling, seed=secrets.randbits(62))
        return Ask(
            prompts=(prompt,),
            echoes=("",),
            choices=1,
            new_tokens=(min(room, self.new_tokens),),
            sampling=sampling,
            stop_texts=tuple(stop_texts),
            stop_ids=served.chat_stop_ids if served.is_chat else served.stop_ids,
        )


def response_of(sentence: str, text: str) -> dict[str, str]:
    """The object that dsGPT2 answers with; the special tokens are stripped from the text."""
    return {"input": sentence, "response": _SPECIAL.sub("", text).strip()}
