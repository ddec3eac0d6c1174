"""Recipes of the official cookbook, as they are, against a server of ours over loopback: ``make
test-clients``.

A recipe is a process of the clients' own environment, in a folder with local datasets
(``data.py``). One line tells of each what held, the last line is a JSON object of all; the exit
code is 1 where one failed.

sl_loop        killed, and the server restarted: the same command resumes at its checkpoint's step
               and repeats the same losses; the loss falls; both checkpoints exist
dpo            the loss falls below log 2, where it begins; chosen answers win
download       weights of sl_loop's last checkpoint: rank 8, and trained
rl_loop        from a checkpoint of chat_sl, which imitated the form of answers: some answers are
               right and some wrong, and training steps have gradients
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data
from safetensors.numpy import load_file

from mint_jax.models.base import resolve

ROOT = Path(__file__).parents[2]
READY_S = 900.0
RECIPE_S = 3600.0
BASE = "tiny-random"
# what fits two cores; some recipes have no option of the rank, and take 32
OPTIONS = (
    f"--config.base={BASE}",
    f"--config.name={data.NAME}",
    f"--config.tokenizer={data.NAME}",
    "--config.port=0",
    "--config.idle_gap_s=30.0",
    "--config.ranks=(8,32)",
    "--config.slots=2",
    "--config.adapters=4",
    "--config.shapes=((1,1,1024),(1,4,256))",
    "--config.max_rows=16",
)
RENDERER = "renderer_name=qwen3_instruct"


class Failed(Exception):
    """What did not hold."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


class Run:
    """A server and the recipes that ask it.

    Attributes:
        folder: of the clients, and of the server's state below it.
    """

    def __init__(self, folder: Path, python: str):
        self.folder, self.python = folder, python
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Starts the server, again where it ran before, and waits until it is ready."""
        command = [sys.executable, "-m", "mint_jax.launch", "--config=configs/serve.py"]
        out = self.folder / "server.out"
        with open(out, "wb") as told, open(self.folder / "server.log", "ab") as log:
            self.server = subprocess.Popen(
                [*command, f"--workdir={self.folder / 'server'}", *OPTIONS],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=told,
                stderr=log,
            )
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.server.poll() is None:
            ready = [
                json.loads(line)
                for line in out.read_text().splitlines()
                if line.startswith('{"ready"')
            ]
            if ready:
                self.url = ready[0]["url"]
                return
            time.sleep(0.5)
        raise Failed(f"the server is not ready: see {self.folder / 'server.log'}")

    def stop(self) -> None:
        """Ends the server, and checks that it ended well."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            need(
                self.server.wait(120) == 0,
                f"the server ended with {self.server.returncode}: see {self.folder / 'server.log'}",
            )

    def log(self, name: str) -> Path:
        """The folder of a recipe's own logs."""
        return self.folder / "logs" / name

    def begin(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a process of the clients' environment."""
        (self.folder / "logs").mkdir(exist_ok=True)
        environment = os.environ | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [self.python, *command], cwd=self.folder, env=environment, stdout=log, stderr=log
            )

    def recipe(self, name: str, module: str, options: str) -> list[str]:
        """Returns the command of a recipe with its options."""
        own = f"model_name={data.NAME}", f"log_path={self.log(name)}"
        return ["-m", f"tinker_cookbook.recipes.{module}", *own, *options.split()]

    def whole(self, name: str, *command: str) -> None:
        """Runs a process to its end."""
        process = self.begin(name, *command)
        try:
            code = process.wait(RECIPE_S)
        finally:
            process.kill()
        need(code == 0, f"it ended with {code}: see {self.folder / 'logs' / name}.log")

    def metrics(self, name: str) -> list[dict[str, float]]:
        """A recipe's metrics, a line for each step."""
        path = self.log(name) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.log(name) / "checkpoints.jsonl").read_text().splitlines()
        ]


def series(rows: Sequence[dict[str, float]], name: str) -> list[float]:
    """The values of a metric, of those steps that have it."""
    return [row[name] for row in rows if name in row]


def ended(run: Run, name: str) -> dict[str, Any]:
    """The last checkpoint, of which training state and sampler must be there."""
    last = run.checkpoints(name)[-1]
    need({"state_path", "sampler_path"} <= last.keys(), f"the last checkpoint is {last}")
    return last


