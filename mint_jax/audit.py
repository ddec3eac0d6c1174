"""Audit of witnessed tokens: were they drawn from the revision that the answer names?

    python -m mint_jax.audit WITNESSES.jsonl --catalog=runs/catalog --base=smollm2-135m-instruct
    python -m mint_jax.audit WITNESSES.jsonl --url=http://127.0.0.1:8000 --model=chat \\
        --prompts=prompts.jsonl --catalog=runs/catalog --base=smollm2-135m-instruct

The second form first asks the prompts and writes the witnesses. Tokens are scored again from the
catalog's bytes by the trainer's forward pass, never by the engine, under the named revision and
alternatives. Three bets against the claim "drawn from the named revision" are tests by betting
(Shafer 2021, doi:10.1111/rssa.12647): each is a running product of factors whose expectation is at
most 1 if the claim holds. By Ville's inequality one exceeds 1 / alpha at any time, ever, with
probability at most alpha, and so does the mean of the three.

    likelihood   mean over alternatives of prod q(token) / p(token), of the drawn distributions
    logprobs     reported and scored log-probabilities differ by more than rounding
    seed         the draw, repeated with its noise, gives another token by more than rounding

Axes: R rows, one for each candidate, T positions, N tokens of an answer, D model width, K
alternatives, V vocab.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax.data.buckets import ShapeBook
from mint_jax.data.sources import json_line, numbered_rows, write_rows
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.adapters import JobCatalog, catalog_of, read_adapter
from mint_jax.harness.options import CatalogSettings
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.lora.view import AdapterView, bind_blocks, plan_blocks
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.precision import as_stored
from mint_jax.models.transformer import DecoderInputs, hidden_states
from mint_jax.rollout.detokenize import context_of, text_behind
from mint_jax.rollout.request import seed_of
from mint_jax.rollout.sample import noise
from mint_jax.rollout.witness import BASE, Witness

ALPHA = 1e-3
NAMED = "named"  # label of the claimed revision among the candidates
BETS = ("likelihood", "logprobs", "seed")
RATE = 1e-3  # of honest tokens beyond the measured rounding, at most
STAKES = (0.01, 0.1, 0.5)  # of a bet on exceedances; their mean is bet
SMOOTH = 0.01  # weight of the uniform distribution in an alternative, so that no token refutes it
IMPOSSIBLE = 1e-6  # probability of a token that the claim cannot draw; bounds one token's factor
PART_BYTES = 64 << 20  # float32 logits of one call
PASS_TOKENS = 2048  # that one pass scores: alone, an answer waits for the weights to be read
TIMEOUT_S = 600.0
NOISE_ERROR = 1e-5  # of float32 noise and scores
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")


class Rounding(NamedTuple):
    """Difference between honest log-probabilities of engine and trainer.

    Attributes:
        gap: nats; also the bound on the error of a logit.
        rate: share of honest tokens beyond it, at most.
    """

    gap: float
    rate: float


# By dtype of the base. Of 8,192 honest tokens of SmolLM2 in benchmarks/witness.py none exceeds the
# gap, the largest is 9.8e-5; the rate is above the 95 % bound that follows, 3 / 8,192.
MEASURED = {"float32": Rounding(5e-4, RATE)}


def calibrate(gaps: np.ndarray) -> Rounding:
    """Returns the rounding of honest answers from their ``|reported - scored|``: twice the largest,
    and the 95 % bound on a rate of which none was seen, at least ``RATE``.
    """
    return Rounding(2 * float(np.max(gaps, initial=0)), max(RATE, 3 / max(1, len(gaps))))


# -- bets


def log_mean(logs_KN: np.ndarray) -> np.ndarray:
    """Returns ``log mean exp`` over the first axis."""
    top_N = np.maximum(logs_KN.max(0), -1e300)  # not of -inf - -inf
    return top_N + np.log(np.exp(logs_KN - top_N).mean(0))


def likelihood_bet(logp_N: np.ndarray, logq_KN: np.ndarray) -> np.ndarray:
    """Returns the running log e-value of the likelihood ratios, ``[N]``; 0 without alternatives."""
    return log_mean(np.cumsum(logq_KN - logp_N, 1)) if len(logq_KN) else np.zeros(len(logp_N))


def exceedance_bet(hits_N: np.ndarray, rate: float) -> np.ndarray:
    """Returns the running log e-value of a bet that hits are more frequent than ``rate``, ``[N]``:
    the mean over stakes l of ``prod (1 - l + l / rate * hit)``.
    """
    stakes = np.array(STAKES)[:, None]
    return log_mean(np.cumsum(np.log(1 - stakes + stakes / rate * hits_N), 1))


# -- distributions of logits [V], of which exp in float32 takes a tenth of float64's time


def penalised(z_V: np.ndarray, witness: Witness, n: int) -> np.ndarray:
    """Returns the logits with biases and penalties before token ``n`` is drawn; see
    ``rollout.sample.penalised``.
    """
    how, drawn = witness.sampling, np.array(witness.token_ids[:n], int)
    again, each, once, biases = (how[name] for name in PENALTIES)
    if (again, each, once, len(biases)) == (1, 0, 0, 0):
        return z_V
    z_V = z_V.copy()
    for token, bias in biases:
        z_V[token] += bias
    count_V = np.bincount(drawn, minlength=len(z_V))
    before = np.union1d(np.array(witness.prompt_token_ids, int), drawn)
    z_V[before] = np.where(z_V[before] > 0, z_V[before] / again, z_V[before] * again)
    return z_V - each * count_V - once * (count_V > 0)


def temperature_of(sampling: Mapping[str, Any]) -> float:
    """Returns the temperature; those that float32 flushes to 0 are 0, greedy."""
    heat = float(np.float32(sampling["temperature"]))
    return heat if heat >= np.finfo(np.float32).tiny else 0.0


def edge(z_V: np.ndarray, sampling: Mapping[str, Any], slack: float = 0.0) -> float:
    """Returns the least logit that top-k, top-p and min-p keep. ``slack``: error of logits; if
    positive a bound from below on the edge, if negative from above.
    """
    heat, k = temperature_of(sampling), sampling["top_k"]
    filters = 0 < k < len(z_V) or sampling["top_p"] < 1 or sampling["min_p"] > 0
    if heat and not filters:
        return -math.inf
    found, top = -math.inf, float(z_V.max())
    if not heat:
        return min(top, top - slack)
    if 0 < k < len(z_V):
        found = float(np.partition(z_V, -k)[-k]) - slack
    if sampling["top_p"] < 1 or sampling["min_p"] > 0:
        kept = np.sort(z_V[z_V >= min(found, top)]).astype(np.float64)[::-1]
        p = np.exp((kept - top) / heat)
        p /= p.sum()
        if (goal := sampling["top_p"] + slack / heat) < 1:
            last = int(np.searchsorted(np.cumsum(p), goal))
            found = max(found, float(kept[min(last, len(kept) - 1)]) - slack)
        if sampling["min_p"] > 0:
            found = max(found, top + heat * math.log(sampling["min_p"]) - slack)
    return min(found, top)


def log_drawn(z_V: np.ndarray, token: int, sampling: Mapping[str, Any], slack: float) -> float:
    """Returns ``log p(token)`` of the drawn distribution. A token that only rounding may have kept
    counts as kept, any other token outside has ``IMPOSSIBLE``.
    """
    heat, low = temperature_of(sampling), edge(z_V, sampling)
    if z_V[token] < low and z_V[token] < edge(z_V, sampling, slack):
        return math.log(IMPOSSIBLE)
    if not heat:
        return 0.0
    kept = z_V if low == -math.inf else z_V[z_V >= min(low, z_V[token])]
    top = kept.max()
    total = np.exp((kept - top) / heat).sum(dtype=np.float64)
    return float((z_V[token] - top) / heat - np.log(total))


def log_alternative(z_V: np.ndarray, token: int, sampling: Mapping[str, Any]) -> float:
    """Returns ``log q(token)`` of an alternative's drawn distribution, mixed with the uniform."""
    if temperature_of(sampling):
        inside = z_V[token] >= edge(z_V, sampling)
        q = math.exp(log_drawn(z_V, token, sampling, 0.0)) if inside else 0.0
    else:
        q = float(token == int(z_V.argmax()))
    return math.log((1 - SMOOTH) * q + SMOOTH / len(z_V))


