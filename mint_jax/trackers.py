"""Rows of ``metrics.jsonl`` in Weights & Biases.

Address and key come from W&B's own environment (``WANDB_MODE``, ``WANDB_API_KEY``). The workdir
keeps the id of the W&B run, so a resumed job continues it. All rows are in ``metrics.jsonl`` too,
so an outage is reported once and does not end a job.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.files import write_file

FILE = "wandb.json"  # in the workdir: the id of the W&B run


class Wandb:
    """A run in W&B, written by process 0; without a project it does nothing.

    Args:
        config: config of the job, shown with the curves.

    Raises:
        UserError: the package is missing, or the run cannot be started.
    """

    def __init__(self, workdir: str | Path, project: str, config: Mapping[str, Any]):
        self._run: Any = None
        self._named: set[str] = set()
        self._silent = False
        file = Path(workdir) / FILE

        def begin() -> None:
            import wandb

            id = json.loads(file.read_text()) if file.is_file() else None
            self._run = wandb.init(
                project=project,
                name=Path(workdir).name,
                dir=str(workdir),
                id=id,
                resume="allow" if id else None,
                config=dict(config),
            )
            write_file(file, json.dumps(self._run.id))

        if project:
            multihost.agree("wandb", lambda: _usable(project, begin))

    def write(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        """Writes the numbers of one row as ``name/metric``, drawn over ``name/step``.

        W&B's own step never goes back and drops rows of an earlier one: of a policy that another is
        ahead of, and of steps that a resumed run repeats.
        """

        def log() -> None:
            if name not in self._named:
                self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
                self._named.add(name)
            numbers = {
                f"{name}/{key}": float(value)
                for key, value in values.items()
                if isinstance(value, int | float)
            }
            self._run.log({**numbers, f"{name}/step": step})

        if self._run is not None:
            self._try(log)

    def close(self, finished: bool = True) -> None:
        """Sends the remaining rows and ends the run."""
        run, self._run = self._run, None
        if run is not None:
            self._try(lambda: run.finish(0 if finished else 1))

    def _try(self, call: Callable[[], None]) -> None:
        """Calls the package, whose errors must not end training."""
        try:
            call()
        except Exception as error:
            if not self._silent:
                print(
                    f"wandb does not take metrics ({_line(error)}); they are in metrics.jsonl, and"
                    " the run goes on",
                    file=sys.stderr,
                    flush=True,
                )
            self._silent = True
        else:
            if self._silent:
                print("wandb takes metrics again", file=sys.stderr, flush=True)
            self._silent = False


def check(project: str) -> None:
    """Checks that a run could start, before anything is loaded or claimed.

    Raises:
        UserError: the package is missing, or W&B has no API key.
    """

    def has_key() -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.api.api_key:
            raise ValueError(
                "no API key: set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline"
            )

    if project:
        _usable(project, has_key)


def _usable(project: str, call: Callable[[], None]) -> None:
    """Calls the package; turns its errors into ``UserError``."""
    try:
        call()
    except ImportError:
        raise UserError(
            f"wandb={project!r} needs a package that is not installed: pip install"
            " 'mint-jax[wandb]'"
        ) from None
    except Exception as error:
        raise UserError(
            f"wandb={project!r} cannot begin a run ({_line(error)}): check its address and key, or"
            " leave wandb empty"
        ) from None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
