"""The tokenizer and chat templates against transformers' AutoTokenizer on the same directory."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from tests.data.tiny_tokenizers import save, sentence_piece

WEATHER = {
    "name": "weather",
    "description": "Wetter in 東京 <b>&",
    "parameters": {"type": "object"},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 17 + 25?\n\tÜber <|im_end|> 日本"},
    {"role": "assistant", "content": "42 "},
    {"role": "user", "content": ""},
]


@pytest.fixture(scope="module")
def directory():
    return base_lib.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def ours(directory) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def copy(directory, tmp_path):
    """A directory with the same tokenizer, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path / name)
    return tmp_path


def change_config(directory, **fields):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_text_encodes_and_decodes_as_in_transformers(ours, theirs):
    @settings(max_examples=150)
    @given(st.text(max_size=80))
    def check(text):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special=skip) == wanted

    check()


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]])
def test_chats_render_as_in_transformers(ours, theirs, messages, generation):
    how = {"add_generation_prompt": generation}
    text = theirs.apply_chat_template(messages, tokenize=False, **how)
    assert ours.render(messages, generation) == text
    ids = theirs.apply_chat_template(messages, return_dict=True, **how)["input_ids"]
    assert ours.encode_chat(messages, generation) == ids


TEMPLATES = (
    "{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m }}{% break %}"
    "{% endfor %}",
    "\n  {% for m in messages %}\n    {{- m.content | trim }}\n  {% endfor %}\n  {# comment #}\n x",
    "{{ strftime_now('%Y-%m-%d') }}",
)


@pytest.mark.parametrize("template", TEMPLATES, ids=["tools", "loops", "blocks", "date"])
def test_what_templates_use_renders_as_in_transformers(copy, template):
    """Features found in the templates of released checkpoints."""
    (copy / "chat_template.jinja").write_text(template)
    text = AutoTokenizer.from_pretrained(copy).apply_chat_template(
        CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=True, thinking=True
    )
    assert Tokenizer(copy).render(CHAT, True, tools=TOOLS, thinking=True) == text


NAMED = {"default": "plain {{ messages[0].role }}", "tool_use": "{{ tools | length }} tools"}


@pytest.mark.parametrize("form", ["list", "mapping", "files over a config"])
def test_named_templates_are_taken_as_in_transformers(copy, form):
    """``tool_use`` where there are tools, else ``default``."""
    listed = [{"name": name, "template": text} for name, text in NAMED.items()]
    change_config(copy, chat_template=NAMED if form == "mapping" else listed)
    named = NAMED
    if form == "files over a config":
        named = {name: f"file {text}" for name, text in NAMED.items()}
        (copy / "chat_template.jinja").write_text(named["default"])
        (copy / "additional_chat_templates").mkdir()
        (copy / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    mine, theirs = Tokenizer(copy), AutoTokenizer.from_pretrained(copy)
    for tools in (None, TOOLS):
        wanted = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert mine.render(CHAT, False, tools=tools) == wanted
    assert mine.render(CHAT, tools=TOOLS).endswith("1 tools")
    assert set((mine.sources[1] or "").split("\n")) == set(named.values())


def test_end_tokens_are_those_of_all_files(tmp_path):
    save(tmp_path, sentence_piece(), {"eos_token_id": 3})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    mine, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert mine.eos_id == theirs.eos_token_id
    assert mine.eos_ids == (5, 3, theirs.eos_token_id)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m.content }}", "template"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe|access"),
        (None, "no chat template"),
    ],
)
def test_bad_templates_are_refused(copy, template, message):
    change_config(copy, chat_template=template)
    with pytest.raises(UserError, match=message):
        Tokenizer(copy).render(CHAT)


@pytest.mark.parametrize(
    ("file", "text"),
    [("tokenizer.json", "{"), ("tokenizer_config.json", "{'a': 1"), ("generation_config.json", "")],
)
def test_unreadable_files_are_refused_by_name(copy, file, text):
    (copy / file).write_text(text)
    with pytest.raises(UserError, match=file):
        Tokenizer(copy)
