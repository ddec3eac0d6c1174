"""Conversations in rollouts: turns are one text to the model, observations are read and not trained
on, and the chat template continues what was sampled.
"""

import dataclasses
import types

import numpy as np
import pytest
from transformers import AutoTokenizer

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.envs import scoring
from mint_jax.envs.env import Example, ListConversation, StepResult
from mint_jax.errors import UserError
from mint_jax.harness.options import GrpoSampling
from mint_jax.models.paged import PAGE
from mint_jax.recipes import dialogues, grpo, turns
from mint_jax.recipes.rollouts import Member, PolicySampler, as_record, rollout_metrics
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from tests.data.tiny_tokenizers import CHATML, ZEPHYR, byte_level, metaspace, save
from tests.laws.sampler_scorer_test import GAP, trainer_with_random_adapters

CHAT = ({"role": "user", "content": "two plus two"},)
READ = ({"role": "user", "content": "no, one more"}, {"role": "user", "content": "Paris"})


class Letters:
    """Tokenizer of printable characters, one id each."""

    eos_ids, special_ids = (), {}

    def encode(self, text, special=True):
        return [ord(c) - 29 for c in text]

    def decode(self, ids, skip_special=True):
        return "".join(chr(i + 29) for i in ids)


def play(config, answers, prompts, **sampling):
    """A policy whose environment answers a turn with ``answers(completions)``."""
    examples = [Example(Letters().decode(prompt), "") for prompt in prompts]
    env = ListConversation(examples, examples, lambda texts, example: answers(texts))
    how = GrpoSampling(**{"prompts": len(prompts), "group_size": 2} | sampling)
    return Member(config, prompts, prompts, len(prompts), env, how, {})


class Player(PolicySampler):
    """Plays the conversations of a step, as a job does."""

    def play(self, names, step=0):
        drawn, scored = self.rollout(names, step), {}
        while drawn:
            scored |= {n: turns.answer(self, n, rollout) for n, rollout in drawn.items()}
            drawn = turns.next_turns(self, scored)
        return scored


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_turns_are_one_text_to_the_model(family, tiny_base, rng):
    """Oracles: one turn of as many tokens, and the scorer's pass over the whole conversation."""
    base = dataclasses.replace(tiny_base(family), tokenizer=Letters())
    trainer = trainer_with_random_adapters(base, rng)
    prompts = [rng.integers(3, 96, n).tolist() for n in (70, 41)]
    says = "again: "
    ends = lambda texts: StepResult(done=len(texts) == 3)  # noqa: E731
    goes_on = lambda texts: StepResult(says, len(texts[-1]), len(texts) == 9)  # noqa: E731
    greedy = {"max_tokens": 5, "temperature": 1e-5}  # nearly, whatever the noise of a turn
    members = {
        "one": play(trainer.policies["one"], ends, prompts, **greedy),
        "three": play(trainer.policies["three"], goes_on, prompts, max_tokens=6, max_turns=3),
    }
    sizes = {"max_rows": 8, "cache_bytes": None, "speculative_tokens": 0}
    sampler = Player(types.SimpleNamespace(**sizes, sampler=sizes), base, members, trainer)
    scored = sampler.play(list(members))

    rollout, rewards = scored["one"]
    one = trainer.slots["one"]
    requests = [Request(tuple(prompt), one, 2, 15, 1e-5, version=99) for prompt in prompts]
    rollout_of = dict(zip(map(tuple, rollout.prompts), rollout.completions))
    for request, [whole, *_] in zip(requests, sampler.engine.generate(requests, trainer.stacks)):
        for dialogue in rollout_of[request.prompt]:
            assert dialogue.tokens == whole.tokens
            assert dialogue.turns == [1] * 5 + [2] * 5 + [3] * 5
            assert [len(text) for text in dialogue.texts] == [5, 5, 5]
            np.testing.assert_allclose(dialogue.logprobs, whole.logprobs, atol=GAP)
            if base.cfg.routed:  # at ties of two experts rounding decides
                assert np.mean(dialogue.routes == whole.routes) > 0.98

    rollout, rewards = scored["three"]
    assert (rewards == 18).all()
    for prompt, group in zip(rollout.prompts, rollout.completions):
        slots = [trainer.slots["three"]] * 2
        texts = [[*prompt, *d.tokens] for d in group]
        for d, logprobs in zip(group, Scorer(base).logprobs(texts, slots, trainer.stacks)):
            mask = np.array(dialogues.drawn_mask(d))
            assert d.finish == "length"
            assert mask.tolist() == ([True] * 6 + [False] * 7) * 2 + [True] * 6
            assert Letters().decode(d.tokens) == says.join(d.texts)
            at = logprobs[len(prompt) - 1 :]
            np.testing.assert_allclose(np.array(d.logprobs)[mask], at[mask], rtol=0, atol=GAP)
        assert group[0].tokens != group[1].tokens
    found = rollout_metrics(members["three"].sampling, rollout, rewards)
    assert found["turns"] == 3
    assert found["truncated"] == 1.0
    assert found["longest"] == 18
    by = [["abc", "ab", "a"], ["def"] * 3]
    record = as_record(dataclasses.replace(rollout, drawn_by=by), rewards)
    assert record.revisions[0][0] == ["abc"] * 6 + [""] * 7 + ["ab"] * 6 + [""] * 7 + ["a"] * 6
    groups = grpo.rollout_groups(members["three"].sampling, rollout, rng.normal(size=(2, 2)))
    row = trainer.forward_backward({"three": groups})["three"]
    assert row["tokens"] == 2 * 2 * 18
    assert row["max_gap"] <= GAP

    read = []
    for keeps in (True, False):  # the blocks of a turn's prompt for the next turns
        sampler.engine.keep_cache = keeps
        sampler.engine.release()
        before = sampler.engine.counts["prefilled_tokens"]
        alone, _ = sampler.play(["three"])["three"]
        pairs = zip(alone.completions, rollout.completions, strict=True)
        assert all(a.logprobs == b.logprobs for one, two in pairs for a, b in zip(one, two))
        read.append(sampler.engine.counts["prefilled_tokens"] - before)
    # two turns of two conversations, each after a prompt of whole pages that is there
    assert read[1] - read[0] >= 2 * sum(len(prompt) // PAGE * PAGE for prompt in prompts)
    other, _ = sampler.play(["three"], step=1)["three"]
    assert other.completions[0][0].tokens not in [d.tokens for g in rollout.completions for d in g]


TOOLS = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}user\n<tool>{{ m.content }}<tool>"
    "{% else %}{{ m.role }}\n{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("source", "template", "read"),
    [
        (byte_level, CHATML, READ),
        (byte_level, TOOLS, ({"role": "tool", "content": "17"},)),
        (metaspace, ZEPHYR, READ[:1]),
    ],
)
def test_the_template_continues_a_reply_as_in_the_whole_conversation(
    tmp_path, source, template, read, ended
):
    save(tmp_path, source(), chat_template=template)
    tokenizer, example = Tokenizer(tmp_path), Example(CHAT, "")
    dialogues.check_continues(tokenizer, example, {})
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    reply = {"role": "assistant", "content": "four"}
    how = {"add_generation_prompt": True, "return_dict": True}
    whole = oracle.apply_chat_template([*CHAT, reply, *read], **how)["input_ids"]
    prompt = tokenizer.encode_chat(list(CHAT))
    end = tokenizer.eos_ids[0]
    length = whole.index(end, len(prompt)) + ended  # tokens to the end of the reply
    assert whole[: len(prompt)] == prompt
    found = dialogues.reply_tokens(tokenizer, example, read, whole[length - 1], {})
    assert whole[:length] + found == whole


