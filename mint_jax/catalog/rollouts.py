"""The rollout object: samples of one policy in one step, with the revision that drew each token.

A safetensors file without padding: prompts, tokens, log-probabilities and rewards are concatenated;
each token has an index into a list of digests.
"""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import safetensors
import safetensors.numpy

from mint_jax.catalog.packed import Buffer, as_bytes
from mint_jax.errors import UserError
from mint_jax.safetensors_header import header_size, parse_object

FORMAT = "mint-rollouts/1"
_DTYPES = {
    "prompt_lengths": np.int32,  # [Q]
    "prompts": np.int32,
    "lengths": np.int32,  # [Q, G]
    "tokens": np.int32,
    "logprobs": np.float32,
    "revision": np.uint16,
    "rewards": np.float64,  # [Q, G]
}


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Q prompts with G samples each.

    Attributes:
        policy, step: the policy, and its number of updates before this batch.
        prompts: token ids of each prompt.
        tokens, logprobs: ``[Q][G]`` lists of sampled tokens, and their log-probabilities under the
            revision that drew them.
        revisions: ``[Q][G]`` lists of digests, one per token; empty for tokens of an environment,
            which nobody drew.
        rewards: ``[Q, G]``; NaN where the environment gave none.
    """

    policy: str
    step: int
    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[Sequence[int]]]
    logprobs: Sequence[Sequence[Sequence[float]]]
    revisions: Sequence[Sequence[Sequence[str]]]
    rewards: np.ndarray


def pack_rollouts(rollouts: Rollouts) -> bytes:
    """Returns the object's bytes, deterministically. Raises ``ValueError`` for a token without a
    log-probability or a revision.
    """
    rows, logprobs, drawn = (
        [row for group in groups for row in group]
        for groups in (rollouts.tokens, rollouts.logprobs, rollouts.revisions)
    )
    if not list(map(len, rows)) == list(map(len, logprobs)) == list(map(len, drawn)):
        raise ValueError("every token needs one log-probability and one revision")
    digests = list(dict.fromkeys(digest for row in drawn for digest in row))
    index = {digest: i for i, digest in enumerate(digests)}
    arrays = {
        "prompt_lengths": [len(p) for p in rollouts.prompts],
        "prompts": [t for p in rollouts.prompts for t in p],
        "lengths": [[len(row) for row in group] for group in rollouts.tokens],
        "tokens": [t for row in rows for t in row],
        "logprobs": [x for row in logprobs for x in row],
        "revision": [index[digest] for row in drawn for digest in row],
        "rewards": rollouts.rewards,
    }
    packed = {name: np.ascontiguousarray(values, _DTYPES[name]) for name, values in arrays.items()}
    batch = {"policy": rollouts.policy, "step": rollouts.step, "revisions": digests}
    text = json.dumps({"format": FORMAT} | batch, sort_keys=True)
    return safetensors.numpy.save(packed, {"rollouts": text})


def unpack_rollouts(data: Buffer) -> Rollouts:
    """Reads the bytes of ``pack_rollouts``; raises ``UserError`` for others."""
    raw = as_bytes(data).tobytes()
    try:
        arrays = safetensors.numpy.load(raw)
        size = header_size(raw, len(raw), len(raw), "its header")
        metadata = parse_object(raw[8 : 8 + size], "its header")["__metadata__"]
        batch = parse_object(metadata["rollouts"], "its description")
        if batch["format"] != FORMAT:
            raise ValueError(f"format {str(batch['format'])[:40]!r}, expected {FORMAT!r}")
        lengths = arrays["lengths"]
        wrong = any(arrays[name].dtype != dtype for name, dtype in _DTYPES.items())
        if wrong or (lengths < 0).any():
            raise ValueError("dtypes or lengths are wrong")
        flat = lengths.reshape(-1).tolist()
        ends = np.cumsum(flat, dtype=np.int64).tolist()
        total = ends[-1] if ends else 0
        if {arrays[name].size for name in ("tokens", "logprobs", "revision")} != {total}:
            raise ValueError("lengths do not add up to the tokens")

        def rows(values: list) -> list[list[list]]:
            cut = [values[end - n : end] for end, n in zip(ends, flat)]
            count = lengths.shape[1]
            return [cut[q * count : (q + 1) * count] for q in range(lengths.shape[0])]

        prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
        return Rollouts(
            batch["policy"],
            batch["step"],
            [prompt.tolist() for prompt in prompts],
            rows(arrays["tokens"].tolist()),
            rows(arrays["logprobs"].tolist()),
            rows([batch["revisions"][i] for i in arrays["revision"].tolist()]),
            arrays["rewards"],
        )
    except (safetensors.SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"not a rollout object ({str(error)[:100]}): read one that Catalog.rollouts lists"
        ) from None
