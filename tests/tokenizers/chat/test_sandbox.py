"""Templates that try to read, to hang or to fill the memory, and those that only look like it."""

import multiprocessing
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.chat import rendering, sandbox
from megatron.tokenizers.chat.named import SOURCES
from megatron.tokenizers.chat.sandbox import BoundedTemplate, RenderJob, RenderPart
from tests.tokenizers.chat.hostile_templates import REPORTED

MESSAGES = [{"role": "user", "content": "hello world"}]

REPEATED = "{%% set n = namespace(s='a') %%}{%% for i in range(60) %%}{%% set n.s = %s %%}{%% endfor %%}{{ n.s }}"

TOO_MUCH = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long range": "{{ range(10 ** 9)|length }}",
    "a product": "{{ 'a' * 10 ** 9 }}",
    "doubling by +": REPEATED % "n.s + n.s",
    "a power": "{{ 9 ** 99999 }}",
    "replace": "{% set s = 'a' * 2000 %}{{ s.replace('a', s).replace('a', s) }}",
    "macros that call each other": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
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
    "a filter that reads attributes": "{{ 1|attr('real') }}",
    "an unclosed block": "{% for one in messages %}",
}


# They look as if they took much, or had no business in a template, and do no harm within the limits of a process.
HARMLESS = {
    "{{ ('a' * 1000000)|list|length }}": "1000000",
    "{% set s = 'a ' * 500000 %}{{ s.split()|length }}": "500000",
    "{{ (['a' * 100000] * 99)|map('upper')|list|length }}": "99",
    "{{ (1).to_bytes(2, 'big') }}": "b'\\x00\\x01'",
    "{{ '{}-{}'.format(1, 2) }}": "1-2",
    "{% set a = namespace(x=1) %}{% set a.x = a %}{{ a|length if a.y else 'x' }}": "x",
    "{% for one in [[1, [2]]] recursive %}{{ loop(one) if one is iterable else one }}{% endfor %}": "12",
}
SLOW = "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
SLOW += "{% endfor %}{% endif %}{{ messages[0].content }}"
ENDLESS = {"messages": [{"role": "user", "content": "slow"}]}


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second in place of a second, which a template that never ends uses up."""
    monkeypatch.setattr(sandbox, "_SECONDS", 0.1)


def used_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refusal(source: str) -> str:
    """How a template is refused; empty if it is not."""
    try:
        BoundedTemplate(source, "the template").render({"messages": MESSAGES})
    except (ConfigError, DataError) as failure:
        return str(failure)
    return ""


@pytest.mark.usefixtures("short_time")
def test_too_much_work_is_refused_and_takes_no_memory() -> None:
    before = used_bytes()
    sources = {**TOO_MUCH, **REPORTED}
    with ThreadPoolExecutor(4) as threads:
        refusals = dict(zip(sources, threads.map(refusal, sources.values()), strict=True))
    named = re.compile(r"^the template.*(a built-in one|--chat-template)\.$", re.DOTALL)
    assert not {name: says for name, says in refusals.items() if not named.match(says)}
    assert used_bytes() - before < 64 << 20


def test_what_only_looks_like_much_is_rendered() -> None:
    for source, text in HARMLESS.items():
        assert BoundedTemplate(source, "the template").render({"messages": MESSAGES}) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (SLOW, r"^the template: it takes more than 0\.105 seconds\. Use a simpler chat template, or a built-in"),
        ("{{ [1] * 10 ** 9 }}", r"^the template: it needs more than 256 MB of memory\. Use"),
        ("{{ 'a' * 999999 }}", r"^the template: it renders more than 26\d,\d{3} bytes\. Use"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "^the template: it is nested too deeply"),
    ],
)
@pytest.mark.usefixtures("short_time")
def test_the_limit_is_named_and_the_next_conversation_is_written(source: str, says: str) -> None:
    template = BoundedTemplate("{% if messages[0].content == 'slow' %}" + source + "{% endif %}good", "the template")
    for _ in range(2):
        with pytest.raises(ConfigError, match=says):
            template.render(ENDLESS)
        assert template.render({"messages": MESSAGES}) == "good"


def test_one_that_exceeds_a_limit_leaves_the_others_of_a_batch_alone(short_time: None) -> None:
    template = BoundedTemplate(SLOW, "the template")
    texts = ["a", "slow", "b", "slow", "c"]
    jobs = [
        RenderJob({"messages": [{"content": text}]}, datetime(2024, 7, 26), [RenderPart(), RenderPart(0)])
        for text in texts
    ]
    outcomes = template.outcomes(jobs)
    assert [one[0] for one in outcomes[::2]] == ["a", "b", "c"]
    assert all("more than 0.11 seconds" in str(one[0]) for one in outcomes[1::2])
    assert all("UndefinedError" in str(one[1]) for one in outcomes[::2])  # a part that fails is alone, too


def test_a_child_that_is_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 600.0)
    template = BoundedTemplate(SLOW, "the template")
    with ThreadPoolExecutor(1) as thread:
        rendering_now = thread.submit(template.render, ENDLESS)
        while not rendering_now.done():
            time.sleep(0.05)
            if template._slot.child is not None:
                os.kill(template._slot.child._process.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="the template: its rendering process exited with -9"):
        rendering_now.result()
    assert template.render({"messages": MESSAGES}) == "hello world"
    os.kill(template._slot.child._process.pid, signal.SIGKILL)  # while it waits
    template._slot.child._process.wait()
    assert template.render({"messages": MESSAGES}) == "hello world"


def test_a_child_that_says_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, says in (
        ("b'\\xff' * 8", "its rendering process sends an invalid reply"),
        ("(1 << 40).to_bytes(8, 'big')", "its rendering process sends an invalid reply"),
        ("(2).to_bytes(8, 'big') + b'[]'", "cannot be used"),
        ("(2).to_bytes(8, 'big') + b'{]'", "its rendering process sends an invalid reply"),
        ("b''", "exited with 0"),
    ):
        monkeypatch.setattr(sandbox, "_START", f"import os; os.read(0, 1 << 20); os.write(1, {said})")
        with pytest.raises(ConfigError, match=f"the template.*({says})"):
            BoundedTemplate("x", "the template")
    monkeypatch.setattr(sandbox, "_START", "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox, "_MORE_SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"the template: .* does not reply within 0\.55 seconds"):
        BoundedTemplate("x", "the template")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match=r"cannot be started \(No such file or directory\).*built-in"):
        BoundedTemplate("x", "the template")
    assert BoundedTemplate(SOURCES["plain"], "plain").render({"messages": MESSAGES}) == "hello world\n"


def test_a_forked_process_and_threads_have_what_they_need() -> None:
    template = BoundedTemplate("{{ messages[0].content }}", "the template")
    assert template.render({"messages": MESSAGES}) == "hello world"
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def forked() -> None:
        theirs.send((template.render({"messages": MESSAGES}), template._slot.child._process.pid))

    with template._slot.lock:  # as if another thread were rendering
        process = multiprocessing.get_context("fork").Process(target=forked)
        process.start()
        text, child = ours.recv()
        process.join()
    assert text == "hello world" and child != template._slot.child._process.pid
    asked = [{"messages": [{"content": f"text {number}"}]} for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(template.render, asked)) == [f"text {number}" for number in range(40)]


PARENT = """
import os, sys, time
from megatron.tokenizers.chat.sandbox import BoundedTemplate
template = BoundedTemplate("x", "the template")
if os.fork() == 0:  # it holds the other end of the connection
    sys.stdin.read()
    os._exit(0)
