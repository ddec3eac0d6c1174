"""Recipes of the official cookbook, as they are, against a server of ours over loopback: ``make
test-clients``.

A recipe is a process of the clients' own environment, in a folder with local datasets
(``data.py``). One line tells of each what held, the last line is a JSON object of all; the exit
code is 1 where one failed.

sl_loop        killed, and the server restarted: the same command resumes at its checkpoint's step
               and repeats the same losses; the loss falls; both checkpoints exist
dpo            the loss falls below log 2, where it begins; chosen answers win
guess_number   episodes of several turns; the sampler's log-probabilities are those of training
download       weights of sl_loop's last checkpoint: rank 8, and trained
rl_loop        from a checkpoint of chat_sl, which imitated the form of answers: some answers are
               right and some wrong, and training steps have gradients
arithmetic     on SmolLM2: the reward rises over that of the base
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import data
from safetensors.numpy import load_file

from mint_jax.models.base import resolve

ROOT = Path(__file__).parents[2]
READY_S = 900.0
RECIPE_S = 3600.0
STEPS = 16  # of arithmetic
COMMON = ("--config.idle_gap_s=30.0",) + tuple(
    f"--config.{setting}={data.NAME}" for setting in ("name", "tokenizer")
)
SERVERS = {  # base -> what fits two cores; some recipes have no option of the rank, and take 32
    "tiny-random": (
        "--config.ranks=(8,32)",
        "--config.slots=2",
        "--config.adapters=4",
        "--config.shapes=((1,1,1024),(1,4,256))",
        "--config.max_rows=16",
    ),
    "smollm2-135m-instruct": (
        "--config.ranks=(8,)",
        "--config.slots=1",
        "--config.adapters=2",
        "--config.shapes=((1,1,256),(1,4,256))",
        "--config.max_rows=32",
    ),
}


IMITATION = {  # base -> chat_sl's options, for answers in the form that rl_loop rewards
    "tiny-random": "learning_rate=1e-2",
    "smollm2-135m-instruct": "learning_rate=2e-3 max_steps=10",
}
RENDERER = "renderer_name=qwen3_instruct"


class Failed(Exception):
    """What did not hold."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


class Run:
    """A server of one base, and the recipes that ask it.

    Attributes:
        folder: of the clients, and of the server's state below it.
    """

    def __init__(self, base: str, folder: Path, python: str):
        self.base, self.folder, self.python = base, folder, python
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Starts the server, again where it ran before, and waits until it is ready."""
        command = [
            sys.executable,
            "-m",
            "mint_jax.launch",
            "--config=configs/serve.py",
            f"--config.base={self.base}",
            "--config.port=0",
        ]
        out = self.folder / "server.out"
        with open(out, "wb") as told, open(self.folder / "server.log", "ab") as log:
            self.server = subprocess.Popen(
                [*command, f"--workdir={self.folder / 'server'}", *COMMON, *SERVERS[self.base]],
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
        raise Failed(f"the server over {self.base} is not ready: see {self.folder / 'server.log'}")

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


def guess_number(run: Run) -> str:
    options = f"{RENDERER} group_size=2 batch_size=2 max_tokens=8 max_steps=2 eval_every=0"
    module = "multiplayer_rl.guess_number.train"
    run.whole("guess_number", *run.recipe("guess_number", module, options))
    rows = run.metrics("guess_number")
    turns = series(rows, "env/all/turns_per_episode")
    need(len(turns) == 2 and min(turns) > 1, f"turns of an episode {turns}")
    apart = same_policy(rows)
    ended(run, "guess_number")
    return f"{turns[-1]:.1f} turns an episode, sampler and trainer {apart:.1e} apart"


def same_policy(rows: Sequence[dict[str, float]]) -> float:
    """Half the mean squared difference of sampled tokens' log-probabilities in sampling and in
    training, the largest of all steps.
    """
    apart = max(series(rows, "optim/kl_sample_train_v2"), default=math.inf)
    need(apart < 1e-4, f"sampler and trainer disagree by {apart}")
    return apart


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
    options += f" eval_every=0 max_length=256 {IMITATION[run.base]}"
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


def arithmetic(run: Run) -> str:
    options = f"{RENDERER} env=arithmetic group_size=8 groups_per_batch=4 max_steps={STEPS}"
    options += " lora_rank=8 learning_rate=4e-4 loss_fn=importance_sampling"
    options += " eval_every=0 save_every=0"
    run.whole("arithmetic", *run.recipe("arithmetic", "math_rl.train", options))
    rows = run.metrics("arithmetic")
    rewards = series(rows, "env/all/reward/total")
    before, after = rewards[0], statistics.mean(rewards[-4:])
    need(len(rewards) == STEPS and after > before + 0.03, f"rewards {rewards}")
    apart = same_policy(rows)
    ended(run, "arithmetic")
    return (
        f"reward {before:.3f} -> {after:.3f} in {len(rewards)} steps, sampler and trainer"
        f" {apart:.1e} apart"
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is run over which base."""

    base: str
    call: Callable[[Run], str]


TINY, SMOL = SERVERS
RECIPES = [Recipe(TINY, call) for call in (sl_loop, rl_loop, dpo, guess_number, download)] + [
    Recipe(SMOL, call) for call in (arithmetic, rl_loop)
]


@contextlib.contextmanager
def served(base: str, folder: Path, python: str) -> Iterator[Run]:
    """A server in a new folder, with the data that recipes look for beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data.make(folder, resolve(base))
    run = Run(base, folder, python)
    try:
        run.start()
        yield run
        run.stop()
    finally:
        if run.server is not None and run.server.poll() is None:
            run.server.kill()
            run.server.wait()


def main() -> int:
    names = [recipe.call.__name__ for recipe in RECIPES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", required=True, help="the interpreter of the clients' environment"
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument(
        "--base", choices=list(SERVERS), help="over which recipes run; each by default"
    )
    parser.add_argument(
        "recipes", nargs="*", help=f"of {', '.join(names)}; all by default. download needs sl_loop"
    )
    asked = parser.parse_args()
    if unknown := set(asked.recipes) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    python = os.path.abspath(asked.python)  # a link into the environment must stay one
    told: dict[str, dict[str, Any]] = {}
    for base in [asked.base] if asked.base else SERVERS:
        mine = [
            recipe.call
            for recipe in RECIPES
            if recipe.base == base and (not asked.recipes or recipe.call.__name__ in asked.recipes)
        ]
        if not mine:
            continue
        begun = time.monotonic()
        try:
            with served(base, asked.workdir.resolve() / base, python) as run:
                print(f"server over {base}: ready in {time.monotonic() - begun:.0f} s", flush=True)
                for call in mine:
                    begun = time.monotonic()
                    try:
                        held, ok = call(run), True
                    except (
                        Failed,
                        OSError,
                        KeyError,
                        IndexError,
                        subprocess.TimeoutExpired,
                    ) as failure:
                        held, ok = f"{type(failure).__name__}: {failure}", False
                    wall_s = time.monotonic() - begun
                    told[f"{call.__name__} over {base}"] = {
                        "ok": ok,
                        "told": held,
                        "wall_s": round(wall_s, 1),
                    }
                    print(
                        f"{call.__name__:14}{'ok    ' if ok else 'FAILED'} {wall_s:7.1f} s  {held}",
                        flush=True,
                    )
        except Failed as failure:
            told[f"server over {base}"] = {"ok": False, "told": str(failure)}
    ok = all(one["ok"] for one in told.values())
    print(json.dumps({"ok": ok, "recipes": told}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
