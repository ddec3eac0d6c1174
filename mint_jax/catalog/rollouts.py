"""The rollout object: what one policy sampled in one step, and which revision drew each token.

A safetensors file without padding: prompts, tokens, log-probabilities and rewards end to end,
lengths beside them, and per token the index of its revision in a list of digests.
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
        policy, step: whose batch it was, and how many updates the policy had behind it.
        prompts: token ids of each prompt.
        tokens, logprobs: ``[Q][G]`` lists, of the sampled tokens, under the revision that drew
            them.
        revisions: ``[Q][G]`` digests, one a token.
        rewards: ``[Q, G]``.
    """

    policy: str
    step: int
    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[Sequence[int]]]
    logprobs: Sequence[Sequence[Sequence[float]]]
    revisions: Sequence[Sequence[Sequence[str]]]
    rewards: np.ndarray


def pack_rollouts(rollouts: Rollouts) -> bytes:
    """The object's bytes, the same for the same rollouts.

    Raises:
        ValueError: a token without a log-probability or a revision.
    """
    rows = [row for group in rollouts.tokens for row in group]
    logprobs = [row for group in rollouts.logprobs for row in group]
    drawn = [row for group in rollouts.revisions for row in group]
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
    about = {
        "format": FORMAT,
        "policy": rollouts.policy,
        "step": rollouts.step,
        "revisions": digests,
    }
    packed = {name: np.ascontiguousarray(values, _DTYPES[name]) for name, values in arrays.items()}
    return safetensors.numpy.save(packed, {"rollouts": json.dumps(about, sort_keys=True)})


def unpack_rollouts(data: Buffer) -> Rollouts:
    """Reads ``pack_rollouts``'s bytes.

    Raises:
        UserError: they are something else, or of another version.
    """
    raw = as_bytes(data).tobytes()
    try:
        arrays = safetensors.numpy.load(raw)
        size = header_size(raw, len(raw), len(raw), "its header")
        about = parse_object(
            parse_object(raw[8 : 8 + size], "its header")["__metadata__"]["rollouts"],
            "its description",
        )
        if about["format"] != FORMAT:
            raise UserError(
                f"rollouts of format {str(about['format'])[:40]!r}; this version reads {FORMAT!r}"
            )
        lengths = arrays["lengths"]
        ends = np.cumsum(lengths.reshape(-1), dtype=np.int64).tolist()
        if (
            any(arrays[name].dtype != dtype for name, dtype in _DTYPES.items())
            or (lengths < 0).any()
        ):
            raise ValueError("dtypes or lengths are wrong")
        if not {arrays[n].size for n in ("tokens", "logprobs", "revision")} == {
            ends[-1] if ends else 0
        }:
            raise ValueError("lengths do not add up to the tokens")

        def rows(values: list) -> list[list[list]]:
            cut = [values[end - n : end] for end, n in zip(ends, lengths.reshape(-1).tolist())]
            return [
                cut[q * lengths.shape[1] : (q + 1) * lengths.shape[1]]
                for q in range(lengths.shape[0])
            ]

        prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
        return Rollouts(
            about["policy"],
            about["step"],
            [p.tolist() for p in prompts],
            rows(arrays["tokens"].tolist()),
            rows(arrays["logprobs"].tolist()),
            rows([about["revisions"][i] for i in arrays["revision"].tolist()]),
            arrays["rewards"],
        )
    except UserError:
        raise
    except (safetensors.SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"not a rollout object ({str(error)[:100]}): read one that Catalog.rollouts lists"
        ) from None
