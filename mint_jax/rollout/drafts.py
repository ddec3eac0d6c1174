"""Drafts of next tokens, which idle rows of a decode program verify: speculative decoding without a
second model.

The noise of a draw is a function of its seed and position. Row j of a sample reads draft j and
draws the token after it; its token counts if the rows before it drew exactly the drafts. Tokens and
log-probabilities are therefore those of decoding token by token with the same program, bit for bit.

A draft is what followed the same tokens before (n-gram speculation): in samples of the same prompt,
in sequences that the request gives, such as completions of an earlier revision, or in the prompt.
Tokens that a request says its samples begin with need no such guess.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from mint_jax.rollout.samples import CachedPrompt, Row, SampleState

# Numbers of last tokens that must agree with an earlier place, tried in this order.
CONTEXTS = (6, 3, 2)
Following = dict[tuple[int, ...], Counter[int]]  # next tokens by the tokens before them


class Draft(NamedTuple):
    """A token that may be drawn, and where it was seen: in samples of the same weights
    (``siblings``) or of others (``family``), in what the request gives, or in the prompt. The
    source is ``prefix`` if the request says that the sample begins with it.
    """

    token: int
    source: str


class _History:
    """Next tokens in one prompt and its samples, by the tokens before them."""

    def __init__(self, prompt: tuple[int, ...]):
        self.prompt, self.users = prompt, 0
        self.places: dict[Hashable, Following] = {}
        self.learn("prompt", (), 0)
        _count(self.places["prompt"], prompt, 1)

    def near(self, completion: Sequence[int], count: int) -> list[int]:
        """Returns the last ``count`` tokens, or fewer at the beginning of the prompt."""
        own = list(completion[-count:])
        return [*self.prompt[max(0, len(self.prompt) + len(own) - count) :], *own]

    def learn(self, place: Hashable, completion: Sequence[int], new: int) -> None:
        """Adds the last ``new`` tokens of a completion."""
        near = self.near(completion, new + CONTEXTS[0])
        _count(self.places.setdefault(place, {}), near, len(near) - new)

    def next(self, tokens: Sequence[int], order: Iterable[tuple[Hashable, str]]) -> Draft | None:
        """Returns the likeliest next token of the longest context, in this order of places."""
        for n in CONTEXTS:
            for place, source in order:
                if found := self.places.get(place, {}).get(tuple(tokens[-n:])):
                    return Draft(found.most_common(1)[0][0], source)
        return None


def _count(following: Following, tokens: Sequence[int], begin: int) -> None:
    for i in range(begin, len(tokens)):
        for n in CONTEXTS:
            if n <= i:
                following.setdefault(tuple(tokens[i - n : i]), Counter())[tokens[i]] += 1


def _known(sample: SampleState, most: int) -> list[Draft]:
    """Returns up to ``most`` next tokens that the request says the sample has."""
    own, prefixes = sample.own, sample.prompt.request.prefixes[sample.number :][:1]
    if not prefixes or len(prefixes[0]) <= own or prefixes[0][:own] != tuple(sample.tokens):
        return []
    return [Draft(token, "prefix") for token in prefixes[0][own : own + max(0, most)]]


class Drafts:
    """Drafts for the samples in progress, at most ``most`` guessed tokens at once for each; None:
    the base cannot forget a wrong draft, and nothing is verified.
    """

    def __init__(self, most: int | None):
        self.most = most
        # By tenant: a sample's speed would tell what another tenant's samples say.
        self._histories: dict[tuple[str, tuple[int, ...]], _History] = {}
        self._drafts: dict[SampleState, list[Draft]] = {}  # of the dispatch in progress

    def began(self, prompt: CachedPrompt) -> None:
        """Begins to learn from a request's samples."""
        if not self.most:
            return
        key = prompt.request.tenant, prompt.request.prompt
        if key not in self._histories:
            self._histories[key] = _History(prompt.request.prompt)
        self._histories[key].users += 1
        for completion in prompt.request.drafts:
            self._histories[key].learn("given", completion, len(completion))

    def ended(self, prompt: CachedPrompt) -> None:
        """Forgets a prompt's samples with its last request."""
        if not self.most:
            return
        key = prompt.request.tenant, prompt.request.prompt
        self._histories[key].users -= 1
        if not self._histories[key].users:
            del self._histories[key]

    def rows(self, running: Sequence[Row], most: int) -> list[Row]:
        """Returns rows that verify drafts of the running samples, while a part has fewer than
        ``most`` rows; none if only a few guesses are to be verified, since a dispatch with them is
        one step.
        """
        if self.most is None:
            return []
        known = {r.sample: _known(r.sample, r.goal - r.own - 1) for r in running}
        if not self.most and not any(known.values()):
            self._drafts = {}
            return []
        free = Counter(dict.fromkeys((row.sample.prompt.part for row in running), most))
        free.subtract(row.sample.prompt.part for row in running)
        self._drafts = {
            row.sample: known[row.sample] or self.propose(row.sample, row.goal - row.own - 1)
            for row in running
        }
        out = []
        for j in range(1, max(map(len, self._drafts.values()), default=0) + 1):
            for sample, *_ in running:
                drafts = tuple(draft.token for draft in self._drafts[sample][:j])
                if len(drafts) == j and free[sample.prompt.part] > 0:
                    free[sample.prompt.part] -= 1
                    out.append(Row(sample, sample.own + j + 1, drafts))
        if 2 * len(out) < len(running) and not any(known.values()):
            out = []
        verified = Counter(row.sample for row in out)
        self._drafts = {s: drafts[: verified[s]] for s, drafts in self._drafts.items()}
        return out

    def drew(self, sample: SampleState, new: int) -> Counter[str]:
        """Learns the last ``new`` tokens of a sample. Returns the number of its drafts and of those
        accepted, in all and by source.
        """
        if self.most:
            self._of(sample).learn(sample.prompt.key[1], sample.tokens, new)
        counts: Counter[str] = Counter()
        for i, draft in enumerate(drafts := self._drafts.pop(sample, [])):
            counts.update(("drafted_tokens", f"drafted_{draft.source}"))
            if i < new - 1:
                counts.update(("accepted_tokens", f"accepted_{draft.source}"))
        if drafts:
            accepted = new - 1
            sample.reach = 2 * accepted if accepted == len(drafts) else max(1, accepted)
        return counts

    def propose(self, sample: SampleState, most: int) -> list[Draft]:
        """Returns up to ``most`` guesses of the next tokens of a sample."""
        if not self.most:
            return []
        history, own = self._of(sample), sample.prompt.key[1]
        others = [place for place in history.places if place not in (own, "given", "prompt")]
        order = [(own, "siblings"), ("given", "given"), *((place, "family") for place in others)]
        order.append(("prompt", "prompt"))
        tokens, out = history.near(sample.tokens, CONTEXTS[0]), list[Draft]()
        while len(out) < min(most, self.most, sample.reach):
            if (draft := history.next(tokens, order)) is None:
                break
            out.append(draft)
            tokens.append(draft.token)
        return out

    def _of(self, sample: SampleState) -> _History:
        request = sample.prompt.request
        return self._histories[request.tenant, request.prompt]
