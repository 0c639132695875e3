"""Every form of a record gives the same messages, and what is no example is refused with what must hold."""

import pytest

from megatron.data.datasets.examples.records import example_of, with_copied_prompts

PAIR = [("user", "q"), ("assistant", "a")]

FORMS = {
    "prompt and answer": {"prompt": "q", "answer": "a", "id": 7},
    "prompt and completion": {"prompt": "q", "completion": "a"},
    "prompt and response": {"prompt": "q", "response": "a"},
    "question and answer": {"question": "q", "answer": "a"},
    "dsGPT2's": {"q": "q", "a": "a"},
    "instruction": {"instruction": "q", "input": "", "output": "a"},
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "OpenAI's parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a", "weight": 1},
        ]
    },
    "ShareGPT's": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "lists of messages": {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
    },
}


def shown(record):
    return [(message["role"], message["content"]) for message in example_of(record).messages]


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS.keys())
def test_forms_of_a_pair(record):
    assert shown(record) == PAIR


def test_system_messages_and_inputs():
    assert shown({"system": "s", "prompt": "q", "answer": "a"}) == [("system", "s"), *PAIR]
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert shown({"conversations": turns}) == [("system", "s"), *PAIR]
    assert shown({"system": "s", "conversations": turns[1:]}) == [("system", "s"), *PAIR]
    assert (
        shown({"messages": [{"role": "developer", "content": "s"}, *FORMS["messages"]["messages"]]})[0][0] == "system"
    )
    assert shown({"instruction": "q", "input": "more", "output": "a"})[0] == ("user", "q\n\nmore")


def test_messages_after_the_last_answer_are_cut_and_counted():
    messages = [*FORMS["messages"]["messages"], {"role": "user", "content": "and?"}]
    example = example_of({"messages": messages})
    assert len(example.messages) == 2
    assert example.cut_messages == 1


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (7, "it is 7, not an object. It must be a prompt"),
        ({"text": "t"}, r"it has the keys \['text'\]. It must have a prompt \(prompt, question"),
        ({"prompt": "q"}, r"it has the keys \['prompt'\]"),
        ({"prompt": "q", "answer": ""}, "its answer is empty"),
        ({"prompt": "q", "answer": " \n"}, "its answer is empty"),
        ({"prompt": "q", "answer": None}, "answer holds None. It must be a string"),
        ({"prompt": 1, "answer": "a"}, "prompt holds 1. It must be a string"),
        ({"prompt": "q", "answer": "\ud800"}, r"answer holds U\+D800, half of a surrogate pair"),
        ({"prompt": "q", "answer": "a", "response": "b"}, "it has both answer and response"),
        ({"messages": [], "conversations": []}, "it has both messages and conversations"),
        ({"messages": []}, r"messages holds \[\]. It must be a list of messages"),
        ({"messages": ["x"]}, r"messages\[0\] is 'x'. A message must be an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has the keys \['role'\]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role is 'tool'. It must be one of system"),
        ({"messages": [{"role": 1, "content": "x"}]}, r"messages\[0\].role is 1"),
        ({"messages": [{"role": "user", "content": "x"}]}, "it has no assistant message"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\].content holds None"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, r"messages\[0\].weight is 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"content holds \[\{'type': 'image_url'",
        ),
    ],
)
def test_what_is_no_example_is_refused(record, what):
    with pytest.raises(ValueError, match=what):
        example_of(record)


def test_each_answer_is_replaced_by_the_prompt_before_it() -> None:
    turns = [("system", "s"), ("assistant", "hello"), ("user", "p"), ("assistant", "a"), ("user", "r"), ("user", "q")]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "b")]]
    contents = [message["content"] for message in with_copied_prompts(messages)]
    assert contents == ["s", "hello", "p", "p", "r", "q", "q"]