os.write(1, b"%d\\n" % template._slot.child._process.pid)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_the_child_ends_with_its_parent() -> None:
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([child], [], [], 60)[0], "the child outlives its parent"
        os.close(child)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system shows no descriptors")
def test_the_child_has_nothing_but_its_connection_and_its_limits() -> None:
    with Path(__file__).open() as opened:
        os.set_inheritable(opened.fileno(), True)
        template = BoundedTemplate("x", "the template")
        process = Path("/proc", str(template._slot.child._process.pid))
        assert sorted(os.listdir(process / "fd")) == ["0", "1", "2"]
    limits = (process / "limits").read_text()
    for name, soft in (("Max address space", 256 << 20), ("Max open files", 0), ("Max file size", 0)):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert line.removeprefix(name).split()[:2] == [str(soft), str(soft)]
    loaded = (process / "maps").read_text()
    assert "torch" not in loaded and "numpy" not in loaded


EVERY_FILTER = """
{{ -1|abs }} {{ 'a b'|capitalize }} {{ 'ab'|count }} {{ x|d(1) }} {{ x|default(1) }} {{ m|dictsort }} {{ 'ab'|first }}
{{ '1'|float }} {{ 'a\nb'|indent(2) }} {{ '7'|int }} {{ m|items|list }} {{ [1, 2]|join('-') }} {{ 'ab'|last }}
{{ 'ab'|length }} {{ 'ab'|list }} {{ 'AB'|lower }} {{ ['a']|map('upper')|list }} {{ [1, 2]|max }} {{ [1, 2]|min }}
{{ [1, 2]|reject('odd')|list }} {{ [m]|rejectattr('x')|list }} {{ 'ab'|replace('a', 'c') }} {{ 'ab'|reverse }}
{{ 2.55|round(1) }} {{ [1, 2]|select('odd')|list }} {{ [m]|selectattr('content')|list }} {{ [2, 1]|sort }}
{{ 1|string }} {{ 'a b'|title }} {{ ' a '|trim }} {{ ['a', 'A']|unique|list }} {{ 'a'|upper }} {{ m|tojson(indent=1) }}
{{ '<'|safe }} {{ strftime_now('%A %d %B %Y %H:%M') }} {{ m.missing }} {{ dict(a=1) }} {{ namespace(a=1).a }}
"""