DROPS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
LETTERS = "{% for m in messages %}{{ m.content }}{% endfor %}"  # no token between turns


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DROPS, "writes a reply 0 times; expected once"),
        (CHATML + DROPS.replace("!=", "=="), "writes a reply 2 times"),
        (LETTERS, "encodes 'no' behind a reply not as it does"),
        ("{{ raise_exception('no turns') }}", "the chat template refuses .*no turns"),
    ],
)
def test_templates_that_cannot_continue_a_reply_are_refused(tmp_path, template, message):
    save(tmp_path, (metaspace if template == LETTERS else byte_level)(), chat_template=template)
    with pytest.raises(UserError, match=message):
        dialogues.check_continues(Tokenizer(tmp_path), Example(CHAT, ""), {})


@pytest.mark.parametrize(
    ("result", "prompt", "message"),
    [
        ((READ, 1.0, False), CHAT, r"the step function returned \(.*\(tuple\); expected envs"),
        (None, CHAT, r"the step function returned None \(NoneType\); expected envs.env.StepResult"),
        (StepResult("text"), CHAT, "returned the observation 'text'; expected messages, as the"),
        (StepResult(READ), "text", "returned the observation .*; expected text, as the prompt"),
        (StepResult("", float("nan")), "text", "step function returned nan; expected a finite"),
        (StepResult("", "1"), "text", r"returned '1' \(str\); expected a number"),
        (StepResult("", 1.0, "yes"), "text", "returned done='yes'; expected True or False"),
    ],
)
def test_steps_that_are_no_answers_are_refused(result, prompt, message):
    env = ListConversation([], [], lambda texts, example: result)
    with pytest.raises(UserError, match=f"{message}.*; policy 'ada', completion 'b' of prompt"):
        scoring.step("ada", env, ("a", "b"), Example(prompt, ""))
