"""Recipes of the official cookbook, as they are, against a server of ours over loopback: ``make
test-clients``.

A recipe is a process of the clients' own environment, in a folder with local datasets
(``data.py``). One line tells of each what held, the last line is a JSON object of all; the exit
code is 1 where one failed.

sl_loop        killed, and the server restarted: the same command resumes at its checkpoint's step
               and repeats the same losses; the loss falls; both checkpoints exist
dpo            the loss falls below log 2, where it begins; chosen answers win
distilled      prompt_distillation: the loss falls
shorter        rewards compare answers; the sampler's log-probabilities are those of training
guess_number   episodes of several turns; the sampler's log-probabilities are those of training
download       weights of sl_loop's last checkpoint: rank 8, and trained
rl_loop        from a checkpoint of chat_sl, which imitated the form of answers: some answers are
               right and some wrong, and training steps have gradients
arithmetic     on SmolLM2: the reward rises over that of the base
"""

import argparse
import contextlib
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.service_client import Served
from mint_jax.models.base import resolve
from tests.clients import data, runner
from tests.clients.runner import need

STEPS = 16  # of arithmetic
COMMON = {"name": data.NAME, "tokenizer": data.NAME, "port": 0, "idle_gap_s": 30.0}
TINY, SMOL = "tiny-random", "smollm2-135m-instruct"
SERVERS = {  # base -> what fits two cores; some recipes have no option of the rank, and take 32
    TINY: {"ranks": "(8,32)", "slots": 2, "adapters": 4, "max_rows": 16}
    | {"shapes": "((1,1,1024),(1,4,256))"},
    SMOL: {"ranks": "(8,)", "slots": 1, "adapters": 2, "max_rows": 32}
    | {"shapes": "((1,1,256),(1,4,256))"},
}
# base -> chat_sl's options, for answers in the form that rl_loop rewards
IMITATION = {TINY: "learning_rate=1e-2", SMOL: "learning_rate=2e-3 max_steps=10"}
RENDERER = "renderer_name=qwen3_instruct"


