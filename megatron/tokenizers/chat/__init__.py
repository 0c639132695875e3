"""Conversations as text and token ids: templates by name, of a tokenizer, or of a file.

`load_chat_template` gives a `ChatTemplate`, which is all that the rest of the project uses. A template is a Jinja
program that came with somebody's model, so it runs in a sandbox with a budget (`sandbox.py`); what messages say never
becomes a special token (`special_tokens.py`).
"""

from megatron.tokenizers.chat.template import ASSISTANT, ROLES, SYSTEM, USER, ChatTemplate, Message
from megatron.tokenizers.chat.template_choice import load_chat_template, tokenizer_folder

__all__ = ["ASSISTANT", "ROLES", "SYSTEM", "USER", "ChatTemplate", "Message", "load_chat_template", "tokenizer_folder"]