def kill_after(run: Run, name: str, command: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Starts a recipe, kills it when so many steps are logged, and gives their metrics."""
    process = run.begin(name, *command)
    try:
        while len(run.metrics(name)) < steps:
            need(process.poll() is None, f"it ended with {process.returncode} before step {steps}")
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    return run.metrics(name)


def sl_loop(run: Run) -> str:
    options = "batch_size=16 lora_rank=8 learning_rate=3e-3 max_steps=12 save_every=5"
    command = run.recipe("sl_loop", "sl_loop", f"{options} max_length=256")
    first = kill_after(run, "sl_loop", command, 8)
    kept = run.checkpoints("sl_loop")[-1]["batch"]
    run.stop()
    run.start()
    run.whole("sl_loop", *command)
    second = run.metrics("sl_loop")[len(first) :]
    steps = [int(row["step"]) for row in second]
    need(
        kept == 5 and steps == list(range(5, 12)),
        f"it went on at steps {steps}, with the checkpoint of step {kept}",
    )
    pairs = list(zip(series(first[5:], "train_mean_nll"), series(second, "train_mean_nll")))
    apart = max(abs(before - after) for before, after in pairs)
    need(len(pairs) >= 3 and apart < 1e-3, f"the repeated steps have losses {pairs}")
    losses = series([*first[:5], *second], "train_mean_nll")
    need(losses[-1] < 0.7 * losses[0], f"losses {losses}")
    ended(run, "sl_loop")
    return (
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 12 steps; killed, went on at 5, {len(pairs)}"
        f" repeated losses {apart:.1e} apart"
    )


def dpo(run: Run) -> str:
    options = f"{RENDERER} batch_size=8 learning_rate=1e-3 max_steps=8 max_length=256"
    run.whole("dpo", *run.recipe("dpo", "preference.dpo.train", options))
    rows = run.metrics("dpo")
    losses, right = series(rows, "dpo_loss"), series(rows, "accuracy")
    need(abs(losses[0] - math.log(2)) < 1e-2 and losses[-1] < 0.6, f"losses {losses}")
    need(right[-1] == 1.0, f"shares of pairs whose chosen answer wins: {right}")
    ended(run, "dpo")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {100 * right[-1]:.0f} % of pairs right"


def download(run: Run) -> str:
    path, out = run.checkpoints("sl_loop")[-1]["state_path"], run.folder / "downloaded"
    program = (
        "import sys; from tinker_cookbook import weights; weights.download(tinker_path=sys.argv[1],"
        " output_dir=sys.argv[2])"
    )
    run.whole("download", "-c", program, path, str(out))
    config = json.loads((out / "adapter_config.json").read_text())
    arrays = load_file(out / "adapter_model.safetensors")
    need(config["r"] == 8, f"the rank is {config['r']}")
    trained = [name for name, array in arrays.items() if "lora_B" in name and array.any()]
    need(
        len(trained) * 2 == len(arrays),
        f"of {len(arrays)} arrays {len(trained)} are trained B factors",
    )
    return f"{', '.join(sorted(file.name for file in out.iterdir()))}; {len(arrays)} arrays"


def rl_loop(run: Run) -> str:
    options = f"dataset={data.BOXED} {RENDERER} batch_size=16 lora_rank=8 save_every=0"
    options += " eval_every=0 max_length=256 learning_rate=1e-2"
    run.whole("imitation", *run.recipe("imitation", "chat_sl.train", options))
    begun = {"name": "imitation", "batch": 0, "state_path": ended(run, "imitation")["state_path"]}
    run.log("rl_loop").mkdir()
    (run.log("rl_loop") / "checkpoints.jsonl").write_text(json.dumps(begun) + "\n")
    options = "batch_size=2 group_size=8 learning_rate=4e-4 max_steps=4 save_every=2 max_tokens=8"
    options += " loss_fn=importance_sampling"
    run.whole("rl_loop", *run.recipe("rl_loop", "rl_loop", options))
    rows = run.metrics("rl_loop")
    rewards, steps = series(rows, "reward/total"), series(rows, "grad_norm")
    need(len(rewards) == 4 and 0 < statistics.mean(rewards) < 1, f"rewards {rewards}")
    need(bool(steps) and all(0 < norm < math.inf for norm in steps), f"norms of gradients {steps}")
    ended(run, "rl_loop")
    return (
        f"rewards {', '.join(f'{reward:.2f}' for reward in rewards)}; {len(steps)} training steps"
    )


RECIPES = {call.__name__: call for call in (sl_loop, rl_loop, dpo, download)}


@contextlib.contextmanager
def served(folder: Path, python: str) -> Iterator[Run]:
    """A server in a new folder, with the data that recipes look for beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data.make(folder, resolve(BASE))
    run = Run(folder, python)
    try:
        run.start()
        yield run
        run.stop()
    finally:
        if run.server is not None and run.server.poll() is None:
            run.server.kill()
            run.server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="that of the clients' environment")
    parser.add_argument("--workdir", type=Path, required=True)
    names = ", ".join(RECIPES)
    text = f"of {names}; all by default. download needs sl_loop"
    parser.add_argument("recipes", nargs="*", help=text)
    asked = parser.parse_args()
    if unknown := set(asked.recipes) - set(RECIPES):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {names}")
    python = os.path.abspath(asked.python)  # a link into the environment must stay one
    told: dict[str, dict[str, Any]] = {}
    with served(asked.workdir.resolve(), python) as run:
        for name in asked.recipes or RECIPES:
            begun = time.monotonic()
            try:
                held, ok = RECIPES[name](run), True
            except (Failed, OSError, KeyError, IndexError, subprocess.TimeoutExpired) as failure:
                held, ok = f"{type(failure).__name__}: {failure}", False
            wall_s = round(time.monotonic() - begun, 1)
            told[name] = {"ok": ok, "told": held, "wall_s": wall_s}
            print(f"{name:14}{'ok    ' if ok else 'FAILED'} {wall_s:7.1f} s  {held}", flush=True)
    ok = all(one["ok"] for one in told.values())
    print(json.dumps({"ok": ok, "recipes": told}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