class Run:
    """A server and its clients' recipes; ``folder`` is the clients', with the server's."""

    def __init__(self, base: str, folder: Path, python: str):
        self.base, self.folder, self.python = base, folder, python
        self.start()

    def start(self) -> None:
        """Starts the server, again where it ran before, and waits until it is ready."""
        options = {"base": self.base} | COMMON | SERVERS[self.base]
        folder = self.folder / "server"
        self.server = Served("mint_jax.launch", "configs/serve.py", folder, options)
        self.where = {"TINKER_BASE_URL": self.server.ready(), "TINKER_API_KEY": "tml-local"}

    def log(self, name: str) -> Path:
        """The folder of a recipe's own logs."""
        return self.folder / "logs" / name

    def recipe(self, name: str, module: str, options: str) -> list[str]:
        """Returns the command of a recipe with its options."""
        own = f"model_name={data.NAME}", f"log_path={self.log(name)}"
        return [self.python, "-m", f"tinker_cookbook.recipes.{module}", *own, *options.split()]

    def begin(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        return runner.begin(command, self.folder, Path(f"{self.log(name)}.log"), self.where)

    def whole(self, name: str, command: Sequence[str]) -> None:
        runner.whole(command, self.folder, Path(f"{self.log(name)}.log"), self.where)

    def ran(self, name: str, module: str, options: str) -> list[dict[str, float]]:
        """Runs a recipe to its end, with its last checkpoint; returns its metrics of each step."""
        self.whole(name, self.recipe(name, module, options))
        ended(self, name)
        return self.metrics(name)

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.log(name) / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """A recipe's metrics, a line for each step."""
        return self.lines(name, "metrics.jsonl")

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        return self.lines(name, "checkpoints.jsonl")


def series(rows: Sequence[dict[str, float]], name: str) -> list[float]:
    """The values of a metric, of those steps that have it."""
    return [row[name] for row in rows if name in row]


def ended(run: Run, name: str) -> dict[str, Any]:
    """The last checkpoint, of which training state and sampler must be there."""
    last = run.checkpoints(name)[-1]
    need({"state_path", "sampler_path"} <= last.keys(), f"the last checkpoint is {last}")
    return last


def kill_after(run: Run, name: str, command: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Starts a recipe, kills it after this number of logged steps, and returns their metrics."""
    process = run.begin(name, command)
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
    run.server.stop()
    run.start()
    run.whole("sl_loop", command)
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
    rows = run.ran("dpo", "preference.dpo.train", options)
    losses, right = series(rows, "dpo_loss"), series(rows, "accuracy")
    need(abs(losses[0] - math.log(2)) < 1e-2 and losses[-1] < 0.6, f"losses {losses}")
    need(right[-1] == 1.0, f"shares of pairs whose chosen answer wins: {right}")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {100 * right[-1]:.0f} % of pairs right"


def distilled(run: Run) -> str:
    options = f"{RENDERER} file_path={data.BOXED} batch_size=16 lora_rank=8 learning_rate=1e-2"
    options += " max_steps=6 eval_every=0 max_length=256"
    losses = series(run.ran("distilled", "prompt_distillation.train", options), "train_mean_nll")
    need(len(losses) == 6 and losses[-1] < 0.7 * losses[0], f"losses {losses}")
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 6 steps"


def shorter(run: Run) -> str:
    options = f"{RENDERER} batch_size=2 group_size=4 max_tokens=8 max_steps=2 eval_every=0"
    rows = run.ran("shorter", "preference.shorter.train", options)
    apart = same_policy(rows)
    return f"{len(rows)} steps, sampler and trainer {apart:.1e} apart"


def guess_number(run: Run) -> str:
    options = f"{RENDERER} group_size=2 batch_size=2 max_tokens=8 max_steps=2 eval_every=0"
    rows = run.ran("guess_number", "multiplayer_rl.guess_number.train", options)
    turns = series(rows, "env/all/turns_per_episode")
    need(len(turns) == 2 and min(turns) > 1, f"turns of an episode {turns}")
    apart = same_policy(rows)
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
    run.whole("download", [run.python, "-c", program, path, str(out)])
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
    run.whole("imitation", run.recipe("imitation", "chat_sl.train", options))
    begun = {"name": "imitation", "batch": 0, "state_path": ended(run, "imitation")["state_path"]}
    run.log("rl_loop").mkdir()
    (run.log("rl_loop") / "checkpoints.jsonl").write_text(json.dumps(begun) + "\n")
    options = "batch_size=2 group_size=8 learning_rate=4e-4 max_steps=4 save_every=2 max_tokens=8"
    rows = run.ran("rl_loop", "rl_loop", options)
    rewards, steps = series(rows, "reward/total"), series(rows, "grad_norm")
    need(len(rewards) == 4 and 0 < statistics.mean(rewards) < 1, f"rewards {rewards}")
    need(bool(steps) and all(0 < norm < math.inf for norm in steps), f"norms of gradients {steps}")
    return (
        f"rewards {', '.join(f'{reward:.2f}' for reward in rewards)}; {len(steps)} training steps"
    )


def arithmetic(run: Run) -> str:
    options = f"{RENDERER} env=arithmetic group_size=8 groups_per_batch=4 max_steps={STEPS}"
    options += " lora_rank=8 learning_rate=4e-4 eval_every=0 save_every=0"
    rows = run.ran("arithmetic", "math_rl.train", options)
    rewards = series(rows, "env/all/reward/total")
    before, after = rewards[0], statistics.mean(rewards[-4:])
    need(len(rewards) == STEPS and after > before + 0.03, f"rewards {rewards}")
    apart = same_policy(rows)
    return (
        f"reward {before:.3f} -> {after:.3f} in {len(rewards)} steps, sampler and trainer"
        f" {apart:.1e} apart"
    )


RECIPES = {
    TINY: (sl_loop, rl_loop, dpo, distilled, shorter, guess_number, download),
    SMOL: (arithmetic, rl_loop),
}


@contextlib.contextmanager
def served(base: str, folder: Path, python: str) -> Iterator[Run]:
    """A server in a new folder, with the data that recipes look for beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data.make(folder, resolve(base))
    run = Run(base, folder, python)
    try:
        yield run
        run.server.stop()
    finally:
        run.server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="that of the clients' environment")
    parser.add_argument("--workdir", type=Path, required=True)
    text = "over which recipes run; each by default"
    parser.add_argument("--base", choices=list(SERVERS), help=text)
    known = list(dict.fromkeys(call.__name__ for calls in RECIPES.values() for call in calls))
    text = f"of {', '.join(known)}; all by default. download needs sl_loop"
    parser.add_argument("recipes", nargs="*", help=text)
    asked = parser.parse_args()
    names, code = runner.chosen(parser, asked.recipes, known), 0
    python = os.path.abspath(asked.python)  # a link into the environment must stay one
    for base in [asked.base] if asked.base else SERVERS:
        if calls := {call.__name__: call for call in RECIPES[base] if call.__name__ in names}:
            with served(base, asked.workdir.resolve() / base, python) as run:
                code |= runner.report(
                    {n: functools.partial(call, run) for n, call in calls.items()}
                )
    return code


if __name__ == "__main__":
    sys.exit(main())
