"""Which tokens are learned: runs of marked tokens against the text that transformers renders."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mint_jax.data import chat
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(base_lib.resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def theirs():
    return AutoTokenizer.from_pretrained(base_lib.resolve("smollm2-135m-instruct"))


def turn(role, content) -> dict:
    return {"role": role, "content": content}


def runs(tokenizer, marked) -> list[tuple[bool, str]]:
    """Consecutive tokens with the same mark, as text."""
    pairs = itertools.groupby(zip(marked.learn, marked.tokens, strict=True), key=lambda pair: pair[0])
    return [(learn, tokenizer.decode([token for _, token in group], skip_special=False)) for learn, group in pairs]


letters = st.characters(
    max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"], exclude_characters="<|>"
)  # the vocabulary lacks other bytes
text = st.text(letters | st.sampled_from("\n\t"), max_size=20)
contents = st.lists(st.tuples(text, text), min_size=1, max_size=3)


def test_exactly_the_assistants_turns_are_learned(tokenizer, theirs):
    @settings(max_examples=100)
    @given(contents, st.none() | text, st.none() | text)
    def check(pairs, system, last):
        messages = [turn("system", system)] if system is not None else []
        messages += [m for user, reply in pairs for m in (turn("user", user), turn("assistant", reply))]
        marked = chat.conversation(tokenizer, messages + ([turn("user", last)] if last is not None else []))
        found = runs(tokenizer, marked)
        rendered = theirs.apply_chat_template(messages, tokenize=False)  # a last turn that nobody answers is left out
        assert "".join(part for _, part in found) == rendered
        assert [part for learn, part in found if learn] == [reply + END for _, reply in pairs]
        assert [part for learn, part in found if not learn][-1] == "\n"
        assert marked.first == marked.learn.index(True)

    check()


def test_marks_fall_between_the_tokens_of_prompt_and_reply(tokenizer):
    """Each piece is encoded apart: a prompt as sampling sees it, then the reply."""
    messages = [turn("user", "Say hi"), turn("assistant", " hi"), turn("user", "Again"), turn("assistant", "hi")]
    marked = chat.conversation(tokenizer, messages)
    prompt = tokenizer.encode_chat(messages[:1])
    reply = tokenizer.encode(" hi" + END, special=False)
    assert marked.tokens[: len(prompt) + len(reply)] == prompt + reply
    assert marked.learn[: len(prompt) + len(reply)] == [False] * len(prompt) + [True] * len(reply)
    assert marked.first == len(prompt)


@pytest.mark.parametrize("messages", [[], [turn("user", "a")], [turn("system", "a"), turn("user", "b")]])
def test_a_conversation_without_a_reply_is_refused(tokenizer, messages):
    with pytest.raises(UserError, match="line 7 has no assistant turn"):
        chat.conversation(tokenizer, messages, "line 7")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }};{% endif %}{% endfor %}",  # drops old replies
        "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path, template):
    (tmp_path / "tokenizer.json").write_bytes((base_lib.resolve("smollm2-135m-instruct") / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [turn(role, f"{role} {i}") for i in range(2) for role in ("user", "assistant")]
    with pytest.raises(UserError, match="line 3: the chat template rewrites earlier turns"):
        chat.conversation(Tokenizer(tmp_path), messages, "line 3")


def test_plain_text_is_learned_after_its_first_token_with_its_end(tokenizer, theirs):
    marked = chat.supervised_row(tokenizer, {"text": "Once upon a time"}, "row")
    assert marked.tokens == [*tokenizer.encode("Once upon a time"), theirs.eos_token_id]
    assert marked.learn == [False] + [True] * (len(marked.tokens) - 1)


@pytest.mark.parametrize("row", [{"text": "Once"}, {"prompt": "2 + 2 =", "completion": " 4"}], ids=["text", "completion"])
def test_the_end_token_comes_once_or_not_at_all(tokenizer, theirs, row):
    *_, last = row
    whole = chat.supervised_row(tokenizer, row | {last: row[last] + " there"}, "row")
    bare = chat.supervised_row(tokenizer, row | {last: row[last] + " there"}, "row", append_eos=False)
    assert whole.tokens == [*bare.tokens, theirs.eos_token_id]
    assert whole.learn == [*bare.learn, True]
    spelt = chat.supervised_row(tokenizer, row | {last: row[last] + " there" + theirs.eos_token}, "row")
    assert spelt == whole
    messages = {"messages": [turn("user", "q"), turn("assistant", "a")]}
    assert chat.supervised_row(tokenizer, messages, "row") == chat.supervised_row(tokenizer, messages, "row", append_eos=False)


def test_a_checkpoint_without_an_end_token_says_so(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((base_lib.resolve("smollm2-135m-instruct") / "tokenizer.json").read_bytes())
    row = {"text": "Once upon a time"}
    with pytest.raises(UserError, match=r"no end token .*data\.append_eos=False"):
        chat.supervised_row(Tokenizer(tmp_path), row, "row")
    assert len(chat.supervised_row(Tokenizer(tmp_path), row, "row", append_eos=False).tokens) > 2


def test_a_prompt_and_its_completion_as_text_and_as_chat(tokenizer):
    plain = chat.supervised_row(tokenizer, {"prompt": "2 + 2 =", "completion": " 4\n"}, "row")
    assert runs(tokenizer, plain) == [(False, "2 + 2 ="), (True, " 4\n" + END)]
    messages = [turn("user", "2 + 2?"), turn("assistant", "4")]
    whole = chat.supervised_row(tokenizer, {"messages": messages}, "row")
    for reply in ("4", messages[1], [messages[1]]):
        assert chat.supervised_row(tokenizer, {"prompt": messages[:1], "completion": reply}, "row") == whole


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [turn("user", "q")], "chosen": "good", "rejected": "bad one"},
        {"prompt": [turn("user", "q")], "chosen": [turn("assistant", "good")], "rejected": [turn("assistant", "bad one")]},
        {
            "chosen": [turn("user", "q"), turn("assistant", "good")],
            "rejected": [turn("user", "q"), turn("assistant", "bad one")],
        },
    ],
)
def test_preferences_share_their_prompt(tokenizer, row):
    chosen, rejected = chat.preference_row(tokenizer, row, "row")
    prompt = tokenizer.encode_chat([turn("user", "q")])
    for marked, reply in ((chosen, "good"), (rejected, "bad one")):
        assert marked.tokens[: marked.first] == prompt
        assert [part for learn, part in runs(tokenizer, marked) if learn] == [reply + END]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [turn("user", "q"), turn("assistant", "a")], "rejected": [turn("user", "r"), turn("assistant", "a")]}, "same prompt"),
        ({"prompt": "q", "chosen": "a"}, "columns prompt, chosen; expected prompt, chosen and rejected"),
        ({"rejected": "a"}, "expected prompt, chosen and rejected"),
        ({"prompt": 5, "chosen": "a", "rejected": "b"}, "prompt is '5'; expected a list of messages"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b", "c"]}, "rejected is .*; expected a string"),
        ({"chosen": "a", "rejected": "b"}, "chosen is 'a'; expected a list of messages"),
        ({"prompt": "q", "chosen": "", "rejected": "a"}, "nothing|no .*learn|empty"),
    ],
)
def test_bad_preferences_are_refused(tokenizer, row, message):
    with pytest.raises(UserError, match=f"row 5.*{message}"):
        chat.preference_row(tokenizer, row, "row 5")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, "columns question, answer; expected messages"),
        ({"prompt": "q"}, "columns prompt; expected messages"),
        ({"text": "a"}, "a text of 1 tokens; at least 2"),
        ({"text": ""}, "a text of 0 tokens; at least 2"),
        ({"messages": [turn("user", "q")]}, "no assistant turn"),
        ({"prompt": "q", "completion": ""}, "nothing|no .*learn|empty"),
        ({"messages": [turn("user", "q"), {"role": "assistant"}]}, "template refuses"),
        ({"messages": "hi"}, "row 5: messages is 'hi'; expected a list of messages"),
        ({"messages": ["hi"]}, "row 5: messages is .*; expected a list of messages"),
        ({"messages": []}, "row 5: messages is .*; expected a list of messages"),
        ({"prompt": "q", "completion": 5}, "row 5: completion is '5'; expected a string"),
        ({"prompt": None, "completion": "a"}, "row 5: prompt is 'None'; expected a list of messages"),
        ({"text": ["a"]}, "row 5: text is .*; expected a string"),
    ],
)
def test_rows_with_nothing_to_learn_are_refused(tokenizer, row, message):
    with pytest.raises(UserError, match=message):
        chat.supervised_row(tokenizer, row, "row 5")
