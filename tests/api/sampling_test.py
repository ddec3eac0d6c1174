"""Sampling by hand: seeds, prompts of all forms, evaluation, and GRPO with one turn or several."""

import numpy as np
import pytest

import mint_jax as mint
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example, ListEnvironment

PROMPT = "2 + 2 ="


def tokens(completions):
    return [[c.tokens for c in some] for some in completions]


@pytest.mark.long
def test_samples_are_new_in_each_call_and_follow_from_the_seed(load):
    prompts, drawn = [PROMPT, PROMPT], {"n": 3, "temperature": 1.0, "max_tokens": 6}

    def calls(**settings):
        model = load(**settings)
        policy = model.policy("a", 2, targets=["q"])
        unseeded = [tokens(one.completions(prompts, **drawn)) for one in (model, model, policy)]
        seeded = [tokens(one.completions(prompts, seed=5, **drawn)) for one in (model, policy)]
        return [*unseeded, tokens(policy.completions(prompts, **drawn))], seeded, policy.draws

    def samples(found):
        return [tuple(sample) for call in found for prompt in call for sample in prompt]

    found, seeded, draws = calls()
    assert len(set(samples(found))) == len(samples(found)) == 24
    assert seeded[0] == seeded[1], "a fresh adapter changes nothing"
    assert seeded[0][0] != seeded[0][1], "one prompt twice has other samples"
    assert calls() == (found, seeded, draws) and draws == 2  # noqa: PT018
    others, same, _ = calls(seed=1)
    assert same == seeded
    assert not set(samples(others)) & set(samples(found))


def test_prompts_are_text_messages_or_token_ids(model):
    ids = model.base.tokenizer.encode(PROMPT)
    messages = [{"role": "user", "content": PROMPT}]
    chat = model.base.tokenizer.encode_chat(messages)
    asked = [PROMPT, ids, np.array(ids), messages, tuple(messages), chat]
    found = model.completions(asked, max_tokens=3)
    assert [some[0].request.prompt for some in found] == [tuple(ids)] * 3 + [tuple(chat)] * 3
    assert tokens(found)[:3] == [tokens(found)[0]] * 3
    assert tokens(found)[3:] == [tokens(found)[3]] * 3
    assert model.decode(model.encode(" four")) == " four"
    assert repr(found[0][0]) == f"Completion({found[0][0].text!r}, 3 tokens, length)"


def test_evaluation_is_the_mean_over_prompts_with_its_standard_error(model):
    policy = model.policy("judged", 2, targets=["q"])
    prompts = ["2 + 2 =", "3 + 4 =", "1 + 1 =", "5 + 4 ="]

    def reward(text, prompt):
        return len(text) + prompts.index(prompt)

    drawn = {"n": 2, "temperature": 1.0, "max_tokens": 4}
    found = policy.evaluate(reward, prompts, **drawn)
    rewards = [[reward(c.text, p) for c in some] for some, p in zip(found.completions, prompts)]
    assert found.rewards == rewards
    means = np.array(rewards).mean(axis=1)
    assert found.mean == pytest.approx(means.mean())
    assert found.standard_error == pytest.approx(means.std(ddof=1) / 2)
    assert policy.evaluate(reward, prompts, **drawn).rewards == rewards, "the same draws again"
    assert policy.draws == 0
    assert model.evaluate(reward, prompts, **drawn).rewards == rewards, "the adapter is fresh"
    assert np.isnan(model.evaluate(reward, prompts[:1], max_tokens=2).standard_error)
    held_out = [Example(p, "4") for p in prompts]
    environment = ListEnvironment([], held_out, lambda text, example: float(example.answer == "4"))
    assert repr(model.evaluate(environment, max_tokens=2)) == "Evaluation(1 ± 0, 4 prompts)"
    make = lambda size: ListEnvironment(held_out, held_out[:size], reward)  # noqa: E731
    mint.register_environment("own_task", make)
    assert env_lib.make("own_task", size=2).held_out == held_out[:2]
    for call, says in (
        (lambda: model.evaluate(reward), "prompts are missing"),
        (lambda: model.evaluate(3), "task is 3; expected a function"),
        (lambda: model.evaluate(lambda text, prompt: None, prompts, max_tokens=2), "returned None"),
        (lambda: mint.register_environment("digit_sum", reward), "is shipped with mint_jax"),
    ):
        with pytest.raises(mint.UserError, match=says):
            call()
    policy.remove()


