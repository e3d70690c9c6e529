"""Chats: what the template writes is what the tokenizer writes, and its own tokens are marked."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import identikit as ik
from identikit.models.model import Model
from identikit.texts.chat import render_chat
from tests.models import tiny

TEMPLATE = (
    "{% for message in messages %}w50 {% if message['role'] == 'user' %}w51{% else %}w52{% endif %} "
    "{{ message['content'] | trim }} w53 {% endfor %}{% if add_generation_prompt %}w50 w52{% endif %}"
)
CHAT = [
    {"role": "user", "content": "w5 w6 "},
    {"role": "assistant", "content": "w50 w7"},
    {"role": "user", "content": "w51 w8 w9"},
]


def chatty(template: str | None = TEMPLATE) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.build("llama", dtype=torch.float64), chatty(), name="tiny chat")


def test_it_is_what_the_tokenizer_writes_with_the_templates_tokens_marked(model: Model):
    (encoded,) = model.encode(CHAT)
    wanted = model.tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert list(encoded.ids) == list(wanted["input_ids"])
    own = [token for token, special in zip(encoded.tokens, encoded.special, strict=True) if not special]
    assert own == ["w5", "w6", "w50", "w7", "w51", "w8", "w9"]  # also where a message says what the template says
    assert [encoded.tokens[first] for first, _ in encoded.words] == own


def test_messages_are_one_text(model: Model):
    found = ik.token_attribution(model, messages=CHAT, target="w12")
    same = ik.token_attribution(model, list(model.encode(CHAT)[0].ids), target="w12")
    assert torch.equal(found.contribution, same.contribution)
    assert found.about["special"].count(False) == 7 and len(found.words().tokens) == len(found.tokens)
    both = ik.token_attribution(model, [CHAT, CHAT[:1]], target="w12")
    assert torch.equal(both[0].contribution, found.contribution) and len(both) == 2
    assert ik.effective_attention(model, CHAT).tokens == found.tokens
    ended = model.encode(CHAT[:2])[0]  # the assistant has spoken: its turn is not opened again
    assert ended.tokens[-1] == "w53"


WORDS = st.lists(st.sampled_from(["w5", "w50", "w51", "w53", "w9"]), min_size=1, max_size=4).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4), st.sampled_from(["", " ", "\n"]))
def test_every_message_is_found_where_it_stands(contents: list[str], around: str):
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": around + content}
        for place, content in enumerate(contents)
    ]
    string, spans = render_chat(chatty(), "the text", messages)
    assert [string[start:stop] for start, stop in spans] == contents


TWICE = "{% for message in messages %}{{ message['content'] }} {{ message['content'] }}{% endfor %}"
LOUD = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
REFUSING = "{{ raise_exception('only one message') }}"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT, "has no chat template"),
        (TWICE, CHAT[:1], "does not write each message once"),
        (LOUD, CHAT[:1], "does not write each message once"),
        (REFUSING, CHAT, "refuses these messages \\(only one message\\)"),
        (TEMPLATE, [{"role": "user"}], "is no message"),
        (TEMPLATE, [{"role": "user", "content": ["w5"]}], "is no message"),
        (TEMPLATE, [{"role": "user", "content": "  "}], "is blank"),
        (TEMPLATE, [{"role": "user", "content": "w5 " * 99}], "the model reads at most 64"),
    ],
)
def test_a_chat_that_cannot_be_read_is_refused(template: str | None, messages: Any, message: str):
    model = Model(tiny.build("gpt2"), chatty(template), name="tiny chat")
    with pytest.raises(ik.InputError, match=message):
        ik.token_attribution(model, messages=messages, target="w5")


def test_a_chat_is_not_cut_and_not_given_twice(model: Model):
    with pytest.raises(ik.InputError, match="a chat cannot be cut"):
        ik.token_attribution(model, messages=CHAT, target="w5", truncate=True, max_tokens=5)
    with pytest.raises(ik.InputError, match="Pass one of them"):
        ik.token_attribution(model, "w5", messages=CHAT)
    with pytest.raises(ik.InputError, match="expected a list of"):
        ik.token_attribution(model, messages="w5")
