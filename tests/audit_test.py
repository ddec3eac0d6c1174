"""Audits of witnessed tokens: scores against torch and transformers' own filters, e-values by
simulation, and honest and wrong answers of the engine.
"""

import dataclasses
import json

import numpy as np
import openai
import pytest
import torch
import transformers

from mint_jax import audit
from mint_jax.audit import NAMED, Auditor, Rounding, judge
from mint_jax.audit import audit as audit_of
from mint_jax.errors import UserError
from mint_jax.harness.adapters import JobCatalog
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.score import Scorer
from mint_jax.rollout.witness import BASE, SAMPLING, Witness
from tests import oracles
from tests.adapters import random_adapter
from tests.service.openai_world import client as client
from tests.service.openai_world import world as world

ROUNDING = Rounding(5e-4, 1e-3)
PLAIN = {name: getattr(Request((0,)), name) for name in SAMPLING}
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3, "top_p": 0.95},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": ((5, 2.0), (7, -1e30))},
]


def drawn_by_transformers(z_V, context, how):
    """Log-probabilities by transformers' own processors, float64; -inf where filtered."""
    steps = []
    if how["repetition_penalty"] != 1:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(how["repetition_penalty"]))
    steps.append(transformers.TemperatureLogitsWarper(float(how["temperature"])))
    if how["top_k"]:
        steps.append(transformers.TopKLogitsWarper(how["top_k"]))
    if how["top_p"] < 1:
        steps.append(transformers.TopPLogitsWarper(how["top_p"]))
    if how["min_p"]:
        steps.append(transformers.MinPLogitsWarper(how["min_p"]))
    ids, scores = torch.tensor([context]), torch.tensor(z_V, dtype=torch.float64)[None]
    for step in steps:
        scores = step(ids, scores)
    return torch.log_softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("how", [s for s in SETTINGS[2:] if "logit_bias" not in s] + [{}])
def test_scores_are_those_of_torch_and_transformers(how, tiny_base, hf_dirs, rng):
    """Rows of two lengths; any token, those that the filters remove too."""
    base, how = tiny_base("llama"), PLAIN | how
    model = oracles.torch_model(hf_dirs("llama"), torch.float64)
    made = []
    for prompt, count in ((9, 6), (4, 11)):
        ids = rng.integers(3, base.cfg.vocab_size, prompt + count).tolist()
        drawn = [0.0] * count
        made.append(Witness(BASE, base.fingerprint, ids[:prompt], ids[prompt:], 3, 0, drawn, how))
    found = Auditor(base, ROUNDING).evidence(made, [None, None], {})
    impossible = 0
    for one, evidence in zip(made, found, strict=True):
        text = [*one.prompt_token_ids, *one.token_ids]
        z_TV = model(torch.tensor([text])).logits[0].detach().numpy()
        for n, token in enumerate(one.token_ids):
            at = len(one.prompt_token_ids) + n
            expected = drawn_by_transformers(z_TV[at - 1], text[:at], how)[token]
            raw = torch.log_softmax(torch.tensor(z_TV[at - 1]), -1)[token]
            assert evidence.gaps[0, n] == pytest.approx(-float(raw), abs=1e-4)
            q = 0.99 * np.exp(expected) + 0.01 / base.cfg.vocab_size
            assert evidence.logq[0, n] == pytest.approx(np.log(q), abs=1e-3)
            if expected == -np.inf:
                impossible += 1
                # a token beyond the edge by less than rounding may have been drawn
                edge = how | {"top_p": how["top_p"] + 2 * ROUNDING.gap / how["temperature"]}
                if drawn_by_transformers(z_TV[at - 1], text[:at], edge)[token] == -np.inf:
                    assert evidence.logp[n] == np.log(audit.IMPOSSIBLE)
            else:
                assert evidence.logp[n] == pytest.approx(expected, abs=1e-4)
    assert (impossible > 0) == (how["top_k"] > 0 or how["top_p"] < 1 or how["min_p"] > 0)


