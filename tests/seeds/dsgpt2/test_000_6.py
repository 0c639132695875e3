"""dsGPT2's chatbot over HTTP: `serve --port …` and `GET /generate?sentence=…`, on the CPU."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request

from tests.helpers.web.serving import chat_server
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS

SENTENCE = "안녕하세요, nasılsın?"


def test_000_6_a_sentence_is_answered_as_dsgpt2_does() -> None:
    address = f"{chat_server().address}/generate?sentence={urllib.parse.quote(SENTENCE)}"
    with urllib.request.urlopen(address, timeout=120) as response:
        body, headers = response.read(), response.headers
        assert response.status == 200
    answer = json.loads(body)
    assert set(answer) == {"input", "response"} and answer["input"] == SENTENCE and answer["response"]
    assert SENTENCE.encode() in body  # UTF-8 as it is, no escapes
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache,no-store,must-revalidate"
    assert not [token for token in (*DSGPT2_TOKENS, "<|endoftext|>") if token in answer["response"]]
