"""Templates that got through the limits once."""


def doubled(seed: str, step: str, count: int, sink: str) -> str:
    """A value that each of some steps makes larger, and what is done with the last."""
    steps = "".join(f"{{% set n{number + 1} = {step.format(f'n{number}')} %}}" for number in range(count))
    return f"{{% set n0 = {seed} %}}{steps}" + sink.format(f"n{count}")


REPORTED = {
    "a dictionary in a format": "{{ ('%(a)s' * 4000) % {'a': 'x' * 400000} }}",
    "a padded format": "{{ (('%(a)999s' * 110000) % {'a': '\U0001f600'})|length }}",
    "26 doublings of a namespace": doubled("namespace(a='x')", "namespace(a={0}, b={0})", 26, "{{{{ {0} }}}}"),
    "30 doublings of a view": doubled(
        "{'a': 'x' * 100}.values()", "{{'a': {0}, 'b': {0}}}.values()", 30, "{{{{ ('%s' % ({0},))|length }}}}"
    ),
    "calls of calls": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a search": "{% set s = 'a' * 400000 %}{% for i in range(9999) %}{{ s.find('a' * 20000 ~ 'b') }}{% endfor %}",
}
