"""Live table of a server: ``python -m mint_jax.top --url=http://127.0.0.1:8000 [--key=KEY]``.

Reads ``/debug/state`` and ``/metrics``, which require a key of scope ``admin`` if the server has
keys. Tokens per second and device shares are between two polls, costs are totals.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 10.0
# column -> field of a policy
NAMES = {"policy": "policy", "tenant": "tenant", "train": "training", "serve": "serving"}
NUMBERS = ("queue", "sample", "tok/s", "share", "dev s")


class ServerUnreachable(Exception):
    """The server does not answer, or its answer is not understood."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Answer of ``/debug/state``, and answered requests since the start, from ``/metrics``."""

    state: dict[str, Any]
    requests: float

    @classmethod
    def at(cls, url: str, key: str | None) -> "Look":
        """Polls a server. Raises ``ServerUnreachable``."""
        state = json.loads(_read(f"{url}/debug/state", key))
        families = text_string_to_metric_families(_read(f"{url}/metrics", key).decode())
        samples = (sample for family in families for sample in family.samples)
        return cls(state, sum(s.value for s in samples if s.name == "mint_http_requests_total"))

    def since(self, before: "Look") -> float:
        """Returns the seconds since ``before``; 0 if the server restarted in between."""
        restarted = self.state["up_s"] < before.state["up_s"]
        return 0.0 if restarted else max(0.0, self.state["at"] - before.state["at"])


def _read(url: str, key: str | None) -> bytes:
    request = urllib.request.Request(url, headers={} if key is None else {"x-api-key": key})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        why = "is this a server of mint_jax?"
        if error.code in (401, 403):
            why = "give it a key of scope admin by --key"
        raise ServerUnreachable(f"{url} answers {error.code}: {why}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerUnreachable(f"{url} does not answer ({reason}): check --url") from error


def table_of(now: Look, before: Look) -> RenderableType:
    """Returns the table of two polls."""
    minutes, seconds = divmod(int(now.state["up_s"]), 60)
    hours, rest = divmod(minutes, 60)
    up = f"{hours} h {rest} min" if hours else f"{minutes} min {seconds} s"
    title = Text(f"{now.state['base']}, up {up}")
    return Group(Panel(_summary(now, before), title=title), _policies(now, before))


def _summary(now: Look, before: Look) -> RenderableType:
    state, passed = now.state, now.since(before)
    engine, residency, training = state["engine"], state["residency"], state["training"]
    busy = _rate(state["measured_s"] - before.state["measured_s"], passed, "{:.0%}")
    asked = _rate(now.requests - before.requests, passed, "{:.1f}")
    rows, pages = engine["rows"], engine["pages"]
    used = f"{pages['count'] - pages['available']}/{pages['count']}"
    loading = residency["loads"]["unfinished"]
    places = [f"{n} in {where}" for where, n in sorted(training["policies"].items())]
    slots = f"no policies; {sum(training['slots'].values())} slots"
    memory = [state["memory"]["rss"], *(n for n in state["memory"]["devices"] if n is not None)]
    flights = [f"{tenant} {count}" for tenant, count in sorted(state["tokens_in_flight"].items())]
    lines = {
        "state": f"{state['trouble'] or 'ready'}, devices {busy} busy, {asked} requests/s",
        "sampling": (
            f"rows {rows['running']}/{rows['most']}, {rows['waiting'] + rows['swapped']} waiting;"
            f" pages {used}, {pages['cached']} cached"
        ),
        "training": f"{training['waiting']} requests; policies: {', '.join(places) or slots}",
        "adapters": f"{len(residency['resident'])} in slots, {loading} being loaded",
        "memory": "host " + ", ".join(f"{count / 2**30:.2f} GiB" for count in memory),
        "tokens in flight": ", ".join(flights) or "none",
    }
    grid = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        grid.add_row(Text(name, "bold"), Text(line))
    return grid


def _policies(now: Look, before: Look) -> Table:
    passed, were = now.since(before), {one["policy"]: one for one in before.state["policies"]}
    measured = now.state["measured_s"] - before.state["measured_s"]
    left_out = now.state["policies_left_out"]
    table = Table(box=None, caption=f"and {left_out} more" if left_out else None)
    table.add_column("policy", overflow="fold", min_width=14)
    for column in (*list(NAMES)[1:], *NUMBERS):
        justify = "right" if column in NUMBERS else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=True)
    for one in now.state["policies"]:
        was = were.get(one["policy"], one)
        table.add_row(
            # names are clients': no markup, and no emoji of ":train:"
            *(Text(one[name] or "-") for name in NAMES.values()),
            str(one["queued"]),
            str(one["sampling"]),
            _rate(one["tokens"] - was["tokens"], passed, "{:.0f}"),
            _rate(one["seconds"] - was["seconds"], measured if passed else 0.0, "{:.0%}"),
            f"{one['seconds']:.2f}",
        )
    return table


def _rate(change: float, by: float, form: str) -> str:
    return form.format(change / by) if by > 0 else "-"


def follow(
    url: str,
    key: str | None,
    interval_s: float,
    console: Console,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Shows the table until Ctrl-C or ``ended``."""
    before: Look | None = None
    live = Live(console=console, auto_refresh=False)
    with live, contextlib.suppress(KeyboardInterrupt):
        while not ended():
            try:
                now = Look.at(url, key)
                live.update(table_of(now, before or now), refresh=True)
                before = now
            except ServerUnreachable as gone:
                live.update(Panel(Text(f"{gone}; waiting for it")), refresh=True)
                before = None
            time.sleep(interval_s)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Runs the command. Returns the exit status: 1 if ``--once`` finds no server."""
    parser = argparse.ArgumentParser(
        "python -m mint_jax.top",
        description="Shows a live table of a server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--key", help="API key of scope admin; none if the server has no keys")
    add("--interval", type=float, default=2.0, help="seconds between two polls")
    add("--once", action="store_true", help="poll twice, print one table and end")
    given = parser.parse_args(arguments)
    console, url = console or Console(), given.url.rstrip("/")
    if not 0 < given.interval <= 3600 or not url.startswith(("http://", "https://")):
        found = f"url is {given.url!r} and interval {given.interval}"
        print(f"{found}; expected http://HOST:PORT and seconds up to 3600", file=sys.stderr)
        return 2
    if not given.once:
        follow(url, given.key, given.interval, console)
        return 0
    try:
        before = Look.at(url, given.key)
        time.sleep(given.interval)
        console.print(table_of(Look.at(url, given.key), before))
    except ServerUnreachable as gone:
        print(gone, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
