"""schemathesis over a server: it reads ``/openapi.json``, makes requests by it, right ones and
wrong ones, and checks the answers by it.

Twice: wrong requests by the document as it is; right ones by a copy that names the base as the only
model, and draws few tokens.
"""

import copy
import json
import re
import urllib.request
from typing import Any

from foreign import Foreign
from run import need

MOST = 3
# A request that fits the schema may still be refused, for a token outside the vocabulary or an
# invalid regular expression. Requests that do not fit must be refused.
LONG = "/retrieve_futures?$"  # a request that waits for as long as nothing happens
OPTIONS = f"""--max-examples 12 --seed 1 --request-timeout 120 --exclude-path-regex {LONG}
--exclude-checks positive_data_acceptance --phases examples,coverage,fuzzing
--continue-on-failure --no-color --suppress-health-check all"""


def check(client: Foreign) -> str:
    """No answer is a 5xx or one that the document does not have, and no wrong request is taken."""
    with urllib.request.urlopen(f"{client.url}/openapi.json") as answer:
        document = json.load(answer)
    told = []
    for mode, shown in (("negative", document), ("positive", narrowed(document, client.base))):
        path = client.folder / f"{mode}.json"
        path.write_text(json.dumps(shown))
        asked = ("--url", client.url, "--mode", mode, *OPTIONS.split())
        out = client.call("schemathesis.cli", "run", path, *asked)
        counted = re.search(r"(\d+) generated", out)
        need(counted is not None, f"schemathesis made no requests: {out[-300:]}")
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


def narrowed(document: dict[str, Any], base: str) -> dict[str, Any]:
    """The document, whose completions are of the base and short."""
    out = copy.deepcopy(document)
    for name in ("CompletionBody", "ChatBody"):
        body = out["components"]["schemas"][name]
        body["properties"]["model"] = {"const": base}
        for field in ("max_tokens", "max_completion_tokens", "n"):
            if field in body["properties"]:
                body["properties"][field] = {"type": "integer", "minimum": 1, "maximum": MOST}
        body["required"].append("max_tokens")
    return out
