"""The peer of the catalog: MLflow's model registry in its SQLite store, beside ours on the same
disk, in the same run.

Both sides register a revision, resolve ``policy@alias`` and move an alias. Ours stores the
adapter's bytes too, durably, and writes an audit log; MLflow notes a source URL. Each side is
filled to the same number of entries, MLflow one by one (it has no other way), ours in bulk; then
blocks of single calls take turns.

This file is also the program that runs where MLflow is installed, which may be another environment:
it then needs nothing but the standard library and MLflow. It reads commands, a JSON array a line,
and answers each with seconds.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

CALLS = ("register", "resolve", "move")


class _Registry:
    """MLflow's side. Version ``n`` of model ``policy-k``."""

    def __init__(self, folder: str):
        from mlflow import MlflowClient

        url = f"sqlite:///{folder}/mlflow.db"
        self._client = MlflowClient(tracking_uri=url, registry_uri=url)

    def create(self, name: str) -> None:
        self._client.create_registered_model(name)

    def register(self, name: str, number: int) -> None:
        made = self._client.create_model_version(name, source=f"/adapters/{name}/{number}")
        assert int(made.version) == number

    def resolve(self, name: str, alias: str, number: int) -> None:
        assert int(self._client.get_model_version_by_alias(name, alias).version) == number

    def move(self, name: str, alias: str, number: int) -> None:
        self._client.set_registered_model_alias(name, alias, str(number))


def serve(folder: str) -> None:
    """Answers commands ``[call, arguments of each call ...]`` with ``[seconds of each call ...]``
    until stdin ends.
    """
    import mlflow

    registry = _Registry(folder)
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps({"version": mlflow.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        seconds = []
        for values in arguments:
            began = time.perf_counter()
            getattr(registry, call)(*values)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), file=answers, flush=True)


def missing(python: str) -> str | None:
    """Why there is no peer, or None."""
    if not python:
        return (
            None
            if importlib.util.find_spec("mlflow")
            else "mlflow is not installed here: pip install mlflow-skinny"
        )
    return None if Path(python).is_file() else f"{python} does not exist"


def compare(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fills both, measures both; ``{"mlflow": None, "mlflow_missing": reason}`` where there is no
    peer.

    Args:
        config: ``python`` that has MLflow, "" for this one; ``entries`` to fill; ``seconds`` that
            filling MLflow may take; ``samples`` of each call; ``per_policy`` revisions.
    """
    if reason := missing(config["python"]):
        return {"mlflow": None, "mlflow_missing": reason}
    from benchmarks.elsewhere import Elsewhere

    try:
        peer = Elsewhere(
            config["python"] or sys.executable, __file__, str(folder), folder / "mlflow.log"
        )
    except RuntimeError as error:
        return {"mlflow": None, "mlflow_missing": str(error)}
    try:
        return {"mlflow": _compare(config, peer, folder)}
    finally:
        peer.close()


def _compare(config: dict[str, Any], peer: Any, folder: Path) -> dict[str, Any]:
    import numpy as np

    from benchmarks import timing
    from benchmarks.catalog_fill import Payloads, Plan, fill
    from mint_jax.catalog.lifecycle import Catalog
    from mint_jax.metrics import Progress

    per_policy, samples = config["per_policy"], config["samples"]
    entries, began, progress = 0, time.monotonic(), Progress("MLflow's registry", config["entries"])
    while entries < config["entries"] and time.monotonic() - began < config["seconds"]:
        name = f"policy-{entries // per_policy:07d}"
        peer.ask(["create", [name]])
        peer.ask(["register", *([name, number + 1] for number in range(per_policy))])
        peer.ask(["move", [name, "serving", 1]])
        entries += per_policy
        progress.update(entries)
    fill_s = time.monotonic() - began
    place = folder / "ours"
    place.mkdir()
    plan = Plan(entries, per_policy, 1000, 0)
    ours_fill = fill(place, plan)
    objects = Payloads(1).batch(0, samples)
    times: dict[str, dict[str, list[float]]] = {
        side: {call: [] for call in CALLS} for side in ("mlflow", "ours")
    }
    # of the policies used here: newest revision, the one that serves
    numbers: dict[str, list[int]] = {}
    rng = np.random.default_rng(0)

    def timed(call: str, function: Any, *arguments: Any) -> None:
        start = time.perf_counter()
        function(*arguments)
        times["ours"][call].append(time.perf_counter() - start)

    with Catalog.open(place) as catalog:
        for k in rng.integers(0, plan.policies, samples).tolist():
            numbers.setdefault(plan.policy(k), [per_policy, 1])
        for name in numbers:
            catalog.promote(name, 1, "serving")
        names = sorted(numbers)
        block = max(1, samples // 10)
        progress = Progress("registries in turn", samples)
        for start in range(0, samples, block):
            chosen = [names[i] for i in rng.integers(0, len(names), min(block, samples - start))]
            for name in chosen:
                numbers[name][0] += 1
                times["mlflow"]["register"] += peer.ask(["register", [name, numbers[name][0]]])
            for k, name in enumerate(chosen):
                timed("register", catalog.export, name, objects[start + k], 1000 + start + k)
            moves = [(name, numbers[name][1] % per_policy + 1) for name in dict.fromkeys(chosen)]
            times["mlflow"]["move"] += peer.ask(
                ["move", *([name, "serving", number] for name, number in moves)]
            )
            for name, number in moves:
                timed("move", catalog.promote, name, number, "serving")
                numbers[name][1] = number
            times["mlflow"]["resolve"] += peer.ask(
                ["resolve", *([name, "serving", numbers[name][1]] for name in chosen)]
            )
            for name in chosen:
                timed("resolve", catalog.resolve, f"{name}@serving")
            progress.update(start + len(chosen))
    out: dict[str, Any] = {
        "version": peer.version,
        "entries": entries,
        "wanted_entries": config["entries"],
        "fill_s": round(fill_s, 1),
        "ours_fill_s": ours_fill["create_s"],
        "mlflow_bytes": sum(path.stat().st_size for path in folder.glob("mlflow.db*")),
        "ours_database_bytes": ours_fill["database_bytes"],
    }
    for call in CALLS:
        mine, theirs = times["ours"][call], times["mlflow"][call]
        out[f"{call}_ms"] = {"mlflow": _percentiles(theirs), "ours": _percentiles(mine)}
        out[f"ratio_{call}"] = timing.ratio({"mlflow": theirs, "ours": mine}, "mlflow", "ours")
    out["ratio_fill"] = round(fill_s / timing.value(ours_fill["create_s"]), 1)
    return out


def _percentiles(seconds: list[float]) -> dict[str, Any]:
    """Milliseconds."""
    from benchmarks import timing

    return {f"p{q}": timing.percentile(seconds, q, 1e3) for q in (50, 99)}


if __name__ == "__main__":
    serve(sys.argv[1])