@pytest.mark.parametrize("source", [*SOURCES.values(), EVERY_FILTER.replace("m|", "messages[0]|")])
def test_child_and_this_process_write_the_same(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SOURCES", {})  # so that our own have a child, too
    assert all(f"|{name}" in EVERY_FILTER for name in rendering._FILTERS)
    message = {"role": "user", "content": "\ud83d\ude00 \ud83d \U0001f600 \u0000 \xe9"}  # halves of characters too
    variables = {"messages": [message], "m": message, "bos_token": "<b>", "eos_token": "<e>"}
    now = datetime(2024, 7, 26, 12, 30)
    expected = rendering.TemplateProgram(source).write(variables, now, ("", ""))
    assert BoundedTemplate(source, "the template").render(variables, now) == expected


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_what_templates_have_no_need_of_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="the template"):
        BoundedTemplate(source, "the template").render({"messages": MESSAGES})


def test_huge_template_is_refused():
    with pytest.raises(ConfigError, match="the template has 200,000 bytes; a chat template may have 131,072"):
        BoundedTemplate("x" * 200_000, "the template")


def test_errors_name_the_line_and_what_is_wrong():
    with pytest.raises(ConfigError, match="the template is not a chat template, line 2: No filter named 'attr'"):
        BoundedTemplate("a\n{{ 1|attr('x') }}", "the template")
    with pytest.raises(ConfigError, match=r"fails on a conversation: UndefinedError: 'shout' is undefined"):
        BoundedTemplate("{{ shout('a') }}", "the template").render({})


def test_refusal_of_a_conversation_is_an_error_of_the_data():
    with pytest.raises(DataError, match="the template rejects the conversation: 'only one message, please'"):
        BoundedTemplate("{{ raise_exception('only one message, please') }}", "the template").render({})
