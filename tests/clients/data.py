"""Datasets and a tokenizer folder where the cookbook's recipes look for them, so that they run
without a network.

`datasets` and `transformers` read a folder below the current one before they ask a hub: the recipes
run in the folder that ``make`` fills.
"""

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# what the base is called: the cookbook chooses a renderer by it, this one's is ChatML as SmolLM2's
NAME = "Qwen/Qwen3-4B-Instruct-2507"
BOXED = "boxed.jsonl"
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
THINGS = ("apple", "house", "river", "stone", "garden", "window", "letter", "candle")
MAIN = (
    "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n  -"
    " split: test\n    path: test.jsonl\n"
)


def make(folder: Path, base: Path, seed: int = 0) -> None:
    """Fills a folder.

    Args:
        base: checkpoint directory whose tokenizer the clients load.
    """
    rng = random.Random(seed)
    tokenizer = folder / NAME
    tokenizer.mkdir(parents=True)
    for file in base.glob("tokenizer*.json"):
        shutil.copy(file, tokenizer)
    _write(folder / BOXED, [_boxed(rng) for _ in range(512)])
    chats, sums, pairs = (
        folder / "HuggingFaceH4/no_robots",
        folder / "openai/gsm8k",
        folder / "Anthropic/hh-rlhf",
    )
    for split, count in ("train", 256), ("test", 16):
        _write(chats / f"{split}.jsonl", [_chat(rng) for _ in range(count)])
        _write(sums / f"{split}.jsonl", [_sum(rng) for _ in range(count)])
        _write(pairs / f"{split}.jsonl", [_pair(rng) for _ in range(count)])
    (sums / "README.md").write_text(f"---\n{MAIN}---\n")


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chat(rng: random.Random) -> dict[str, Any]:
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    ask = {"role": "user", "content": f"Which colour has the {colour} {thing}?"}
    return {"messages": [ask, {"role": "assistant", "content": f"The {thing} is {colour}."}]}


def _sum(rng: random.Random) -> dict[str, str]:
    x, y = rng.randint(1, 2), rng.randint(1, 2)
    return {
        "question": f"Anna has {x} stones and finds {y}. How many are there?",
        "answer": f"There are {x} + {y} stones.\n#### {x + y}",
    }


def _boxed(rng: random.Random) -> dict[str, Any]:
    """A question of ``_sum`` in the form that rl_loop rewards, behind another turn as there; its
    answer is drawn.
    """
    ask = {
        "role": "user",
        "content": (
            f"{_sum(rng)['question']} Provide a numerical answer without units, written inside"
            " \\boxed{}."
        ),
    }
    return {
        "messages": [
            *_chat(rng)["messages"],
            ask,
            {"role": "assistant", "content": f"\\boxed{{{rng.randint(2, 4)}}}"},
        ]
    }


def _pair(rng: random.Random) -> dict[str, str]:
    ask = f"\n\nHuman: Tell me of the {rng.choice(COLOURS)} {rng.choice(THINGS)}.\n\nAssistant:"
    return {"chosen": f"{ask} Gladly: it is fine.", "rejected": f"{ask} No, go away from here."}
