"""Templates that try to read, to hang or to fill the memory, and those that only look like it."""

from __future__ import annotations

import resource

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.chat.sandbox import BoundedTemplate

MESSAGES = [{"role": "user", "content": "hello world"}]

REPEATED = "{%% set n = namespace(s='a') %%}{%% for i in range(60) %%}{%% set n.s = %s %%}{%% endfor %%}{{ n.s }}"

TOO_MUCH = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}",
    "a long range": "{{ range(10 ** 9)|length }}",
    "a product": "{{ 'a' * 10 ** 9 }}",
    "a product of a list": "{{ ([1] * 10 ** 9)|length }}",
    "doubling by +": REPEATED % "n.s + n.s",
    "doubling by ~": REPEATED % "n.s ~ n.s",
    "doubling lists": REPEATED % "[n.s, n.s]",
    "doubling dictionaries": REPEATED % "{'a': n.s, 'b': n.s}",
    "doubling dict()": REPEATED % "dict(a=n.s, b=n.s)",
    "growing tuples": "{% set n = namespace(s=(1,)) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a power": "{{ 9 ** 99999 }}",
    "squares": "{% set n = namespace(s=10 ** 40) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (1000000000, 1) }}",
    "format()": "{{ '{:>1000000000}'.format(1) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "indent": "{{ 'a\\nb'|indent(1000000000) }}",
    "indent of many lines": "{{ ('a\\n' * 50000)|indent(999) }}",
    "replace": "{% set s = 'a' * 2000 %}{{ s.replace('a', s).replace('a', s) }}",
    "the filter replace": "{% set s = 'a' * 2000 %}{{ s|replace('a', s)|replace('a', s) }}",
    "join": "{% set s = 'a' * 100000 %}{{ s.join(range(99999)) }}",
    "the filter join": "{% set s = 'a' * 100000 %}{{ range(99999)|join(s) }}",
    "map": "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = n.l + ['a' * 100000] %}{% endfor %}"
    "{{ (n.l|map('upper')|list)|length }}",
    "indented JSON": "{{ messages|tojson(indent=1000000000) }}",
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for one in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a date of great width": "{{ strftime_now('%1000000000Y') }}",
    "splitting": "{% set s = 'a ' * 500000 %}{{ s.split()|length }}{{ s.split()|length }}",
    "letters of a text": "{% set s = 'a' * 1000000 %}{{ s|list|length }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if true %}" * 500 + "{% endif %}" * 500,
}  # fmt: skip

FORBIDDEN = {
    "Python's classes": "{{ ''.__class__.__mro__ }}x{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a message's class": "{{ messages.__class__.__base__.__subclasses__() }}",
    "a macro's globals": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}{{ f.__globals__['x'] }}",
    "a namespace's init": "{{ namespace.__init__.__globals__.x }}",
    "changing messages": "{% set _ = messages.append(1) %}",
    "changing a message": "{% set _ = messages[0].update({'a': 1}) %}",
    "another file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}",
    "a base": "{% extends '/etc/passwd' %}",
    "lipsum": "{{ lipsum() }}",
    "cycler": "{{ cycler(1) }}",
    "an unknown filter": "{{ 1|attr('real') }}",
    "a number's method": "{{ (1).to_bytes(1000) }}",
    "an unclosed block": "{% for one in messages %}",
    "an undefined function": "{{ shout('a') }}",
}


def used_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_too_much_work_is_refused_and_takes_no_memory(source):
    before = used_bytes()
    with pytest.raises(ConfigError, match="the template"):
        BoundedTemplate(source, "the template").render({"messages": MESSAGES})
    assert used_bytes() - before < 300e6


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_what_templates_have_no_need_of_is_refused(source):
    with pytest.raises(ConfigError, match="the template"):
        BoundedTemplate(source, "the template").render({"messages": MESSAGES})


def test_huge_template_is_refused():
    with pytest.raises(ConfigError, match="the template holds 200,000 bytes; a chat template may hold 131,072"):
        BoundedTemplate("x" * 200_000, "the template")


def test_errors_name_the_line_and_what_is_wrong():
    with pytest.raises(ConfigError, match="the template is not a chat template, line 2: No filter named 'attr'"):
        BoundedTemplate("a\n{{ 1|attr('x') }}", "the template")
    with pytest.raises(ConfigError, match=r"fails on a conversation: UndefinedError: 'shout' is undefined"):
        BoundedTemplate("{{ shout('a') }}", "the template").render({})


def test_refusal_of_a_conversation_is_an_error_of_the_data():
    with pytest.raises(DataError, match="the template refuses the conversation: 'only one message, please'"):
        BoundedTemplate("{{ raise_exception('only one message, please') }}", "the template").render({})


def test_long_conversations_are_not_too_much():
    messages = [{"role": "user", "content": "word " * 20_000}] * 50
    source = "{% for m in messages %}{{ '<' + m.role + '>' ~ (m.content|trim).replace('x', 'y') ~ '\\n' }}{% endfor %}"
    assert len(BoundedTemplate(source, "the template").render({"messages": messages})) == 50 * 100_006


def test_budget_is_new_for_each_conversation():
    template = BoundedTemplate("{% for i in range(9999) %}{% endfor %}{{ messages|length }}", "the template")
    assert {template.render({"messages": MESSAGES}) for _ in range(6)} == {"1"}


def test_generation_blocks_are_marked():
    source = "Q{% generation %}{{ messages[0].content }}{% endgeneration %}Z"
    template = BoundedTemplate(source, "the template")
    assert template.has_generation_blocks
    assert template.render({"messages": MESSAGES}) == "Qhello worldZ"
    assert template.render({"messages": MESSAGES}, generation_marks=("[", "]")) == "Q[hello world]Z"
    assert not BoundedTemplate("x", "the template").has_generation_blocks