@pytest.mark.long
def test_grpo_by_hand_raises_the_reward(hf_dirs, mesh):
    base = mint.load(str(hf_dirs("llama")), mesh=mesh)  # no tokenizer: token ids in, token ids out
    policy = base.policy("low", 4, targets=["q", "v", "unembed"], loss="ppo", learning_rate=3e-2)
    how = {"temperature": 1.0, "max_tokens": 4}

    def score(completion):
        return float(np.mean([token < 48 for token in completion.tokens]))  # of 97

    rewards = []
    for _ in range(10):
        completions = policy.completions([[5, 9, 33], [70, 12]], n=16, **how)
        scores = [[score(c) for c in some] for some in completions]
        groups = mint.groups(completions, scores)
        metrics = policy.train_step(groups)
        assert metrics["max_gap"] < 1e-3, "the sampler's log-probabilities are the trainer's"
        rewards.append(np.mean(scores))
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    expected = np.array(scores) - np.mean(scores, axis=1, keepdims=True)
    expected /= np.std(scores, axis=1, keepdims=True) + 1e-4
    found = [[s.advantages[0] for s in group.sequences] for group in groups]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_turns_of_an_episode_learn_what_the_policy_wrote_and_read_what_the_environment_wrote(model):
    policy = model.policy("turns", 2, targets=["q"], loss="ppo")
    drawn = {"temperature": 0.7, "max_tokens": 3, "stop_ids": ()}
    [firsts] = policy.completions([PROMPT], n=2, **drawn)
    replies = [model.encode(reply) for reply in (" wrong, again:", " no:")]
    prompts = [[*c.request.prompt, *c.tokens, *reply] for c, reply in zip(firsts, replies)]
    seconds = [c for [c] in policy.completions(prompts, **drawn)]
    [group] = mint.groups(
        [[[a, b] for a, b in zip(firsts, seconds)]], [[1.0, 0.0]], normalisation="sequence"
    )
    assert group.prefix == list(firsts[0].request.prompt)
    assert group.temperature == 0.7
    for a, b, reply, sequence, sign in zip(firsts, seconds, replies, group.sequences, (1, -1)):
        assert sequence.tokens == [*a.tokens, *reply, *b.tokens]
        mask = [1] * 3 + [0] * len(reply) + [1] * 3
        assert [w != 0 for w in sequence.weights] == [bool(m) for m in mask]
        assert sum(sequence.weights) == pytest.approx(0.5), "a mean over what it wrote"
        assert np.sign(sequence.advantages[0]) == sign
        drawn_logp = np.array(sequence.old_logp)[np.array(mask) == 1]
        np.testing.assert_array_equal(drawn_logp, a.drawn_logprobs + b.drawn_logprobs)
    metrics = policy.train_step([group])
    assert metrics["tokens"] == 12
    assert metrics["max_gap"] < 1e-3, "each log-probability is of the whole episode before it"
    with pytest.raises(mint.UserError, match="the prompt of turn 2 does not begin with the tokens"):
        mint.groups([[[firsts[0], seconds[1]], firsts[1]]], [[1.0, 0.0]])
    policy.remove()


def test_completions_that_cannot_train_are_refused(model):
    [two] = model.completions([PROMPT], n=2, temperature=1.0, max_tokens=2)
    [[greedy]] = model.completions([PROMPT], max_tokens=2)
    [[filtered]] = model.completions([PROMPT], temperature=1.0, top_p=0.5, max_tokens=2)
    [[other]] = model.completions(["3"], temperature=1.0, max_tokens=2)
    for completions, rewards, says in (
        (two, [1.0, 0.0], r"completions\[0\] is Completion.*expected a list"),
        ([two], [[1.0]], r"rewards\[0\] has 1 for 2 completions"),
        ([two], [[1.0, None]], "rewards are no numbers"),
        ([two], [[1.0, float("nan")]], "is nan"),
        ([two, two[:1]], [[1.0, 0.0], [1.0]], r"completions\[1\] has 1 completions"),
        ([[greedy, two[0]]], [[1.0, 0.0]], "is greedy"),
        ([[filtered, two[0]]], [[1.0, 0.0]], "drawn with top_p=0.5"),
        ([[other, two[0]]], [[1.0, 0.0]], "of several prompts"),
        ("text", [[1.0]], "completions is 'text'"),
    ):
        with pytest.raises(mint.UserError, match=says):
            mint.groups(completions, rewards)
