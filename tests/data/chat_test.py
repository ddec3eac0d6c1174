"""Which tokens are learned: runs of marked tokens against the text that transformers renders."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mint_jax.data import chat
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.recipes import sft
from tests.data.tiny_tokenizers import CHATML, ZEPHYR, byte_level, metaspace, save, sentence_piece

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
    pairs = zip(marked.learn, marked.tokens, strict=True)
    return [
        (learn, tokenizer.decode([token for _, token in group], skip_special=False))
        for learn, group in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]


def learned(tokenizer, marked) -> list[str]:
    return [part for learn, part in runs(tokenizer, marked) if learn]


letters = st.characters(
    max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"], exclude_characters="<|>"
)  # the vocabulary lacks other bytes
text = st.text(letters | st.sampled_from("\n\t"), max_size=20)
contents = st.lists(st.tuples(text, text), min_size=1, max_size=3)


def test_exactly_the_assistants_turns_are_learned(tokenizer, theirs):
    @settings(max_examples=100)
    @example([("", " ")], None, None)
    @given(contents, st.none() | text, st.none() | text)
    def check(pairs, system, last):
        messages = [turn("system", system)] if system is not None else []
        for user, reply in pairs:
            messages += [turn("user", user), turn("assistant", reply)]
        # a last turn without an answer is left out
        unanswered = [turn("user", last)] if last is not None else []
        row = {"messages": messages + unanswered}
        marked = chat.supervised_row(tokenizer, row, "row")
        found = runs(tokenizer, marked)
        rendered = theirs.apply_chat_template(messages, tokenize=False)
        assert "".join(part for _, part in found) == rendered
        parts = learned(tokenizer, marked)
        for part, (_, reply) in zip(parts, pairs, strict=True):
            # A token is learned if any of its characters is the reply's: blanks join the end of the
            # line before them.
            assert part == reply + END or (part == "\n" + reply + END and reply[0].isspace())
        assert found[-1] == (False, "\n")

    check()


KINDS = {
    "bytes": (byte_level, CHATML),
    "sentence piece": (sentence_piece, ZEPHYR),
    "metaspace": (metaspace, ZEPHYR),
}


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """Ours and transformers' tokenizer of one directory."""
    source, template = KINDS[request.param]
    save(tmp_path, source(), chat_template=template, bos_token=None)
    return Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)


WORDS = ["blue", " blue", "\n\n", "", "日本", " ", "a\nb"]


def test_what_is_sampled_is_what_is_learned(pair, rng):
    """Where the prompt's tokens begin the whole text's, the tokens after them are the targets: SFT
    learns what a sampler draws.
    """
    mine, _ = pair
    consistent = 0
    for _ in range(60):
        said, reply = rng.choice(WORDS, 2).tolist()
        prompt = mine.encode_chat([turn("user", said)])
        row = {"messages": [turn("user", said), turn("assistant", reply)]}
        marked = chat.supervised_row(mine, row, "row")
        if marked.tokens[: len(prompt)] == prompt:
            consistent += 1
            last = len(marked.learn) - marked.learn[::-1].index(True)
            assert marked.learn[:last] == [False] * len(prompt) + [True] * (last - len(prompt))
        row = {"prompt": "The colour is" + said, "completion": reply + " x"}
        plain, asked = chat.supervised_row(mine, row, "row"), mine.encode(row["prompt"])
        if plain.tokens[: len(asked)] == asked:
            consistent += 1
            assert plain.learn == [False] * len(asked) + [True] * (len(plain.tokens) - len(asked))
    assert consistent > 40


def test_a_token_that_straddles_prompt_and_reply_belongs_to_the_reply(tmp_path):
    mine = Tokenizer(save(tmp_path, byte_level()))
    [straddling] = mine.encode(" two")
    marked = chat.supervised_row(mine, {"prompt": "one t", "completion": "wo four"}, "row")
    assert marked.first == marked.tokens.index(straddling)
    row = {"prompt": "one t", "chosen": "wo four", "rejected": "!"}
    chosen, rejected = chat.preference_row(mine, row, "row")
    assert chosen.tokens[: chosen.first] != rejected.tokens[: rejected.first]
    group = sft.group_of(chosen, rejected, pair_weight=1.0)
    assert group.prefix == mine.encode("one")
    for marked, sequence in zip((chosen, rejected), group.sequences):
        assert group.prefix + sequence.tokens == marked.tokens
        assert sequence.weights == [float(learn) for learn in marked.learn[len(group.prefix) :]]


