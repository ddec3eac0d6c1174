"""Policies of 100 KB and less: what biases, and factors over a shared output basis, learn in one
batch with LoRA, and the time until they are loaded.

The policies of ``configs/recipes/small_policies.py`` are trained together, once for each task.
``loads``: from a name to a written device slot, cold, of random adapters in bfloat16, in turn.
"""

import importlib.util
import itertools
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import timing
from benchmarks.catalog_fill import Form, Payloads, open_catalog
from benchmarks.catalog_scale import Loads
from mint_jax import params as params_lib
from mint_jax import recipes
from mint_jax.harness import report as report_lib
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig

RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "small_policies.py"


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    recipe = _recipe()
    rewards = {task: _train(config, task, recipe, workdir) for task in config.tasks}
    forms = {
        name: Form("smollm2", AdapterConfig(**policy.adapter))
        for name, policy in recipe.policies.items()
    }
    counts = {
        name: params_lib.count(lora_tree.adapter_specs(form.specs, form.adapter))
        for name, form in forms.items()
    }
    forms = {name: forms[name] for name in sorted(counts, key=counts.__getitem__, reverse=True)}
    report = {"steps": config.steps or recipe.steps, "rewards": rewards, "numbers": counts}
    report["loads"] = _loads(config, forms)
    cells = [
        [task, row["name"], row["adapter_bytes"], row["before"], row["after"]["median"]]
        for task, rows in rewards.items()
        for row in rows
    ]
    report_lib.table("rewards", ("task", "policy", "bytes", "before", "after"), cells)
    cells = [[name, one["over_largest"]["median"]] for name, one in report["loads"].items()]
    report_lib.table("cold loads", ("policy", "time / that of the largest"), cells)
    _draw(rewards, workdir / "small_policies.png")
    return report


def _recipe() -> Any:
    spec = importlib.util.spec_from_file_location("small_recipe", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def _train(config: Any, task: str, recipe: Any, workdir: Path) -> list[dict[str, Any]]:
    """Trains the recipe's policies on a task, with each seed; returns a row for each policy."""
    runs = []
    for seed in config.seeds:
        job = recipe.copy_and_resolve_references()
        job.update(base=config.base, steps=config.steps or job.steps, seed=seed, tensorboard=False)
        job.export_every = job.steps
        job.eval = config.eval
        for policy in job.policies.values():
            policy.env.name = task
        found = recipes.run(recipes.read(job), workdir / f"{task}_{seed}")["policies"]
        runs.append({one["name"]: one for one in found})
    return [
        {
            "name": name,
            "adapter_bytes": one["adapter_bytes"],
            "before": one["reward_before"],
            "after": timing.median(run[name]["reward_after"] for run in runs),
        }
        for name, one in sorted(runs[0].items(), key=lambda at: -at[1]["adapter_bytes"])
    ]


def _loads(config: Any, forms: dict[str, Form]) -> dict[str, Any]:
    """Returns the time of a cold load of each form, and over that of the first, the largest."""
    sides, opened = {}, []
    with tempfile.TemporaryDirectory() as place:
        for name, form in forms.items():
            payloads, folder = Payloads(config.seed, form), Path(place) / name
            folder.mkdir()
            catalog = open_catalog(folder)
            for k, data in enumerate(payloads.batch(0, config.revisions)):
                catalog.export(f"policy-{k}", data, 1, create=True)
            loads = Loads(catalog, form, config, payloads.nbytes)
            opened.append((loads, catalog))
            names = itertools.cycle([f"policy-{k}@latest" for k in range(config.revisions)])
            sides[name] = lambda loads=loads, names=names: loads.load(next(names), drop=True)[1]
        found = timing.collect("loads", sides, config.n, warm=config.revisions)
        for loads, catalog in opened:
            loads.residency.close()
            catalog.close()
    first = next(iter(forms))
    ms = timing.medians_of(found, 1e3)
    return {
        name: {"ms": ms[name], "over_largest": timing.ratio(found, name, first)} for name in forms
    }


def _draw(rewards: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rewards), figsize=(4.4 * len(rewards), 3.4), squeeze=False)
    for ax, (task, rows) in zip(axes[0], rewards.items()):
        for row in rows:
            color = {"bias": "C1", "basis": "C2"}.get(row["name"].partition("_")[0], "C0")
            at = row["adapter_bytes"] / 1e3, row["after"]["median"]
            ax.vlines(at[0], *row["after"]["interval"], color=color)
            ax.plot(*at, "o", color=color)
            ax.annotate(row["name"], at, fontsize=7)
        ax.axhline(rows[0]["before"], color="0.6")
        ax.set(title=task, xlabel="kB, float32", xscale="log", ylim=(0, 1.05))
        ticks = sorted({round(row["adapter_bytes"] / 1e3) for row in rows})
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
        ax.set_xticks([], minor=True)
    axes[0][0].set_ylabel("reward on held-out prompts")
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