def redrawn_differs(
    z_V: np.ndarray, token: int, noise_V: np.ndarray, sampling: Mapping[str, Any], slack: float
) -> bool:
    """Returns True if the draw with this noise gives another token, by more than rounding."""
    heat = temperature_of(sampling)
    if z_V[token] < edge(z_V, sampling, slack):
        return True
    score_V = z_V / heat + noise_V if heat else z_V
    certain = edge(z_V, sampling, -slack)
    best = (score_V if certain == -math.inf else score_V[z_V >= certain]).max()
    return bool(best - score_V[token] > slack / (heat or 1.0) + NOISE_ERROR)


# -- scoring


@functools.partial(jax.jit, static_argnames=("cfg", "count"))
@as_stored
def _hidden(
    params: Any, lora: AdapterView | None, tokens_RT: jax.Array, first_R: Any, cfg: Any, count: int
) -> jax.Array:
    """Returns the last states of ``count`` positions from each row's first, ``[R, count, D]``."""
    positions = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1], dtype=jnp.int32), tokens_RT.shape)
    h, _ = hidden_states(params, lora, DecoderInputs(tokens_RT, positions), cfg)
    places_RN = first_R[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(h, places_RN[..., None], axis=1)


@functools.partial(jax.jit, static_argnames=("cfg", "size"))
@as_stored
def _logits(
    params: Any, lora: AdapterView | None, h_RND: jax.Array, begin: Any, cfg: Any, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of ``size`` positions from ``begin``, ``[R, size, V]`` float32, and their
    log-sums ``[R, size]``.
    """
    h = jax.lax.dynamic_slice_in_dim(h_RND, begin, size, axis=1)
    z = transformer.logits(params, lora, h, cap=cfg.logit_cap)
    return z, jax.nn.logsumexp(z, axis=-1)


class Evidence(NamedTuple):
    """Facts about the tokens of an answer.

    Attributes:
        logp: ``[N]`` of the drawn distribution of the named revision.
        logq: ``[K, N]`` of the alternatives'.
        gaps: ``[1 + K, N]``, ``|reported - scored|`` of the unmodified models, the named one first.
        differs: ``[N]`` bool, tokens that the repeated draw does not give.
    """

    logp: np.ndarray
    logq: np.ndarray
    gaps: np.ndarray
    differs: np.ndarray

    @classmethod
    def empty(cls, count: int, alternatives: int) -> "Evidence":
        gaps = np.zeros((1 + alternatives, count))
        return cls(np.zeros(count), np.zeros((alternatives, count)), gaps, np.zeros(count, bool))

    def note(
        self,
        one: Witness,
        n: int,
        z: np.ndarray,
        total: np.ndarray,
        noise_V: np.ndarray,
        slack: float,
    ) -> None:
        """Notes the facts about token ``n``: logits ``[1 + K, V]`` of the candidates and their
        log-sums ``[1 + K]``, float32, and the noise of its draw.
        """
        token, how = one.token_ids[n], one.sampling
        self.gaps[:, n] = np.abs(one.logprobs[n] - (z[:, token] - total))
        named_V, *others = (penalised(z_V, one, n) for z_V in z)
        self.logp[n] = log_drawn(named_V, token, how, slack)
        self.differs[n] = redrawn_differs(named_V, token, noise_V, how, slack)
        self.logq[:, n] = [log_alternative(z_V, token, how) for z_V in others]


class Auditor:
    """Scores answers under candidates."""

    def __init__(self, base: Base, rounding: Rounding):
        self.base, self.rounding = base, rounding
        self._counts, self._lengths = ShapeBook(), ShapeBook()

    def evidence(
        self, witnesses: Sequence[Witness], slots: Sequence[Slot | None], stacks: Stacks
    ) -> list[Evidence]:
        """Returns the evidence of answers under the revision that they name, the first of
        ``slots``, and its alternatives; None is the bare base. Raises ``UserError`` for a witness
        of another base, or with ids outside the vocabulary.
        """
        for one in witnesses:
            self._check(one)
        lengths = [len(one.prompt_token_ids) + len(one.token_ids) for one in witnesses]
        left = sorted(range(len(witnesses)), key=lengths.__getitem__)
        found: dict[int, Evidence] = {}
        while left:  # the longest ones first, so that rows of a pass are of similar lengths
            room = max(1, PASS_TOKENS // (len(slots) * lengths[left[-1]]))
            count = 1 << (min(room, len(left)).bit_length() - 1)  # few compiled shapes
            left, batch = left[:-count], left[-count:]
            scored = self._scored([witnesses[i] for i in batch], slots, stacks)
            found |= zip(batch, scored, strict=True)
        return [found[i] for i in range(len(witnesses))]

    def _scored(
        self, batch: Sequence[Witness], slots: Sequence[Slot | None], stacks: Stacks
    ) -> list[Evidence]:
        """Returns the evidence of answers that one pass scores."""
        base, K, V = self.base, len(slots) - 1, self.base.cfg.vocab_size
        plan = plan_blocks([slot for _ in batch for slot in slots], base.row_multiple)
        rows_BK = np.array([plan.order.index(r) for r in range(len(batch) * len(slots))])
        rows_BK, R = rows_BK.reshape(len(batch), -1), len(plan.order)
        counts = [len(one.token_ids) for one in batch]
        firsts = [len(one.prompt_token_ids) - 1 for one in batch]
        (count,) = self._counts.fit((max(counts),), least=(8,))
        (length,) = self._lengths.fit((max(firsts) + count,), least=(16,))
        tokens, first_R = np.zeros((R, length), np.int32), np.zeros(R, np.int32)
        for one, rows, first, N in zip(batch, rows_BK, firsts, counts, strict=True):
            tokens[rows, : first + N] = [*one.prompt_token_ids, *one.token_ids][: first + N]
            first_R[rows] = first
        size = max(1, min(count, PART_BYTES // (4 * R * V)))
        seeds = np.repeat([seed_of(one.seed, one.sample) for one in batch], size).astype(np.uint32)
        found = [Evidence.empty(N, K) for N in counts]
        with jax.set_mesh(base.mesh):
            lora = bind_blocks(plan, stacks, base.dtype)
            h = _hidden(base.params, lora, tokens, first_R, cfg=base.cfg, count=count)
            for begin in range(0, max(counts), size):
                at = min(begin, count - size)
                z, total = map(np.asarray, _logits(base.params, lora, h, at, base.cfg, size))
                places = np.tile(np.arange(at, at + size, dtype=np.int32), len(batch))
                gumbel = np.asarray(noise(seeds, places, vocab=V)).reshape(len(batch), size, V)
                for b, (one, rows) in enumerate(zip(batch, rows_BK, strict=True)):
                    for n in range(begin, min(begin + size, counts[b])):
                        scored = z[rows, n - at], total[rows, n - at], gumbel[b, n - at]
                        found[b].note(one, n, *scored, 2 * self.rounding.gap)
        return found

    def _check(self, one: Witness) -> None:
        cfg, tokens = self.base.cfg, [*one.prompt_token_ids, *one.token_ids]
        if one.base != self.base.fingerprint:
            raise UserError(
                f"a witness is of base {one.base[:12]}, this is {self.base.fingerprint[:12]}"
                f" ({self.base.name}): audit it with its own base"
            )
        if not 0 <= min(tokens) <= max(tokens) < cfg.vocab_size or len(tokens) > cfg.context:
            raise UserError(
                f"a witness has {len(tokens)} tokens of ids {min(tokens)} to {max(tokens)};"
                f" expected at most {cfg.context} of ids 0 to {cfg.vocab_size - 1}: it was changed"
            )


# -- verdicts


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the audit of one claim.

    Attributes:
        log_e: running log e-values by bet, and of their mean as ``e``, ``[N]`` each.
        alarms: by the same names, number of tokens until 1 / alpha is reached; None: never.
        explains: label of the candidate that explains the tokens best: the one with the reported
            log-probabilities of most tokens, or of less than half the likeliest.
        agreement: by label, share of the tokens whose reported log-probability is the candidate's.
        measured: rounding that these answers would calibrate, if they are honest.
    """

    revision: str
    tokens: int
    log_e: dict[str, np.ndarray]
    alarms: dict[str, int | None]
    explains: str
    agreement: dict[str, float]
    measured: Rounding

    def to_json(self) -> dict[str, Any]:
        """Returns the largest e-values, which the verdict is about, and the rest as it is."""
        e = {
            name: float(f"{np.exp(min(700, logs.max())):.4g}") for name, logs in self.log_e.items()
        }
        out = dataclasses.asdict(self) | {"log_e": e}
        return {"e_values" if name == "log_e" else name: value for name, value in out.items()}


def judge(
    revision: str,
    labels: Sequence[str],
    evidence: Sequence[Evidence],
    rounding: Rounding,
    alpha: float = ALPHA,
) -> Verdict:
    """Returns the verdict on answers that name one revision, in their order.

    Args:
        labels: of the alternatives.
    """
    logp, differs = (
        np.concatenate([getattr(one, n) for one in evidence]) for n in ("logp", "differs")
    )
    logq, gaps = (
        np.concatenate([getattr(one, n) for one in evidence], 1) for n in ("logq", "gaps")
    )
    agree = gaps <= rounding.gap
    log_e = {
        "likelihood": likelihood_bet(logp, logq),
        "logprobs": exceedance_bet(~agree[0], rounding.rate),
        "seed": exceedance_bet(differs, rounding.rate),
    }
    log_e["e"] = log_mean(np.stack(list(log_e.values())))
    alarms = {}
    for name, logs in log_e.items():
        above = np.flatnonzero(logs >= -math.log(alpha))
        alarms[name] = int(above[0]) + 1 if len(above) else None
    shares = dict(zip((NAMED, *labels), agree.mean(1).tolist()))
    likely = dict(zip((NAMED, *labels), (float(logp.sum()), *logq.sum(1).tolist())))
    agreeing = [label for label, share in shares.items() if share > 0.5]
    best = max(
        agreeing or shares,
        key=lambda label: (round(shares[label], 2) if agreeing else 0, likely[label]),
    )
    return Verdict(revision, len(logp), log_e, alarms, best, shares, calibrate(gaps[0]))


def alternatives_of(catalog: JobCatalog | None, revision: str, count: int) -> dict[str, str]:
    """Returns the names of up to ``count`` alternatives to a revision by label: its parent, the
    base, and the policy's other revisions by distance.
    """
    if revision == BASE or catalog is None:
        return {}
    found = catalog.main.resolve(revision)
    first = max(0, found.number - 1 - count)
    near = catalog.main.revisions(found.policy, after=first, limit=2 * count + 1)
    near = [one for one in near if one.digest != found.digest and one.state == "live"]
    near.sort(key=lambda one: abs(one.number - found.number))  # of two, the earlier
    parents = [one for one in near if one.number < found.number][:1]
    made = {f"parent {one.policy}@{one.number}": one.digest for one in parents} | {BASE: BASE}
    made |= {f"{one.policy}@{one.number}": one.digest for one in near if one not in parents}
    return dict(list(made.items())[:count])


def audit(
    base: Base,
    catalog: JobCatalog | None,
    witnesses: Sequence[Witness],
    rounding: Rounding,
    *,
    count: int = 4,
    against: Sequence[str] = (),
    alpha: float = ALPHA,
) -> list[Verdict]:
    """Returns a verdict for each revision that the witnesses name. With several claims the level is
    split among them.

    Args:
        catalog: of the revisions; None if all claims name the base.
        count: number of ``alternatives_of`` each claim.
        against: names of further alternatives.
    """
    claims: dict[str, list[Witness]] = {}
    for one in witnesses:
        claims.setdefault(one.revision, []).append(one)
    auditor, found = Auditor(base, rounding), []
    for revision, own in claims.items():
        names = {NAMED: revision} | alternatives_of(catalog, revision, count)
        names |= {name: name for name in against}
        specs = transformer.abstract(base.cfg)
        read = {k: read_adapter(n, base, catalog) for k, n in names.items() if n != BASE}
        stacks, slots = lora_tree.stack_adapters(
            specs, {label: (one.config, one.adapter) for label, one in read.items()}
        )
        every = [slots.get(label) for label in names]
        evidence = auditor.evidence(own, every, stacks)
        labels = [label for label in names if label != NAMED]
        found.append(judge(revision, labels, evidence, rounding, alpha / len(claims)))
    return found


# -- command line


def ask(
    url: str, prompts: Sequence[Mapping[str, Any]], body: Mapping[str, Any], base: Base, key: str
) -> list[Witness]:
    """Asks a server for completions of rows with ``prompt``, or chats of rows with ``messages``.
    Raises ``UserError``: it does not answer, or its witnesses are not of its answers.
    """
    found = []
    for number, row in enumerate(prompts):
        where = f"prompt {number}"
        given = {name: row[name] for name in ("prompt", "messages") if name in row}
        if len(given) != 1:
            raise UserError(f"{where} has {', '.join(row)}; expected prompt or messages")
        door = "completions" if "prompt" in given else "chat/completions"
        answer = _post(f"{url}/v1/{door}", dict(body) | given | {"mint_witness": True}, key)
        tokens = start.encode(base, *given.values())
        for choice in answer["choices"]:
            if "mint_witness" not in choice:
                raise UserError(f"{where}: the server gives no mint_witness: it is of another kind")
            one = Witness.read(choice["mint_witness"], where)
            said = choice["text"] if "prompt" in given else choice["message"]["content"] or ""
            decode = base.need_tokenizer().decode
            text = text_behind(decode, context_of(decode, tokens), one.token_ids)
            if list(one.prompt_token_ids) != tokens or not text.startswith(said.rstrip("\ufffd")):
                raise UserError(
                    f"{where}: the witness is of {text[:80]!r}, the answer is {said[:80]!r}: the"
                    " server witnesses another answer"
                )
            found.append(one)
    return found


def _post(url: str, body: Mapping[str, Any], key: str) -> Any:
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url} answers {error.code}: {error.read(400)!r}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{url} does not answer ({error}): check --url") from None


def _table(verdicts: Sequence[Verdict]) -> str:
    lines = [f"{'revision':14}{'tokens':>7} {'bet':12}{'max e':>10}  alarm at token"]
    for one in verdicts:
        for name, logs in one.log_e.items():
            e, at = np.exp(min(700, logs.max())), one.alarms[name]
            lines.append(f"{one.revision[:12]:14}{one.tokens:7} {name:12}{e:10.3g}  {at or '-'}")
        shares = ", ".join(f"{label} {share:.0%}" for label, share in one.agreement.items())
        lines.append(f"{'':14}best explained by {one.explains}; log-probabilities of: {shares}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mint_jax.audit", description="Were these tokens drawn from that revision?"
    )
    add = parser.add_argument
    add("witnesses", help="JSONL of mint_witness objects; written first with --url")
    add("--base", required=True, help="name or folder of the base")
    add("--dtype", default="float32", help="of the base in the server (default float32)")
    add("--catalog", default="", help="folder or database URL of the revisions")
    add("--payloads", default="", help="URL of the payloads of a database")
    add("--alternatives", type=int, default=4, help="parent, base and other revisions (default 4)")
    add("--against", default="", help="names of further alternatives, separated by commas")
    add("--alpha", type=float, default=ALPHA, help="chance of a false alarm (default 0.001)")
    add("--gap", type=float, help="rounding in nats; default: as measured for float32")
    add("--rate", type=float, default=RATE, help="share of honest tokens beyond it (default 0.001)")
    add("--url", default="", help="of a server to ask first, such as http://127.0.0.1:8000")
    add("--model", default="", help="name that the server is asked for")
    add("--prompts", default="", help="JSONL with prompt or messages")
    add("--body", default="{}", help="JSON of further fields, such as max_tokens")
    return parser


def _rounding(given: argparse.Namespace) -> Rounding:
    if given.gap is None and given.dtype not in MEASURED:
        raise UserError(
            f"the rounding of {given.dtype} depends on the base and is not known: audit answers"
            " that you trust with --gap=1, and give the gap that the result calls measured"
        )
    gap, rate = given.gap, given.rate
    if (gap is not None and not gap > 0) or not 0 < rate < 1 or not 0 < given.alpha < 1:
        raise UserError(
            f"gap is {gap}, rate {rate} and alpha {given.alpha}; expected nats above 0, and shares"
            " between 0 and 1"
        )
    return Rounding(MEASURED[given.dtype].gap if gap is None else gap, rate)


def _run(given: argparse.Namespace) -> int:
    rounding = _rounding(given)
    places = {"catalog": given.catalog, "payloads": given.payloads}
    config = CatalogSettings(job="audit", base=given.base, dtype=given.dtype, **places)
    config.preflight()
    rows = numbered_rows(given.prompts if given.url else given.witnesses)
    base = start.open_base(config)
    if given.url:
        body = json.loads(given.body) | {"model": given.model}
        key = os.environ.get("OPENAI_API_KEY", "")
        asked = [row for _, row in rows]
        witnesses = ask(given.url.rstrip("/"), asked, body, base, key)
        write_rows(given.witnesses, (one.to_json() for one in witnesses))
    else:
        witnesses = [Witness.read(row, where) for where, row in rows]
    against = [name for name in given.against.split(",") if name]
    how = {"count": given.alternatives, "against": against, "alpha": given.alpha}
    with catalog_of(config) as catalog:
        verdicts = audit(base, catalog, witnesses, rounding, **how)
    alarm = any(one.alarms["e"] for one in verdicts)
    print(_table(verdicts))
    result = {"alarm": alarm, "alpha": given.alpha, "claims": [one.to_json() for one in verdicts]}
    print(json_line(result), end="")
    return int(alarm)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 1 for an alarm, 2 for a mistake."""
    given = _parser().parse_args(arguments)
    start.prepare()
    try:
        return _run(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