def test_a_bet_against_the_truth_seldom_wins_and_one_for_it_does(rng):
    """Ville's inequality for each bet and their mean, with a look at every token."""
    V, N, runs, alpha, rate = 12, 300, 3000, 0.05, 0.02
    p, others = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V), 2)
    wins = dict.fromkeys(("honest", "likelihood", "exceed", "mean"), 0)
    for _ in range(runs):
        tokens, hits = rng.choice(V, N, p=p), rng.random(N) < rate
        one = audit.likelihood_bet(np.log(p[tokens]), np.log(others[:, tokens]))
        two = audit.exceedance_bet(hits, rate)
        assert np.isfinite([one, two]).all()
        wins["likelihood"] += one.max() >= -np.log(alpha)
        wins["exceed"] += two.max() >= -np.log(alpha)
        wins["mean"] += audit.log_mean(np.stack([one, two])).max() >= -np.log(alpha)
    bound = alpha * runs + 4 * np.sqrt(alpha * runs)
    assert max(wins.values()) <= bound, wins
    assert wins["likelihood"] > 0, "a bet that never wins tests nothing"
    tokens = rng.choice(V, N, p=others[1])
    won = audit.likelihood_bet(np.log(p[tokens]), np.log(others[:, tokens]))
    assert won[-1] > 20
    assert audit.exceedance_bet(rng.random(N) < 0.3, rate)[-1] > 20


def test_the_mean_bet_is_the_mean_of_the_products(rng):
    logp, logq = np.log(rng.random(7)), np.log(rng.random((3, 7)))
    ratios = np.exp(logq - logp)
    products = np.array([ratios[:, : n + 1].prod(1).mean() for n in range(7)])
    np.testing.assert_allclose(np.exp(audit.likelihood_bet(logp, logq)), products)
    hits = np.array([0, 1, 0, 0, 1])
    expected = np.mean([(1 - x) ** 3 * (1 - x + x / 0.1) ** 2 for x in audit.STAKES])
    assert np.exp(audit.exceedance_bet(hits, 0.1)[-1]) == pytest.approx(expected)


def sampled(base, rng, count=3, tokens=24, **how):
    """Answers of the engine under a random adapter, its stacks with two more."""
    specs, config = transformer.abstract(base.cfg), AdapterConfig(2, 4.0)
    named = {k: (config, random_adapter(rng, base, config)) for k in ("mine", "parent", "third")}
    stacks, slots = lora_tree.stack_adapters(specs, named)
    prompts = [tuple(rng.integers(3, base.cfg.vocab_size, n).tolist()) for n in (5, 21, 40)[:count]]
    requests = [
        Request(prompt, slots["mine"], n=2, max_tokens=tokens, seed=int(rng.integers(2**32)), **how)
        for prompt in prompts
    ]
    return requests, stacks, slots


def witnesses(base, requests, found, revision="mine"):
    named = [dataclasses.replace(request, revision=revision) for request in requests]
    return [
        dataclasses.replace(Witness.of(request, i, done, base.fingerprint), revision=revision)
        for request, completions in zip(named, found)
        for i, done in enumerate(completions)
    ]


@pytest.mark.parametrize("how", SETTINGS)
def test_honest_tokens_are_drawn_again_and_raise_no_alarm(how, tiny_base, rng):
    base = tiny_base("llama")
    requests, stacks, slots = sampled(base, rng, **how)
    made = witnesses(base, requests, Engine(base).generate(requests, stacks))
    every, auditor = [slots["mine"], slots["parent"], None], Auditor(base, ROUNDING)
    found = auditor.evidence(made, every, stacks)
    assert len(found) == len(made)
    for evidence in found:
        assert evidence.gaps[0].max() < ROUNDING.gap
        assert evidence.logp.min() > np.log(audit.IMPOSSIBLE)
        assert not evidence.differs.any()
    scored = Scorer(base).logprobs(
        [[*m.prompt_token_ids, *m.token_ids] for m in made], [slots["mine"]] * len(made), stacks
    )
    if how == {}:
        for one, evidence, scores in zip(made, found, scored):
            own = scores[len(one.prompt_token_ids) - 1 :]
            np.testing.assert_allclose(evidence.logp, own, atol=1e-4)
    verdict = judge("mine", ["parent", BASE], found, ROUNDING)
    assert (verdict.alarms["e"], verdict.explains) == (None, NAMED)
    assert verdict.agreement[NAMED] == 1


