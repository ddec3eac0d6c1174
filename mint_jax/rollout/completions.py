"""Completions of ended samples, and their form in messages between processes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mint_jax.models.paged import PAGE
from mint_jax.rollout.request import Completion
from mint_jax.rollout.samples import CachedPrompt, SampleState


def completion(sample: SampleState) -> Completion:
    """Returns the completion of a sample that has ended."""
    n, request, prompt = len(sample.tokens), sample.prompt.request, sample.prompt
    return Completion(
        sample.tokens,
        sample.logprobs[:n],
        sample.drawn_logprobs[:n],
        sample.finish or "",
        sample.text,
        routes=sample.routes,
        prompt_routes=prompt.routes,
        revision=request.revision,
        top_logprobs=sample.top[:n] if request.top_logprobs else None,
        reused=prompt.reused or 0,
        **_scores(prompt),
    )


def _scores(prompt: CachedPrompt) -> dict[str, Any]:
    """Returns the requested prompt scores, keyed by the fields of ``Completion``."""
    request, first = prompt.request, prompt.request.first_scored
    if first is None:
        return {}
    # Each entry: logprobs of the targets, ids and logprobs of the most likely tokens, ids and
    # logprobs of the drawn alternatives.
    places: list[Any] = [None] * first
    if prompt.scores:
        scored = [place for i in sorted(prompt.scores) for place in zip(*prompt.scores[i])]
        places += scored[first - min(prompt.scores) * PAGE :]
    else:  # cancelled before prefill, or a prompt of one token
        places += [None] * (prompt.length - first)
    out: dict[str, Any] = {}
    if request.prompt_logprobs:
        out["prompt_logprobs"] = [
            float("nan") if place is None else place[0][0] for place in places
        ]
    if k := request.top_prompt_logprobs:
        out["top_prompt_logprobs"] = [
            [] if place is None else list(zip(place[1][:k], place[2][:k])) for place in places
        ]
    if (targets := request.target_prompt_logprobs) is not None:
        pairs = zip(places, targets, strict=True)
        out["target_prompt_logprobs"] = [
            [] if place is None else [0.0 if i < 0 else p for i, p in zip(ids, place[0][1:])]
            for place, ids in pairs
        ]
    if k := request.prompt_alternatives:
        out["prompt_alternatives"] = [
            [] if place is None else list(zip(place[3][:k], place[4][:k])) for place in places
        ]
    return out


NUMBERS = {"tokens": np.int32, "logprobs": np.float64, "drawn_logprobs": np.float64}
PAIRS = ("top_logprobs", "top_prompt_logprobs", "prompt_alternatives")  # lists of lists of tuples
ROUTES = ("routes", "prompt_routes")


def to_message(one: Completion, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Returns a completion as a message.

    Args:
        numbers: number of each array of expert ids, keyed by the array's ``id``. Every process
            already has these arrays, so only their numbers are sent.
    """
    out = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    out |= {name: np.array(out[name], dtype) for name, dtype in NUMBERS.items()}
    return out | {name: None if out[name] is None else numbers[id(out[name])] for name in ROUTES}


def from_message(message: Mapping[str, Any], routes: Mapping[int, np.ndarray]) -> Completion:
    """Returns the completion that ``to_message`` serialised in another process."""
    out: dict[str, Any] = dict(message)
    out |= {name: out[name].tolist() for name in NUMBERS}
    out |= {
        name: [[tuple(pair) for pair in place] for place in out[name]]
        for name in PAIRS
        if out[name] is not None
    }
    out |= {name: None if out[name] is None else routes[out[name]] for name in ROUTES}
    return Completion(**out)
