"""A job that writes a result at once, fails or waits as its options say, and counts its runs."""

import json
import sys
import time
from pathlib import Path


def program(config: str) -> tuple[str, str]:
    """Returns the command of this file for any config."""
    return sys.executable, __file__


def main() -> None:
    options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    folder = Path(options["workdir"])
    with (folder.parent / "ran").open("a") as ran:
        ran.write(f"{folder.name}\n")
    k = int(options.get("config.k", 0))
    (folder / "checkpoints" / "step_1").mkdir(parents=True, exist_ok=True)
    if options.get("config.wait") == str(k):
        time.sleep(60)
    if options.get("config.fail") == str(k):
        print("error: the value is 3; expected 4", file=sys.stderr)
        sys.exit(2)
    seed = int(options.get("config.seed", 0))
    stamp = {
        "commit": "some commit",
        "dirty": False,
        "date": "2026-01-01",
        "versions": {"jax": "1"},
        "config": {},
        "machine": {"cpu": "a", "cores": 2, "memory_bytes": 1e9, "devices": "1 x cpu"},
    }
    sides = [{"name": "x", "s": {"median": 1.0 + k + seed, "interval": [1.0, 2.0], "n": 3}}]
    result = {"stamp": stamp, "sides": sides, "count": 7, "catalog": str(folder)}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "a.png").write_bytes(b"picture")
    rows = [{"step": step, "name": "p", "reward": step + seed} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
