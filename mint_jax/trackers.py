"""Rows of ``metrics.jsonl`` in Weights & Biases and MLflow.

Address and credentials come from each tracker's own environment (``WANDB_MODE``, ``WANDB_API_KEY``,
``MLFLOW_TRACKING_URI``). The workdir keeps the id of the tracker's run, so a resumed job continues
it. All rows are in ``metrics.jsonl`` too, so an outage is reported once and does not end a job.
"""

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.files import write_file

T = TypeVar("T")


class Trackers:
    """Trackers that a config names: a W&B project, an MLflow experiment, or empty. Raises
    ``UserError``: a package is missing, or a run cannot be started.
    """

    def __init__(self, workdir: str | Path, named: Mapping[str, str], config: Mapping[str, Any]):
        self._file = Path(workdir) / "trackers.json"
        self._trackers: dict[str, Any] = {}  # of ``KINDS``
        self._silent: set[str] = set()
        wanted = {kind: where for kind, where in named.items() if where}

        def begin() -> None:
            ids = json.loads(self._file.read_text()) if self._file.is_file() else {}
            for kind, where in wanted.items():
                begun = functools.partial(KINDS[kind], where, Path(workdir), ids.get(kind), config)
                self._trackers[kind] = _usable(kind, where, begun)
            ids |= {kind: one.id for kind, one in self._trackers.items()}
            write_file(self._file, json.dumps(ids))

        if wanted:
            multihost.agree("trackers", begin)

    def write(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        """Writes the numbers of one row as ``name/metric``."""
        found = ((key, value) for key, value in values.items() if isinstance(value, int | float))
        numbers = {f"{name}/{key}": float(value) for key, value in found}
        for kind, one in self._trackers.items():
            self._try(kind, lambda one=one: one.log(step, name, numbers))

    def close(self, finished: bool = True) -> None:
        """Sends the remaining rows and ends the runs."""
        trackers, self._trackers = self._trackers, {}
        for kind, one in trackers.items():
            self._try(kind, lambda one=one: one.close(finished))

    def _try(self, kind: str, call: Callable[[], None]) -> None:
        say = functools.partial(print, file=sys.stderr, flush=True)
        try:
            call()
        except Exception as error:  # an outage of a tracker is no reason to stop training
            if kind not in self._silent:
                where = "they are in metrics.jsonl, and the run goes on"
                say(f"{kind} does not take metrics ({_first_line(error)}); {where}")
            self._silent.add(kind)
        else:
            if kind in self._silent:
                say(f"{kind} takes metrics again")
            self._silent.discard(kind)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def check(named: Mapping[str, str]) -> None:
    """Raises ``UserError`` if a package is missing, W&B has no API key, or MLflow's server does not
    answer.
    """
    for kind, where in named.items():
        if where:
            _usable(kind, where, KINDS[kind].check)


def _usable(kind: str, where: str, call: Callable[[], T]) -> T:
    """Returns the result of ``call``; turns its errors into ``UserError``."""
    try:
        return call()
    except ImportError:
        raise UserError(
            f"{kind}={where!r} needs a package that is not installed: pip install"
            f" 'mint-jax[{kind}]'"
        ) from None
    except Exception as error:
        raise UserError(
            f"{kind}={where!r} cannot begin a run ({_first_line(error)}): check its address and"
            f" key, or leave {kind} empty"
        ) from None


class _Wandb:
    """A run of W&B; ``id`` finds it again, as in ``_Mlflow``."""

    def __init__(self, project: str, workdir: Path, id: str | None, config: Mapping[str, Any]):
        import wandb

        where: Any = {"project": project, "name": workdir.name, "dir": str(workdir)}
        self._run = wandb.init(**where, id=id, resume="allow" if id else None, config=dict(config))
        self.id = self._run.id
        self._named: set[str] = set()

    @staticmethod
    def check() -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.api.api_key:
            raise ValueError(
                "no API key: set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline"
            )

    def log(self, step: int, name: str, numbers: Mapping[str, float]) -> None:
        # W&B's own step never goes back and drops rows of an earlier one: of a policy that another
        # is ahead of, or of a resumed run. So each policy's step is a metric of its own.
        if name not in self._named:
            self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
            self._named.add(name)
        self._run.log({**numbers, f"{name}/step": step})

    def close(self, finished: bool) -> None:
        self._run.finish(0 if finished else 1)


class _Mlflow:
    MOST = 1000  # metrics that the server takes at once

    def __init__(self, experiment: str, workdir: Path, id: str | None, config: Mapping[str, Any]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._client, self._metric = MlflowClient(), Metric
        if id is None:
            found = self._client.get_experiment_by_name(experiment)
            number = found and found.experiment_id
            number = number or self._client.create_experiment(experiment)
            run = self._client.create_run(number, run_name=workdir.name)
            self._client.log_dict(run.info.run_id, dict(config), "config.json")
        else:
            run = self._client.get_run(id)
            self._client.update_run(id, status="RUNNING")
        self.id = run.info.run_id

    @staticmethod
    def check() -> None:
        from mlflow import MlflowClient

        MlflowClient().search_experiments(max_results=1)

    def log(self, step: int, name: str, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        metrics = [self._metric(key, value, now, step) for key, value in finite.items()]
        for start in range(0, len(metrics), self.MOST):
            self._client.log_batch(self.id, metrics=metrics[start : start + self.MOST])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "FAILED")


KINDS: dict[str, Any] = {"wandb": _Wandb, "mlflow": _Mlflow}