FAULTS = {"parent": "parent", "third": "third", BASE: None}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", [SETTINGS[0], SETTINGS[1], SETTINGS[4]], ids=["1", "greedy", "all"])
def test_an_adapter_that_did_not_answer_is_found_and_named(fault, how, tiny_base, rng):
    base = tiny_base("llama")
    requests, stacks, slots = sampled(base, rng, **how)
    wrong = [dataclasses.replace(r, adapter=slots.get(fault)) for r in requests]
    made = witnesses(base, wrong, Engine(base).generate(wrong, stacks))
    labels = ["parent", BASE, "third"]
    every, auditor = [slots.get(label) for label in ("mine", *labels)], Auditor(base, ROUNDING)
    found = auditor.evidence(made, every, stacks)
    verdict = judge("mine", labels, found, ROUNDING)
    assert verdict.alarms["e"] is not None
    assert verdict.alarms["logprobs"] is not None
    assert (verdict.explains, verdict.agreement[fault]) == (fault, 1)
    assert verdict.agreement[NAMED] < 0.5
    # a server that lies about log-probabilities is found by its tokens
    scores = [evidence._replace(gaps=evidence.gaps * 0) for evidence in found]
    lied = judge("mine", labels, scores, ROUNDING)
    assert lied.alarms["logprobs"] is None
    assert lied.alarms["e"] is not None


def of_server(world, client, **asked):
    extra = {"mint_witness": True} | asked.pop("extra_body", {})
    answer = client.completions.create(extra_body=extra, **asked)
    return [Witness.read(one.mint_witness, "answer") for one in answer.choices], answer


def test_a_witness_is_the_engines_sample_whole_and_streamed(world, client):
    asked = {"model": "chat@1", "prompt": ["The quick brown", "日本 is"], "n": 2, "max_tokens": 8}
    asked |= {"seed": 11, "temperature": 0.8, "top_p": 0.9, "extra_body": {"top_k": 40}}
    found, answer = of_server(world, client, **asked)
    assert len(found) == 4
    wanted = [
        done
        for prompt in asked["prompt"]
        for done in world.sampled(
            prompt,
            world.digests["chat@1"],
            n=2,
            max_tokens=8,
            seed=11,
            temperature=0.8,
            top_p=0.9,
            top_k=40,
        )
    ]
    for i, (one, done, choice) in enumerate(zip(found, wanted, answer.choices, strict=True)):
        assert (one.token_ids, one.logprobs) == (done.tokens, done.logprobs)
        assert (one.revision, one.base) == (world.digests["chat@1"], world.base.fingerprint)
        assert (one.seed, one.sample) == (11, i % 2)
        settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logit_bias": []}
        assert dict(one.sampling) == PLAIN | settings
        assert world.base.tokenizer.decode(one.token_ids).startswith(choice.text)
    asked["extra_body"] = {"mint_witness": True, "top_k": 40}
    streamed = client.completions.create(stream=True, **asked)
    last = {c.index: c for chunk in streamed for c in chunk.choices if c.finish_reason}
    assert [Witness.read(last[i].mint_witness, "chunk") for i in range(4)] == found
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model="tiny-random", messages=messages, max_tokens=4, extra_body={"mint_witness": True}
    )
    one = Witness.read(chat.choices[0].mint_witness, "chat")
    assert one.revision == BASE
    assert one.prompt_token_ids == world.base.tokenizer.encode_chat(messages)
    plain = client.completions.create(model="chat", prompt="Hi", max_tokens=2)
    assert not hasattr(plain.choices[0], "mint_witness"), "off unless asked for"


