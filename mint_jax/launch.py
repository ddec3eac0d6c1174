"""``python -m mint_jax.launch --config=configs/<...>.py --workdir=DIR``: runs the job that the config names.

``--config.x=y`` overrides a setting; a misspelt one is an error. The resolved config is saved beside the results.

On several hosts the same command runs on every one: with ``--distributed`` where JAX finds the others by itself, elsewhere with
the three environment variables of ``multihost``.
"""

import errno
import importlib
import logging
import sys
import traceback
from pathlib import Path

import absl.logging
from absl import app, flags
from ml_collections import config_flags

from mint_jax import compiling, host, multihost
from mint_jax.errors import UserError, choice
from mint_jax.jobs import ALONE, JOBS
from mint_jax.jobs.common import finish
from mint_jax.models.base import cache_dir

_CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a config file, with an optional ':argument'.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results; runs/<config name> by default.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of the TPU pod, SLURM or MPI job that this runs in.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: settings are given as --config.name=value")
    config = _CONFIG.value
    if config is None:
        raise UserError("no config: give --config=configs/<...>.py")
    file = Path(config_flags.get_config_filename(flags.FLAGS["config"]).split(":")[0])
    if not file.is_file():  # the flag itself reports this only when the config is used
        raise UserError(f"config {file} does not exist: check the path of --config")
    if config.get("job") not in JOBS:
        raise choice("job", config.get("job"), JOBS)
    name = file.stem
    workdir = Path(_WORKDIR.value or Path("runs") / name)
    host.keep_freed_memory()
    multihost.join(detect=_DISTRIBUTED.value)
    if multihost.count() > 1:
        host.keep_stdout()
        if config.job in ALONE:
            raise UserError(f"job {config.job!r} runs in one process, and {multihost.count()} have joined: start it on one host alone")
    host.use_compilation_cache(cache_dir() / "compiled")
    compiling.announce()
    job = importlib.import_module(JOBS[config.job])
    try:
        finish(job.run(config, workdir), workdir, config)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or workdir
        raise UserError(f"{place} cannot be written, the disk is full: free disk space, then start again with the same command") from None
    multihost.barrier("end")


def _parse(argv: list[str]) -> list[str]:
    """absl's parser, with the mistakes that it reports by a traceback as a line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(str(error).strip().splitlines()[-1].strip().removeprefix("mint_jax.errors.UserError: ")) from None
    except OSError as error:  # an override of a config that does not exist
        raise UserError(" ".join(str(error).split())) from None
    except (AttributeError, KeyError) as error:
        raise UserError(f"the config has no setting {str(error).splitlines()[0]}: see the file for their names") from None


def cli() -> None:
    """Runs ``main`` and prints a user's mistake as one line instead of a traceback."""
    logging.getLogger("jax").setLevel(logging.WARNING)
    absl.logging.set_verbosity(absl.logging.WARNING)  # Orbax reports every thread it starts
    try:
        app.run(main, flags_parser=_parse)
    except UserError as error:
        which = f" in process {multihost.index()}" if multihost.count() > 1 else ""
        print(f"error{which}: {error}", file=sys.stderr)
        multihost.leave(2, str(error))
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        if multihost.count() == 1:
            raise
        traceback.print_exc()
        multihost.leave(1, repr(error))


if __name__ == "__main__":
    cli()
