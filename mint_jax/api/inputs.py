"""Validation of arguments of the Python API: prompts, rows, losses, sampling settings, seeds."""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import fields
from mint_jax.errors import UserError, choice
from mint_jax.harness import start
from mint_jax.models.base import Base
from mint_jax.recipes import dpo, sft
from mint_jax.rollout.request import Request
from mint_jax.train import losses
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, known_kinds
from mint_jax.train.losses import Tokens

# raw text, messages for the chat template, or token ids
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
Row = Mapping[str, Any]
Rows = Sequence[Row] | Sequence[Group]
Loss = str | LossConfig | Callable[[Tokens], Any]
# fields of a request that callers do not set
_OURS = ("prompt", "adapter", "revision", "version", "tenant")
SETTINGS = [f.name for f in dataclasses.fields(Request) if f.name not in _OURS]


def one_by_one(values: Any, what: str) -> list[Any]:
    """Returns ``values`` as a list of prompts, rows or names; refuses a single item, and none."""
    is_single = isinstance(values, str | Mapping | Path)
    if is_single or not isinstance(values, Sequence | np.ndarray | types.GeneratorType):
        raise UserError(
            f"{what} is {values!r:.80}; expected a list: write [...] around a single one"
        )
    if not (values := list(values)):
        raise UserError(f"{what} is empty: give at least one")
    return values


def _are_ids(values: Any) -> bool:
    return (
        isinstance(values, list | tuple | np.ndarray)
        and len(values) > 0
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in values)
    )


def encoded(base: Base, prompts: Any) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt; refuses what is not text, messages or token ids."""
    out = []
    for i, prompt in enumerate(one_by_one(prompts, "prompts")):
        if _are_ids(prompt):
            out.append(tuple(map(int, prompt)))
            continue
        is_chat = isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt)
        if not isinstance(prompt, str) and not (is_chat and prompt):
            raise UserError(
                f"prompts[{i}] is {prompt!r:.80}; expected text, a list of messages with role and"
                " content, or a list of token ids"
            )
        out.append(tuple(start.encode(base, prompt)))
    return out


def sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns checked settings of a request; the default is greedy."""
    if strange := [name for name in settings if name not in SETTINGS]:
        raise fields.unknown("there is no sampling setting", strange[0], SETTINGS)
    checked = {"temperature": 0.0} | fields.check(Request, settings, "sampling")
    if checked["temperature"] == 0 and checked.get("n", 1) > 1:
        raise UserError(
            f"n is {checked['n']} at temperature 0, which gives equal completions: set temperature"
            " (1.0, say) or leave n out"
        )
    return checked


def seeds(seed: int | None, fresh: Sequence[int], count: int) -> list[int]:
    """Returns one seed for each prompt of a call, from the caller's seed or else from ``fresh``."""
    entropy = list(fresh) if seed is None else [as_seed(seed)]
    return np.random.SeedSequence(entropy).generate_state(count).tolist()


