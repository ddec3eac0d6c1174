"""Stamps of results: the commit, machine, versions and config that produced a figure.

The commit is the last one that changed ``CODE``, so commits of reports or prose do not outdate a
figure.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import psutil

from mint_jax.digest import blake3_of

ROOT = Path(__file__).parents[1]
CODE = ("mint_jax", "pallas_kernels", "benchmarks", "configs", "pyproject.toml", "constraints")
ALWAYS = ("jax", "jaxlib", "numpy")
WHERE_USED = ("torch", "transformers", "peft", "libtpu", "psycopg", "orbax-checkpoint")
WHERE_USED += ("tensorstore",)
FIELDS = ("commit", "dirty", "date", "versions", "machine", "config")


def stamp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns commit, date, versions, machine and plain config of this process."""
    return {
        **code(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions(),
        "machine": machine(),
        "config": dict(config),
    }


def code() -> dict[str, Any]:
    """Returns the commit of ``CODE`` and true if it has changes; None outside a checkout."""
    commit = _git("log", "-1", "--format=%H", "--", *CODE)
    dirty = bool(_git("status", "--porcelain", "--", *CODE)) if commit else None
    return {"commit": commit, "dirty": dirty}


def changes() -> str | None:
    """Returns a digest of uncommitted changes of ``CODE``; None without."""
    if not code()["dirty"]:
        return None
    added = (_git("ls-files", "--others", "--exclude-standard", "--", *CODE) or "").splitlines()
    changed = (_git("diff", "HEAD", "--", *CODE) or "").encode()
    return blake3_of(b"\0".join([changed, *((ROOT / name).read_bytes() for name in added)]))


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the imported packages that compute."""
    used = [name for name in WHERE_USED if name.removesuffix("-checkpoint") in sys.modules]
    found = {name: importlib.metadata.version(name) for name in (*ALWAYS, *used)}
    return {"python": platform.python_version()} | found


def machine() -> dict[str, Any]:
    """Returns CPU model, cores, bytes of memory, and the devices of JAX."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """Returns the output of git for this package's checkout; None outside a checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_paths(tree: Any) -> Any:
    """Returns a report whose absolute paths, of one machine, are cut to their last part."""
    if isinstance(tree, dict):
        return {key: without_paths(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_paths(child) for child in tree]
    return PurePath(tree).name if isinstance(tree, str) and absolute_path(tree) else tree


def absolute_path(text: str) -> bool:
    """Returns true if a value is a path on one machine."""
    return bool(re.match(r"(/|~|[A-Za-z]:\\|file:)", text))


def load(path: Path) -> dict[str, Any]:
    """Reads a report from its file."""
    return json.loads(path.read_text())
