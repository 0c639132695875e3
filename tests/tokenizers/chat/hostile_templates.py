"""Templates that grow or compute without end: those that got through once, and any number of generated ones."""

from __future__ import annotations

import random

_NESTED = "{{% set n0 = {0} %}}{1}"
_SEEDS = (
    "'x' * 100",
    "[1]",
    "{'a': 'x'}",
    "namespace(a='x' * 100)",
    "{'a': 'x' * 100}.values()",
    "(1, 'x')",
    "2 ** 60",
)
_STEPS = (
    "namespace(a={0}, b={0})", "{{'a': {0}, 'b': {0}}}", "{{'a': {0}, 'b': {0}}}.values()", "[{0}, {0}]",
    "({0}, {0})", "dict(a={0}, b={0}).items()", "'%s%s' % ({0}, {0})", "'%(a)s%(a)s' % {{'a': {0}}}",
    "({0} ~ {0})", "([{0}] * 9)", "'{{0}}{{0}}'.format({0})", "({0}|string).replace('', 'ab')",
    "[{0}, {0}, {0}]|join({0}|string)", "({0}|string).center(9999)", "({0}|string|list)", "{0}|tojson|tojson",
)  # fmt: skip
_SINKS = (
    "{{{{ {0} }}}}", "{{{{ ({0} ~ '')|length }}}}", "{{{{ ('%s' % ({0},))|length }}}}", "{{{{ [{0}]|join }}}}",
    "{{{{ {0} == {0} }}}}", "{{% for i in range(99999) %}}{{{{ {0}|string|length }}}}{{% endfor %}}",
    "{{{{ ({0}|string) * 99999 }}}}", "{{{{ [{0}]|tojson(indent=999) }}}}",
)  # fmt: skip


def doubled(seed: str, step: str, count: int, sink: str) -> str:
    """A value that each of some steps makes larger, and what is done with the last."""
    steps = "".join(f"{{% set n{place + 1} = {step.format(f'n{place}')} %}}" for place in range(count))
    return _NESTED.format(seed, steps) + sink.format(f"n{count}")


REPORTED = {
    "a dictionary in a format": "{{ ('%(a)s' * 4000) % {'a': 'x' * 400000} }}",
    "the length of a format": "{{ (('%(a)s' * 50000) % {'a': 'x' * 400000})|length }}",
    "a padded format": "{{ (('%(a)999s' * 110000) % {'a': '\U0001f600'})|length }}",
    "26 doublings of a namespace": doubled("namespace(a='x')", _STEPS[0], 26, _SINKS[0]),
    "30 doublings of a view": doubled("{'a': 'x' * 100}.values()", _STEPS[2], 30, _SINKS[2]),
    "calls of calls": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a search": "{% set s = 'a' * 400000 %}{% for i in range(9999) %}{{ s.find('a' * 20000 ~ 'b') }}{% endfor %}",
}


def generated(seed: int) -> str:
    """A hostile template, always the same for a number."""
    drawn = random.Random(seed)
    source = _NESTED.format(drawn.choice(_SEEDS), "")
    count = drawn.randrange(3, 40)
    source += "".join(
        f"{{% set n{place + 1} = {drawn.choice(_STEPS).format(f'n{place}')} %}}" for place in range(count)
    )
    return source + drawn.choice(_SINKS).format(f"n{count}")
