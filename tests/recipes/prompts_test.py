"""Prompts of environments are encoded as the checkpoint's chat template says."""

import types

import pytest
from transformers import AutoTokenizer

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.envs.env import REGISTRY, Example, ListConversation, ListEnvironment, StepResult
from mint_jax.errors import UserError
from mint_jax.recipes import rollouts
from tests.configs import read, tiny
from tests.data.tiny_tokenizers import byte_level, save

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
CHAT = ({"role": "user", "content": "two plus two"},)


def chats():
    return ListEnvironment([Example(CHAT, "4")] * 2, [Example(CHAT, "4")], lambda *_: 0.0)


def texts():
    return ListEnvironment([Example("two", "4")], [Example("two", "4")], lambda *_: 0.0)


def talks():
    return ListConversation([Example(CHAT, "4")], [Example(CHAT, "4")], lambda *_: StepResult())


def members(tmp_path, factory, sampling=None, settings=None, **env):
    save(tmp_path, byte_level(), chat_template=TEMPLATE)
    tokenizer, cfg = Tokenizer(tmp_path), types.SimpleNamespace(context=512)
    base = types.SimpleNamespace(need_tokenizer=lambda: tokenizer, cfg=cfg)
    config = tiny("grpo")
    policy = config.policies.ppo.to_dict()
    policy["env"] = {"name": f"tests.recipes.prompts_test:{factory}"} | env
    policy["sampling"].update(sampling or {})
    with config.unlocked():
        config.update(settings or {})
        config.policies = {"one": policy}
    return rollouts.members_of(read(config), base)  # type: ignore[arg-type]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_of_the_config_reach_the_chat_template(tmp_path, variables):
    member = members(tmp_path, "chats", chat_template_kwargs=variables)["one"]
    wanted = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        list(CHAT), add_generation_prompt=True, return_dict=True, **variables
    )["input_ids"]
    assert member.train == [wanted] * 2
    assert member.held_out == [wanted]


@pytest.mark.parametrize(
    ("factory", "variables", "message"),
    [
        ("chats", {"messages": []}, "chat_template_kwargs has 'messages', which has a place of"),
        ("texts", {"enable_thinking": False}, "sets enable_thinking, but a prompt is plain text"),
    ],
)
def test_variables_without_a_place_are_refused(tmp_path, factory, variables, message):
    with pytest.raises(UserError, match=message):
        members(tmp_path, factory, chat_template_kwargs=variables)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"overlong_tokens": 2}}, "'one': overlong_tokens is 2, .*set it to 0"),
        ({"sampling": {"max_turns": 0}}, "max_turns is 0; expected"),
        (
            {"settings": {"partial_rollouts": True, "max_staleness": 1}},
            "'one': partial_rollouts is True, and its environment is a conversation",
        ),
        ({"sampling": {"max_tokens": 511}}, "exceed the context of 512"),
    ],
)
def test_settings_that_conversations_cannot_have_are_refused(tmp_path, changes, message):
    assert members(tmp_path, "talks")["one"].converses
    with pytest.raises(UserError, match=message):
        members(tmp_path, "talks", **changes)


def test_worker_processes_need_an_environment_by_name(monkeypatch):
    monkeypatch.setitem(REGISTRY, "registered", talks)
    config = tiny("grpo")
    config.policies.ppo.env.name = "registered"
    with config.unlocked():
        config.reward_processes = 2
    with pytest.raises(UserError, match=r"'registered', a function of this .*: name it module:fac"):
        read(config).preflight()
