"""Random training groups and their packing; an environment whose rewards differ by completion."""

import json
import sys
from pathlib import Path

from mint_jax.train import blocks as blocks_lib
from mint_jax.train.batch import Group, TrainSequence, data_of
from mint_jax.train.losses import NO_LOSS

# Random text never earns a task's reward; this one moves every policy in every step. Rewards are
# scored in process 0 only, and some take longer than others.
ENVIRONMENT = """
import os, random, time
from mint_jax.envs.env import Example, ListConversation, ListEnvironment, StepResult


def score(completion, example):
    assert os.environ.get("MINT_PROCESS", "0") == "0"
    time.sleep(random.SystemRandom().random() / 50)
    return sum(map(ord, completion)) % 7 / 7

def make(vary=False, turns=1):
    prompts = [
        " ".join(str(i * 7919)[:3]) + " x" * (i * 5 % 11 if vary else 0) for i in range(100, 130)
    ]
    examples = [Example(prompt, "") for prompt in prompts]
    if turns == 1:
        return ListEnvironment(examples[2:], examples[:2], score)

    def answer(texts, example):  # conversations differ in length
        return StepResult(" no:", score(texts[-1], example), len(texts) > len(texts[0]) % turns)

    return ListConversation(examples[2:], examples[:2], answer)
"""


def random_groups(rng, vocab, prompts=2, lengths=(6, 4)) -> list[Group]:
    """Prompts of 4 tokens, each with a sampled sequence of each length."""

    def sequence(n):
        return TrainSequence(
            rng.integers(3, vocab, n).tolist(),
            [0.1] * n,
            rng.normal(size=n).tolist(),
            (-rng.exponential(size=n)).tolist(),
        )

    return [
        Group(rng.integers(3, vocab, 4).tolist(), [sequence(n) for n in lengths])
        for _ in range(prompts)
    ]


def write_environment(folder: Path, monkeypatch) -> None:
    """Makes ``varied:make`` importable in this process."""
    (folder / "varied.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "varied", raising=False)


def rows_of(workdir: Path) -> list[dict]:
    """Rows of ``metrics.jsonl``."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def pack(policies, book, context=None, row_multiple=1):
    """Each policy's groups in one block, as a trainer packs them: a batch and spans of datums."""
    works = [
        blocks_lib.TrainRequest(str(i), data_of(groups, context), NO_LOSS)
        for i, groups in enumerate(policies)
    ]
    [blocks] = blocks_lib.passes(works, 1 << 40)
    return blocks_lib.fill(blocks, *blocks_lib.fit(blocks, book, row_multiple))
