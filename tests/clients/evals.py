"""A third-party evaluation harness and fuzzer against a server of ours over
loopback: ``make test-evals``.

Each is in an environment of its own, with the versions of ``constraints/evals-NAME-py311.txt``. One
line tells of each what held, the last line is a JSON object of all; the exit code is 1 where one
failed.
"""

import argparse
import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import mint_jax as mint
from benchmarks.service_client import Served
from mint_jax.models.base import resolve
from mint_jax.rollout.score import Scorer
from tests.clients import runner
from tests.clients.runner import ROOT, Failed, need

BASE = "tiny-random"
CALL_S = 1200.0


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A client and its server.

    Attributes:
        python: the interpreter of the client's environment.
        url: the server's.
        folder: empty, for what the client reads and writes.
    """

    python: Path
    url: str
    folder: Path

    def call(self, *command: object) -> str:
        """Runs a module of the client to its end; returns its output, which the folder keeps."""
        log = self.folder / f"{time.monotonic_ns()}.log"
        return runner.whole([self.python, "-m", *command], self.folder, log, limit_s=CALL_S)


# -- lm-eval's ``local-completions``: choices, rolling and generating tasks of our own. The harness
# sends token ids with ``echo`` and ``logprobs`` for the first two, and stop strings for the third.

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


def lm_eval(client: Foreign) -> str:
    """What the harness finds is what our own model says."""
    _run_tasks(client)
    found = {name: _samples(client.folder, name) for name in TASKS}
    model = mint.load(BASE)
    encode = model.base.need_tokenizer().encode
    pairs = [(one["arg_0"], one["arg_1"], response) for one, response in found["mint_choice"]]
    need(len(pairs) == sum(len(row["choices"]) for row in CHOICES), f"{len(pairs)} choices")
    rolled = [("", argument["arg_0"], response) for argument, response in found["mint_rolling"]]
    need(len(rolled) == len(TEXTS), f"{len(rolled)} texts were scored")
    # the harness puts it before a text
    config = json.loads((resolve(BASE) / "tokenizer_config.json").read_text())
    [begin] = encode(config["bos_token"])
    sequences = [encode(context + more) for context, more, _ in pairs] + [
        [begin, *encode(text)] for _, text, _ in rolled
    ]
    starts = [len(encode(context)) for context, _, _ in pairs] + [1] * len(rolled)
    apart = 0.0
    for (context, more, told), scores, start in zip(
        pairs + rolled, Scorer(model.base).logprobs(sequences), starts, strict=True
    ):
        value = float(told[0] if isinstance(told, list) else told)
        wanted = float(scores[start - 1 :].sum())
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


def _run_tasks(client: Foreign) -> None:
    """Writes the tasks and calls the harness."""
    folder = client.folder
    for name, (rows, task) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source: dict[str, Any] = {"task": name, "dataset_path": "json", "test_split": "test"}
        source["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / f"{name}.yaml").write_text(json.dumps(source | task))  # JSON is YAML
    given = f"model={BASE},base_url={client.url}/v1/completions"
    given += f",tokenizer={resolve(BASE)},num_concurrent=2,max_retries=1,max_length=512"
    more = ("--model_args", given, "--tasks", ",".join(TASKS), "--include_path", folder)
    more += ("--output_path", folder / "out", "--log_samples")
    client.call("lm_eval", "run", "--model", "local-completions", *more)


def _samples(folder: Path, name: str) -> list[tuple[dict[str, str], Any]]:
    """(arguments, response) of each request of a task."""
    [path] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    return [
        (row["arguments"][f"gen_args_{i}"], response[0])
        for row in map(json.loads, path.read_text().splitlines())
        for i, response in enumerate(row["resps"])
    ]


# -- schemathesis makes requests by ``/openapi.json``: wrong ones by the document as it is, right
# ones by a copy that names the base as the only model, and draws few tokens.

MOST = 3
# A request that fits the schema may still be refused, for a token outside the vocabulary or an
# invalid regular expression. Requests that do not fit must be refused.
LONG = "/retrieve_futures?$"  # a request that waits for as long as nothing happens
OPTIONS = f"""--max-examples 12 --seed 1 --request-timeout 120 --exclude-path-regex {LONG}
--exclude-checks positive_data_acceptance --phases examples,coverage,fuzzing
--continue-on-failure --no-color --suppress-health-check all"""


def schemathesis(client: Foreign) -> str:
    """No answer is a 5xx or one that the document does not have, and no wrong request is taken."""
    with urllib.request.urlopen(f"{client.url}/openapi.json") as answer:
        document = json.load(answer)
    told = []
    for mode, shown in (("negative", document), ("positive", narrowed(document))):
        path = client.folder / f"{mode}.json"
        path.write_text(json.dumps(shown))
        asked = ("--url", client.url, "--mode", mode, *OPTIONS.split())
        out = client.call("schemathesis.cli", "run", path, *asked)
        counted = re.search(r"(\d+) generated", out)
        if counted is None:
            raise Failed(f"schemathesis made no requests: {out[-300:]}")
        told.append(f"{counted[1]} {mode} requests")
    for path in ("/v1/completions", "/v1/chat/completions"):
        need(
            answered(client.url, path) > 0,
            f"no request of {path} was answered with 200: the document asks for what is refused",
        )
    return f"{', '.join(told)}: no 5xx, and no answer that the document does not have"


def answered(url: str, path: str) -> float:
    """How many POST requests of a path had an answer of status 200, by the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(f'mint_http_requests_total{{route="POST {path}",status="200"}}')
    )


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, whose completions are of the base and short."""
    out = copy.deepcopy(document)
    for name in ("CompletionBody", "ChatBody"):
        body = out["components"]["schemas"][name]
        body["properties"]["model"] = {"const": BASE}
        for field in ("max_tokens", "max_completion_tokens", "n"):
            if field in body["properties"]:
                body["properties"][field] = {"type": "integer", "minimum": 1, "maximum": MOST}
        body["required"].append("max_tokens")
    return out


CHECKS = {"lm_eval": lm_eval, "schemathesis": schemathesis}


def interpreter(folder: Path, name: str) -> Path:
    """The Python of a client's environment, with the versions of its file."""
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    wanted = ROOT / "constraints" / f"evals-{name}-{version}.txt"
    if not wanted.exists():
        raise Failed(f"there is no {wanted.name}: run it with Python 3.11")
    return runner.interpreter(folder / name, ("-r", str(wanted)), wanted.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = "folder of the clients' environments"
    parser.add_argument("--environments", type=Path, required=True, help=text)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    asked = parser.parse_args()
    names = runner.chosen(parser, asked.clients, list(CHECKS))
    pythons = {name: interpreter(Path(os.path.abspath(asked.environments)), name) for name in names}
    workdir = asked.workdir.resolve()
    shutil.rmtree(workdir, ignore_errors=True)
    checks = {}
    server = Served("mint_jax.launch", "configs/serve.py:ci", workdir / "server", {"port": 0})
    try:
        url = server.ready()
        for name in names:
            (workdir / name).mkdir()
            client = Foreign(pythons[name], url, workdir / name)
            checks[name] = functools.partial(CHECKS[name], client)
        code = runner.report(checks)
        server.stop()
        return code
    finally:
        server.kill()


if __name__ == "__main__":
    sys.exit(main())