def as_seed(seed: Any) -> int:
    """Returns a checked seed."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed!r}; expected a whole number >= 0")
    return int(seed)


def as_loss(loss: Any) -> LossConfig:
    """Returns the config of a loss given as a config, a name or a function."""
    if isinstance(loss, LossConfig):
        return loss
    if isinstance(loss, str):
        return LossConfig(loss)
    if callable(loss) and not isinstance(loss, type):
        return LossConfig(losses.name_of(loss))  # type: ignore[arg-type]
    raise UserError(
        f"loss is {loss!r:.80}; expected a name ({', '.join(known_kinds())}), a LossConfig, or a"
        " function of mint.Tokens"
    )


def to_groups(base: Base, name: str, loss: LossConfig, rows: Any) -> list[Group]:
    """Returns one policy's weighted groups. Rows of text or pairs get weights whose loss is a mean
    over tokens or pairs; groups are checked and pass through.
    """
    rows, what = one_by_one(rows, f"rows of policy {name!r}"), f"policy {name!r}"
    if isinstance(rows[0], Group):
        for i, group in enumerate(rows):
            if not isinstance(group, Group):
                raise UserError(
                    f"{what}: rows[{i}] is {group!r:.80}; expected only groups, because the"
                    " first row is one"
                )
            _check_group(group, f"{what}, group {i}", base.cfg.vocab_size)
        return rows
    kind = dpo.DPO if loss.kind == "dpo" else sft.SFT
    if "advantages" in loss.needs or "old_logp" in loss.needs:
        raise UserError(
            f"{what}: loss {loss.kind!r} needs {' and '.join(sorted(loss.needs - {'ref_logp'}))},"
            " which rows of texts do not have: train on groups (mint.groups makes them of"
            " completions and rewards), or give the policy loss 'cross_entropy'"
        )
    groups = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            forms = " or ".join("{" + ", ".join(map(repr, columns)) + "}" for columns in kind.forms)
            raise UserError(
                f"{what}: rows[{i}] is {row!r:.80}; expected a dict with {forms}, or a Group"
            )
        groups.append(kind.to_group(base, dict(row), f"{what}: rows[{i}]", True))
    return sft.weighted(groups)


def _check_group(group: Group, where: str, vocab: int) -> None:
    _check_ids(group.prefix, f"{where}: prefix", vocab)
    _numbers([group.temperature], f"{where}: temperature", 1)
    _numbers([group.pair_weight], f"{where}: pair_weight", 1)
    if not isinstance(group.sequences, list | tuple) or not group.sequences:
        raise UserError(
            f"{where}: sequences is {group.sequences!r:.80}; expected a list of TrainSequence, at"
            " least one"
        )
    for k, one in enumerate(group.sequences):
        if not isinstance(one, TrainSequence):
            raise UserError(f"{where}: sequences[{k}] is {one!r:.80}; expected a TrainSequence")
        what = f"{where}, sequence {k}"
        _check_ids(one.tokens, f"{what}: tokens", vocab)
        weights = _numbers(one.weights, f"{what}: weights", len(one.tokens))
        for name in ("advantages", "old_logp", "ref_logp"):
            if (values := getattr(one, name)) is not None:
                _numbers(values, f"{what}: {name}", len(one.tokens), where=weights != 0)
    if not any(w for one in group.sequences for w in one.weights):
        raise UserError(
            f"{where} has no token with a weight, so there is nothing to learn: leave it out"
        )


def _check_ids(ids: Any, what: str, vocab: int) -> None:
    if not _are_ids(ids) or not all(0 <= i < vocab for i in ids):
        raise UserError(
            f"{what} is {ids!r:.80}; expected token ids, at least one, from 0 to {vocab - 1}"
        )


def _numbers(values: Any, what: str, count: int, where: Any = True) -> np.ndarray:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        array = np.zeros(0)
    if array.shape != (count,):
        raise UserError(f"{what} is {values!r:.80}; expected {count} numbers, one for each token")
    if not np.isfinite(array[np.broadcast_to(where, array.shape)]).all():
        wrong = next(float(x) for x in array if not math.isfinite(x))
        raise UserError(
            f"{what} has {wrong}; expected finite numbers: leave the sequence out, or fix the"
            " code that made it"
        )
    return array


def by_policy(rows: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rows keyed by policy name; keys may be names or ``Policy`` objects."""
    if not isinstance(rows, Mapping) or not rows:
        raise UserError(f"rows is {rows!r:.80}; expected a dict from a policy's name to its rows")
    out = {}
    for key, values in rows.items():
        name: Any = key if isinstance(key, str) else getattr(key, "name", None)
        if name not in known or (not isinstance(key, str) and known[name] is not key):
            if not known:
                raise UserError(f"policy is {key!r}; no policy is in training: make one first")
            raise choice("policy", key, list(known))
        out[name] = values
    return out
