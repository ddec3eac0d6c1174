"""lm-eval's ``local-completions`` over a server: choices, rolling and generating tasks of our own,
compared with our own scores.

The harness sends token ids with ``echo`` and ``logprobs`` for the first two, and ids with stop
strings for the third.
"""

import json
from pathlib import Path
from typing import Any

from foreign import Foreign
from run import need

import mint_jax as mint
from mint_jax.rollout.score import Scorer

CLOSE = 2e-3  # of a sum of log-probabilities: float32, in batches of other shapes
CHOICES = [
    {"question": question, "choices": choices, "label": 0}
    for question, choices in (
        ("The capital of France is", ["Paris", "a long way from the sea", "42"]),
        ("Two and two make", ["four", "five", "日本"]),
        ("Snow is\n\nusually", ["white", "black", "of another colour than milk"]),
    )
]
TEXTS = [{"text": "A stone in the river does not move."}, {"text": "one two three four five six"}]
PROMPTS = [{"prompt": one} for one in ("The river", "Once upon a time there was", "def main():")]
STOPS, TOKENS = ["\n\n", "the", "."], 12
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "mint_choice": (
        CHOICES,
        {"output_type": "multiple_choice", "doc_to_text": "{{question}}"}
        | {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
        | {"metric_list": [{"metric": "acc"}]},
    ),
    "mint_rolling": (
        TEXTS,
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": [{"metric": "word_perplexity"}]},
    ),
    "mint_generate": (
        PROMPTS,
        {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": ""}
        | {"metric_list": [{"metric": "exact_match"}]}
        | {"generation_kwargs": {"until": STOPS, "max_gen_toks": TOKENS, "do_sample": False}},
    ),
}


def check(client: Foreign) -> str:
    """What the harness finds is what our own model says."""
    _run(client)
    found = {name: _samples(client.folder, name) for name in TASKS}
    model = mint.load(client.base)
    encode = model.base.need_tokenizer().encode
    pairs = [
        (argument["arg_0"], argument["arg_1"], response)
        for argument, response in found["mint_choice"]
    ]
    need(
        len(pairs) == sum(len(row["choices"]) for row in CHOICES),
        f"{len(pairs)} choices were scored",
    )
    rolled = [("", argument["arg_0"], response) for argument, response in found["mint_rolling"]]
    need(len(rolled) == len(TEXTS), f"{len(rolled)} texts were scored")
    # the harness puts it before a text
    [begin] = encode(
        json.loads((client.tokenizer / "tokenizer_config.json").read_text())["bos_token"]
    )
    sequences = [encode(context + more) for context, more, _ in pairs] + [
        [begin, *encode(text)] for _, text, _ in rolled
    ]
    starts = [len(encode(context)) for context, _, _ in pairs] + [1] * len(rolled)
    apart = 0.0
    for (context, more, told), scores, start in zip(
        pairs + rolled, Scorer(model.base).logprobs(sequences), starts, strict=True
    ):
        value, wanted = (
            float(told[0] if isinstance(told, list) else told),
            float(scores[start - 1 :].sum()),
        )
        need(
            abs(value - wanted) < CLOSE,
            f"{context!r} + {more!r} scores {value}, and our own score is {wanted}",
        )
        apart = max(apart, abs(value - wanted))
    generated = {argument["arg_0"]: response for argument, response in found["mint_generate"]}
    texts = model.completions(
        [row["prompt"] for row in PROMPTS], max_tokens=TOKENS, stop=tuple(STOPS)
    )
    own = {row["prompt"]: done[0].text for row, done in zip(PROMPTS, texts, strict=True)}
    need(generated == own, f"generated {generated}, and our own are {own}")
    return (
        f"{len(pairs)} choices and {len(rolled)} texts score as ours do, at most {apart:.1e} apart;"
        f" {len(own)} texts are ours"
    )


def _run(client: Foreign) -> None:
    """Writes the tasks and calls the harness."""
    folder = client.folder
    for name, (rows, task) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source: dict[str, Any] = {"task": name, "dataset_path": "json", "test_split": "test"}
        source["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / f"{name}.yaml").write_text(json.dumps(source | task))  # JSON is YAML
    given = f"model={client.base},base_url={client.url}/v1/completions"
    given += f",tokenizer={client.tokenizer},num_concurrent=2,max_retries=1,max_length=512"
    more = ("--model_args", given, "--tasks", ",".join(TASKS), "--include_path", folder)
    more += ("--output_path", folder / "out", "--log_samples")
    client.call("lm_eval", "run", "--model", "local-completions", *more)


def _samples(folder: Path, name: str) -> list[tuple[dict[str, str], Any]]:
    """(arguments, response) of each request of a task."""
    [path] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    out = []
    for row in map(json.loads, path.read_text().splitlines()):
        out += [
            (row["arguments"][f"gen_args_{i}"], response[0])
            for i, response in enumerate(row["resps"])
        ]
    return out
