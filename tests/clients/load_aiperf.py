"""aiperf over a server: chats, streamed, by several users at once."""

import json
import shutil

from foreign import Foreign
from run import need

USERS, REQUESTS = 4, 24
NAME = "mint/base"  # by which it finds the tokenizer: offline it reads a hub's cache, and no folder


def check(client: Foreign) -> str:
    """Every request is answered, and none with an error."""
    _cache(client)
    asked = [
        "--model",
        client.base,
        "--tokenizer",
        NAME,
        "--url",
        client.url,
        "--endpoint-type",
        "chat",
        "--streaming",
    ]
    asked += [
        "--concurrency",
        USERS,
        "--request-count",
        REQUESTS,
        "--isl",
        48,
        "--osl",
        12,
        "--random-seed",
        1,
    ]
    asked += ["--extra-inputs", "ignore_eos:true", "--workers-max", 2]
    asked += [
        "--output-artifact-dir",
        client.folder / "out",
        "--ui",
        "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]
    client.call("aiperf", "profile", *asked)
    [path] = (client.folder / "out").rglob("profile_export_aiperf.json")
    told = json.loads(path.read_text())
    errors = told.get("error_summary") or []
    need(
        told["request_count"]["avg"] == REQUESTS and not errors,
        f"{told['request_count']} requests were answered; errors {errors}",
    )
    first, rate = told["time_to_first_token"], told["output_token_throughput"]
    measured = (
        f"first token after {first['p50']:.0f} {first['unit']} (median), {rate['avg']:.0f}"
        f" {rate['unit']}"
    )
    return f"{REQUESTS} chats of {USERS} users, no error; {measured}"


def _cache(client: Foreign) -> None:
    """Puts the tokenizer where a hub's cache has it."""
    commit, repository = "0" * 40, client.folder / "hf/hub" / f"models--{NAME.replace('/', '--')}"
    for folder in ("refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(client.tokenizer / name, repository / "snapshots" / commit)