GENERATION = (
    "{% macro say(m) %}{{ m.content }}<|im_end|>{% endmacro %}{% for m in messages %}{{ m.role"
    " }}\n{% if m.role == 'assistant' %}{% set x = 1 %}{% generation %}{{ say(m) }}{{ x }}{%"
    " endgeneration %}{% else %}{{ say(m) }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_replies_that_the_template_marks_are_learned(tmp_path, rng, kind):
    source = KINDS[kind][0]()
    if kind == "bytes":
        # transformers loses a reply's first blank otherwise
        source["post_processor"]["trim_offsets"] = False
    save(tmp_path, source, chat_template=GENERATION)
    mine, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for _ in range(30):
        said = ["two", "one", *rng.choice([w for w in WORDS if w.isascii()], 2).tolist()]
        messages = [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(said)]
        how = {"return_assistant_tokens_mask": True, "return_dict": True}
        wanted = theirs.apply_chat_template(messages, **how)
        marked = chat.supervised_row(mine, {"messages": messages}, "row")
        assert marked.tokens == wanted["input_ids"]
        assert marked.learn == [bool(x) for x in wanted["assistant_masks"]]


TOOLED = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{"
    " m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool>{{ c.function.name }} {{"
    " c.function.arguments | tojson }}</tool>{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false"
    " %}<think></think>{% endif %}{% endif %}"
)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": ADD}


@pytest.fixture
def tooled(tmp_path):
    return Tokenizer(save(tmp_path, byte_level(), chat_template=TOOLED))


def call(arguments):
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("dumped", [json.dumps, lambda value: value], ids=["json", "objects"])
def test_tools_and_arguments_reach_the_template_as_objects(tooled, dumped):
    arguments, parts = dumped({"a": 2, "b": {"c": '"x"'}}), ["4" + END]
    parts = ['<tool>add {"a": 2, "b": {"c": "\\"x\\""}}</tool>' + END, *parts]
    asked = [turn("user", "two plus two?"), call(arguments)]
    messages = [*asked, {"role": "tool", "content": "4"}, turn("assistant", "4")]
    for tools in (dumped([TOOL]), [dumped(TOOL)]):
        marked = chat.supervised_row(tooled, {"messages": messages, "tools": tools}, "row")
        text = tooled.decode(marked.tokens, skip_special=False)
        assert text.startswith(f"Tools: {json.dumps([TOOL])}\n<|im_start|>user")
        assert learned(tooled, marked) == parts
    reply = {"prompt": asked[:1], "completion": asked[1:], "tools": [TOOL]}
    whole = chat.supervised_row(tooled, {"messages": asked, "tools": [TOOL]}, "row")
    assert chat.supervised_row(tooled, reply, "row") == whole
    pair = {"prompt": asked[:1], "chosen": asked[1], "rejected": "4", "tools": [TOOL]}
    found = [learned(tooled, marked) for marked in chat.preference_row(tooled, pair, "row")]
    assert found == [parts[:1], parts[1:]]


def test_prompts_to_sample_are_those_that_are_learned(tooled):
    """Tools, variables and arguments as JSON text, in front of the reply's opening."""
    messages = [turn("user", "q"), call('{"a": 1}'), {"role": "tool", "content": "4"}]
    row = {"messages": messages, "tools": [TOOL]}
    prompt = chat.prompt_tokens(tooled, row, "row")
    answered = row | {"messages": [*messages, turn("assistant", "four")]}
    assert chat.supervised_row(tooled, answered, "row").tokens[: len(prompt)] == prompt
    assert prompt != chat.prompt_tokens(tooled, row | {"tools": None}, "row")
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    bare = chat.prompt_tokens(tooled, row | variables, "row")
    assert tooled.decode(bare).endswith("<think></think>")
    assert bare[: len(prompt)] == prompt


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    counted = "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}"
    mine = Tokenizer(save(tmp_path, byte_level(), chat_template=counted))
    messages = [turn(role, f"{role} {i}") for i in range(2) for role in ("user", "assistant")]
    with pytest.raises(UserError, match="line 3: the chat template rewrites earlier turns"):
        chat.supervised_row(mine, {"messages": messages}, "line 3")


Q, GOOD, BAD = turn("user", "q"), turn("assistant", "good"), turn("assistant", "bad one")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [Q], "chosen": "good", "rejected": "bad one"},
        {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [Q, GOOD], "rejected": [Q, BAD]},
    ],
)
def test_preferences_share_their_prompt(tokenizer, row):
    for marked, reply in zip(chat.preference_row(tokenizer, row, "row"), ("good", "bad one")):
        assert marked.tokens[: marked.first] == tokenizer.encode_chat([Q])
        assert learned(tokenizer, marked) == [reply + END]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, "columns question, answer; expected messages"),
        ({"text": "a"}, "a text of 1 tokens; at least 2"),
        ({"prompt": "q", "completion": ""}, "the reply is empty: there is nothing to learn"),
        ({"messages": [Q, {"role": "assistant"}]}, "template refuses"),
        ({"messages": [Q]}, "no assistant turn"),
        ({"messages": []}, "messages is .*; expected a list of messages"),
        ({"prompt": "q", "completion": 5}, "completion is '5'; expected a string"),
        ({"prompt": "q", "completion": [GOOD, BAD]}, "the reply to a prompt that is text"),
        ({"text": "a b", "tools": [TOOL]}, "there are tools and plain text"),
        ({"messages": [Q, GOOD], "tools": "add"}, "tools has 'add'; expected a list, or its JSON"),
        ({"messages": [Q, GOOD], "tools": [TOOL]}, "template has no place for them"),
        ({"messages": [Q], "chat_template_kwargs": {"tools": []}}, "template_kwargs has 'tools'"),
        ({"messages": [Q, call("[1]")]}, r"a call of add has '\[1\]'; expected an object"),
    ],
)
def test_bad_rows_are_refused(tokenizer, row, message):
    with pytest.raises(UserError, match=f"row 5.*{message}"):
        chat.supervised_row(tokenizer, row, "row 5")