@pytest.mark.parametrize(
    "more", [{"structured_outputs": {"regex": "[a-c]+"}}, {"max_tokens": 0, "echo": True}]
)
def test_a_witness_that_could_not_be_audited_is_refused(world, client, more):
    with pytest.raises(openai.BadRequestError, match="mint_witness is true, but"):
        client.completions.create(
            model="chat", prompt="Hi", extra_body={"mint_witness": True} | more
        )
    with pytest.raises(openai.BadRequestError, match="mint_witness"):
        client.responses.create(model="chat", input="Hi", extra_body={"mint_witness": True})


def test_the_catalogs_bytes_judge_a_server(world, client):
    """Claims of several revisions; one of them is answered by its parent."""
    catalog = JobCatalog(str(world.catalog.database.url.database).removesuffix("/catalog.db"))
    asked = {"prompt": "The quick brown fox", "max_tokens": 8, "n": 3}
    honest, _ = of_server(world, client, model="chat@2", **asked)
    bare, _ = of_server(world, client, model="tiny-random", **asked)
    older, _ = of_server(world, client, model="chat@1", **asked)
    other, _ = of_server(world, client, model="tiny-random", **asked)
    how = {"count": 3, "against": ["a/mine@1"]}
    good = audit_of(world.base, catalog, [*honest, *bare], ROUNDING, **how)
    assert [one.revision for one in good] == [world.digests["chat@2"], BASE]
    assert [(one.alarms["e"], one.explains) for one in good] == [(None, NAMED)] * 2
    assert list(good[0].agreement) == [NAMED, "parent chat@1", BASE, "a/mine@1"]
    digest = world.digests["chat@2"]
    for answers, label in ((older, "parent chat@1"), (other, BASE)):
        lied = [dataclasses.replace(one, revision=digest) for one in answers]
        [bad] = audit_of(world.base, catalog, lied, ROUNDING, **how)
        assert bad.alarms["e"] is not None
        assert bad.explains == label
    catalog.close()


def test_the_command_asks_and_judges(world, tmp_path, capsys, one_device):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "witnesses.jsonl"
    rows = [{"prompt": "The quick brown"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(world.catalog.database.url.database).removesuffix("/catalog.db")
    common = [str(file), "--base=tiny-random", f"--catalog={folder}"]
    body = json.dumps({"max_tokens": 8, "n": 2})
    asked = [f"--url={world.url}", "--model=chat@2", f"--prompts={prompts}", f"--body={body}"]
    assert audit.main([*common, *asked]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    [claim] = result["claims"]
    assert (result["alarm"], claim["explains"], claim["tokens"] > 8) == (False, NAMED, True)
    changed = [
        json.loads(line) | {"revision": world.digests["chat@1"]}
        for line in file.read_text().splitlines()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert audit.main(common) == 1
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["claims"][0]["explains"] == "chat@2"
    assert "best explained by chat@2" in out
    for row, says in (
        (changed[0] | {"base": "0" * 64}, "audit it with its own base"),
        (changed[0] | {"logprobs": []}, "expected as many of both"),
        (changed[0] | {"logprobs": [], "token_ids": []}, "at least one"),
        (changed[0] | {"token_ids": [10**6] * len(changed[0]["token_ids"])}, "it was changed"),
        ({"revision": BASE}, "a witness has no base"),
    ):
        file.write_text(json.dumps(row) + "\n")
        assert audit.main(common) == 2
        assert says in capsys.readouterr().err
    assert audit.main([*common, "--dtype=bfloat16"]) == 2
    assert "--gap=1" in capsys.readouterr().err


def test_a_witness_of_another_answer_is_refused(world, client, monkeypatch):
    asked = {"model": "chat@2", "prompt": "Hi", "max_tokens": 6}
    [other], _ = of_server(world, client, **asked, seed=1)
    [own], answer = of_server(world, client, **asked, seed=2)
    choice = {"text": answer.choices[0].text, "mint_witness": other.to_json()}
    monkeypatch.setattr(audit, "_post", lambda *_: {"choices": [choice]})
    with pytest.raises(UserError, match="witnesses another answer"):
        audit.ask(world.url, [{"prompt": "Hi"}], {}, world.base, "")
    choice["mint_witness"] = own.to_json()
    assert audit.ask(world.url, [{"prompt": "Hi"}], {}, world.base, "") == [own]
