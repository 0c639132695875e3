"""Conversations as text and token ids: built-in chat templates, or templates of a tokenizer or a file.

`load_chat_template` returns a `ChatTemplate`, the interface of this package. A template is an untrusted Jinja program
that comes with a model, so it runs in a sandbox with limits (`sandbox.py`); the content of messages never becomes a
special token (`special_tokens.py`).
"""

from megatron.tokenizers.chat.template import ASSISTANT, ROLES, SYSTEM, USER, ChatTemplate, Message
from megatron.tokenizers.chat.template_choice import load_chat_template, tokenizer_folder

__all__ = ["ASSISTANT", "ROLES", "SYSTEM", "USER", "ChatTemplate", "Message", "load_chat_template", "tokenizer_folder"]
