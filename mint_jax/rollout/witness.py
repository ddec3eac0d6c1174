"""Witnesses: what an auditor needs to draw a completion's tokens again, see ``mint_jax.audit``."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mint_jax import fields
from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion, Request

BASE = "base"  # the revision of the bare base
# fields of ``Request`` that decide the distribution of a draw
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SAMPLING += ("frequency_penalty", "presence_penalty", "logit_bias")
GRAMMARS = ("json_schema", "regex", "choice")  # what a witness cannot carry


@dataclasses.dataclass(frozen=True)
class Witness:
    """A claim that a revision drew these tokens.

    Attributes:
        revision: digest, or ``BASE``.
        base: fingerprint of the base.
        prompt_token_ids, token_ids: ids; the latter with the token that ended the completion.
        seed, sample: seed of the request, and number of the completion among its samples.
        logprobs: float32 per token, under the unmodified model.
        sampling: ``SAMPLING`` of the request.
    """

    revision: str
    base: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    seed: int
    sample: int
    logprobs: Sequence[float]
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, request: Request, sample: int, done: Completion, base: str) -> "Witness":
        """Returns the witness of a request's sample; ``base``: fingerprint."""
        sampling = {name: getattr(request, name) for name in SAMPLING}
        drawn = list(request.prompt), done.tokens, request.seed, sample, done.logprobs
        return cls(done.revision or BASE, base, *drawn, sampling)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, row: Any, where: str) -> "Witness":
        """Returns the witness of a JSON object. Raises ``UserError``, which names ``where``."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(row, dict) or (missing := [n for n in known if n not in row]):
            lacks = "is no object" if not isinstance(row, dict) else f"has no {missing[0]}"
            raise UserError(f"{where}: a witness {lacks}; expected {', '.join(known)}")
        if strange := [name for name in row if name not in known]:
            raise fields.unknown(f"{where}: a witness has no", strange[0], known)
        made = cls(**row)
        numbers = len(made.token_ids), len(made.logprobs)
        if not numbers[0] == numbers[1] > 0 or not made.prompt_token_ids:
            raise UserError(
                f"{where}: a witness has {numbers[0]} tokens, {numbers[1]} log-probabilities and a"
                f" prompt of {len(made.prompt_token_ids)}; expected as many of both, at least one,"
                " and a prompt"
            )
        if not all(map(math.isfinite, made.logprobs)) or set(made.sampling) != set(SAMPLING):
            raise UserError(
                f"{where}: a witness has log-probabilities that are not finite, or sampling without"
                f" {', '.join(SAMPLING)}: take it from an answer as it is"
            )
        return made
