"""The built-in chat templates, as Jinja.

Source: ChatML is OpenAI's (`<|im_start|>role`, `<|im_end|>`), as in Qwen's tokenizers; llama is Llama 3's header format
(meta-llama/llama-models `models/llama3/chat_format.py`); dsgpt2 is jisngprk/dsGPT2 `dataset/conv_dataset.py`, with
nothing between the tokens and the texts.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

PLAIN = "plain"

_PLAIN = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
"""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_DSGPT2 = """\
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<usr><s>' + message['content'] + '</s>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<sys><s>' + message['content'] + '</s>' }}
    {%- else %}
        {{- raise_exception('dsgpt2 has no ' + message['role'] + ' messages, only user and assistant messages') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<sys><s>' }}
{%- endif %}
"""

SOURCES: Mapping[str, str] = types.MappingProxyType(
    {PLAIN: _PLAIN, "chatml": _CHATML, "llama": _LLAMA, "dsgpt2": _DSGPT2}
)

# Special tokens that the vocabulary must have: as ordinary text, any message could contain them.
NEEDED_TOKENS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        PLAIN: (),
        "chatml": ("<|im_start|>", "<|im_end|>"),
        "llama": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "dsgpt2": ("<usr>", "<sys>", "<s>", "</s>"),
    }
)
