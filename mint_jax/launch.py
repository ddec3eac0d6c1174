"""Runs the job that a config names: python -m mint_jax.launch --config=FILE --workdir=DIR

--config.x=y overrides a setting, --config.policies.*.x=y does so for all policies. The workdir
keeps the resolved config. The config file can import modules of its folder.

On several hosts run the same command on each: with --distributed where JAX finds the hosts (TPU
pods, SLURM, MPI), elsewhere with MINT_COORDINATOR, MINT_PROCESSES and MINT_PROCESS in the
environment. Programs in launch/ do this on TPU slices, GKE, SLURM and Ray.
"""

import argparse
import errno
import inspect
import json
import logging
import os
import runpy
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import absl.logging
from ml_collections import ConfigDict

from mint_jax import interrupts, recipes
from mint_jax.errors import UserError
from mint_jax.harness import settings
from mint_jax.harness.options import BaseSettings, RecipeSettings
from mint_jax.recipes import reference

FLAG = "--config."
# configs of an installed wheel
SHIPPED = Path(sysconfig.get_path("data")) / "share" / "mint_jax"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("mint_jax.launch", description=__doc__, add_help=False, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    about = "config file, with an optional argument of its get_config"
    add("--config", metavar="FILE[:ARGUMENT]", help=about)
    about = "for checkpoints, metrics and results; under runs/ by default"
    add("--workdir", metavar="DIR", help=about)
    about = "print the resolved config, what would run, and its bytes; run nothing"
    add("--dry_run", action="store_true", help=about)
    about = "print this text and, with --config, every setting of its job"
    add("--help", action="store_true", help=about)
    about = (
        "join the other hosts of this TPU pod, SLURM or MPI job; with N, refuse to run in any other"
        " number of processes"
    )
    add("--distributed", metavar="N", nargs="?", type=int, const=0, help=about)
    return parser


def split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the program's arguments, and changes ``(path, text)`` of the config."""
    arguments, changes, queue = [], [], list(argv)
    while queue:
        given = queue.pop(0)
        if not given.startswith(FLAG):
            arguments.append(given)
            continue
        path, equals, text = given.removeprefix(FLAG).partition("=")
        if not equals and (not queue or queue[0].startswith("--")):
            raise UserError(f"{given} has no value: give {given}=VALUE")
        changes.append((path, text if equals else queue.pop(0)))
    return arguments, changes


def read_config(file: Path, argument: str | None) -> ConfigDict:
    """Returns the config of a file; the file can import modules of its folder."""
    found = next((place for place in (file, SHIPPED / file) if place.is_file()), None)
    if found is None:
        raise UserError(f"config {file} does not exist: check the path of --config")
    file = found
    if (folder := str(file.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # last: a file called sample.py hides no other module
    get_config = runpy.run_path(str(file)).get("get_config")
    if not callable(get_config):
        raise UserError(f"config {file} has no function get_config: it returns the ConfigDict")
    if argument is not None and not inspect.signature(get_config).parameters:
        raise UserError(f"config {file} takes no argument: drop ':{argument}'")
    try:
        config = get_config(*(() if argument is None else (argument,)))
    except ValueError as error:
        raise UserError(str(error)) from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config of {file} returned a {type(config).__name__}; expected an"
            " ml_collections.ConfigDict"
        )
    return config


def load(
    name: str, changes: Sequence[tuple[str, str]] = ()
) -> tuple[type[RecipeSettings], dict[str, Any]]:
    """Returns arguments of ``settings.build``: the class of the settings of the config ``FILE`` or
    ``FILE:ARGUMENT``, and its values with the command line's changes.
    """
    file, _, argument = name.partition(":")
    tree = read_config(Path(file).expanduser(), argument or None).to_dict()
    cls = recipes.of_job(dict(changes).get("job", tree.get("job")), tree)
    for path, text in changes:
        settings.change(cls, tree, path, text)
    return cls, tree


def default_workdir(name: str, job: str) -> Path:
    """Returns ``runs/`` and the config's path below a folder ``configs``, else job and file name,
    with its argument.
    """
    file, _, argument = name.partition(":")
    path = Path(file).expanduser().resolve()
    path = path.with_name(f"{path.stem}-{argument}" if argument else path.stem)
    folders = [folder for folder in path.parents if folder.name == "configs"]
    return Path("runs", path.relative_to(folders[0]) if folders else Path(job, path.name))


def main(argv: Sequence[str]) -> None:
    arguments, changes = split(argv)
    parser = _parser()
    args, extra = parser.parse_known_args(arguments)
    if extra:
        raise UserError(
            f"unexpected argument {extra[0]!r}: settings are given as --config.name=value"
        )
    if args.help:
        listed = reference.usage(*load(args.config, changes)) if args.config else ""
        print(parser.format_help() + listed)
        return
    if args.config is None:
        raise UserError("no config: give --config=configs/<...>.py")
    config = settings.build(*load(args.config, changes))
    workdir = Path(args.workdir or default_workdir(args.config, config.job)).expanduser()
    _check_workdir(workdir)
    config.preflight()
    over = f" over {config.base}" if isinstance(config, BaseSettings) else ""
    does = "dry run" if args.dry_run else f"results in {workdir}"
    print(f"[launch] job {config.job}{over}; {does}", file=sys.stderr, flush=True)
    _with_jax(args, config, workdir)


def _check_workdir(workdir: Path) -> None:
    """Refuses a workdir that cannot be made or written; makes nothing."""
    there = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"no permission in {there}" if there.is_dir() else f"{there} is no folder"
        raise UserError(f"workdir {workdir} cannot be written ({why}): choose another --workdir")


def _with_jax(args: argparse.Namespace, config: RecipeSettings, workdir: Path) -> None:
    """Runs the job, or describes it for a dry run."""
    from mint_jax import host, multihost
    from mint_jax.harness import report, start

    if args.dry_run:
        from mint_jax.recipes import dry_run

        host.leave_out_absent_tpu()
        print(json.dumps(dry_run.describe(config, workdir), indent=1))
        return
    start.prepare()
    multihost.join(detect=args.distributed is not None, expected=args.distributed or 0)
    if multihost.count() > 1:
        host.keep_stdout()
        if config.needs_one_process:
            raise UserError(
                f"job {config.job!r} runs in one process, and {multihost.count()} have joined:"
                " start it on one host alone"
            )
        start.say(f"[launch] {multihost.topology()}")
    result = run(config, workdir)
    if multihost.is_main():
        report.result(result, workdir / "result.json")
    multihost.barrier("end")
    host.leave(0)


def run(config: RecipeSettings, workdir: Path) -> dict[str, Any]:
    """Runs a job in this process and saves its result, with the kernels of this machine's chips
    that were passed over. Raises ``UserError`` for a mistake in the config or in a file, and for a
    full disk.
    """
    from mint_jax.harness.workdir import save_result
    from pallas_kernels import dispatch

    try:
        before = dispatch.fallen.copy()
        result = recipes.run(config, workdir)
        if hasattr(config, "kernels"):  # finished runs and compilations have theirs already
            passed_over = dispatch.passed_over(before, dispatch.platform_here())
            result.setdefault("kernels_passed_over", passed_over)
        save_result(result, workdir, config)
        return result
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or workdir
        raise UserError(
            f"{place} cannot be written, the disk is full: free disk space, then start again with"
            " the same command"
        ) from None


def cli(main: Callable[[Sequence[str]], None] = main) -> None:
    """Runs ``main`` and prints a user's mistake as one line instead of a traceback."""
    interrupts.install(_leave)
    logging.getLogger("jax").setLevel(logging.WARNING)
    absl.logging.set_verbosity(absl.logging.ERROR)  # Orbax warns of things that users cannot change
    try:
        main(sys.argv[1:])
    except UserError as error:
        status, says = 2, str(error)
        print(f"error{_process()}: {error}", file=sys.stderr)
    except KeyboardInterrupt as error:
        status, says = 128 + getattr(error, "number", signal.SIGINT), str(error)
        print(f"interrupted: {error or 'SIGINT'}", file=sys.stderr)
    except Exception as error:
        number = interrupts.raised()  # native code may put an error of its own in its place
        host = sys.modules.get("mint_jax.host")
        if not (number or _process() or (host and host.is_abandoning())):
            raise
        status, says = 128 + number if number else 1, repr(error)
        traceback.print_exc()
    else:
        return
    _leave(status, says)
    if status > 128:
        # An interrupted import leaves a native module half initialised, and Python's own exit then
        # can crash in it (SIGSEGV).
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _leave(status: int, reason: str) -> None:
    """Ends one of several processes and notifies the others; returns in a single process."""
    if (multihost := sys.modules.get("mint_jax.multihost")) is not None:
        multihost.leave(status, reason)


def _process() -> str:
    """Returns `` in process 3`` where several have joined."""
    multihost = sys.modules.get("mint_jax.multihost")  # does nothing before it is imported
    return f" in process {multihost.index()}" if multihost and multihost.count() > 1 else ""


if __name__ == "__main__":
    cli()
