"""The tables of docs/sweeps.md, made from the committed reports of sweeps: what they found, beside
what others report.

A row's text and figure are templates as in ``benchmarks.tables``, whose formats they use; a
field is ``{grid[setting=value,setting=value].figure|format}`` of the sweep's report.

``python -m benchmarks.sweeps.tables`` writes the page.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.sweeps.report import sources
from mint_jax import stamp

FOLDER = tables.CPU / "sweeps"
PAGE = stamp.ROOT / "docs" / "sweeps.md"
_FIELD = re.compile(r"\{(\w+)\[([^\]]*)\]\.(\w+)\|(\w+)\}")


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        sweep: whose report the fields are of.
        text, figure: templates.
        others: what the paper or others report of it.
    """

    sweep: str
    text: str
    figure: str
    others: str = ""


def _each(template: str, values: tuple[Any, ...], between: str = ", ") -> str:
    """The template with each of some values in place of ``@``."""
    return between.join(template.replace("@", str(value)) for value in values)


ROWS = (
    Row(
        "handoff",
        "optimizer step to weights that can be sampled, SmolLM2: merged checkpoint through disk /"
        " adapter in memory, ranks 1, 4, 16, 64",
        _each("{smollm2[rank=@,path=adapter_memory].handoff_ratio|times}", (1, 4, 16, 64)),
    ),
    Row(
        "handoff",
        "the same with the next 64 tokens, and with the next 304, rank 16",
        _each("{smollm2_steps[rank=16,path=adapter_memory].step_@_ratio|times}", (64, 304)),
        "MinT, Qwen3-4B rank 32: 18.3×",
    ),
    Row(
        "handoff",
        "one layer of Qwen3-4B's, and of Qwen3-30B-A3B's shape, rank 16: merged checkpoint through"
        " disk / adapter through disk, in memory",
        _each(
            "{@[rank=16,path=adapter_disk].handoff_ratio|times},"
            " {@[rank=16,path=adapter_memory].handoff_ratio|times}",
            ("qwen3_4b", "qwen3_30b_a3b"),
            "; ",
        ),
    ),
    Row(
        "concurrent_grpo",
        "GRPO of 2, 4, 8, 16, 32 policies, rewards at once: one after another / batched",
        _each("{rewards_at_once[policies=@,schedule=batched].speedup|times}", (2, 4, 8, 16, 32)),
        "C-LoRA, 8 policies: 2.81×; MARLaaS, 32: 6.7× (85 % less time)",
    ),
    Row(
        "concurrent_grpo",
        "8 policies whose rewards take 0.2 s, 1 s: one after another / overlapped",
        _each(
            "{rewards_waiting[policies=8,reward_s=@,schedule=overlapped].speedup|times}", (0.2, 1.0)
        ),
        "MinT, 3 policies: 1.77× (4B), 1.45× (30B)",
    ),
    Row(
        "concurrent_grpo",
        "the same: one after another / batched",
        _each(
            "{rewards_waiting[policies=8,reward_s=@,schedule=batched].speedup|times}", (0.2, 1.0)
        ),
    ),
    Row(
        "packed_load",
        "file to device slot, 48 layers of 128 experts, rank 1: a tensor for each projection of an"
        " expert, packed",
        "{whole[experts=128,rank=1,layout=per_tensor].load_s|s},"
        " {whole[experts=128,rank=1,layout=packed].load_s|s}",
        "MinT: 1.12 s, 0.0323 s (tensors to the loader's objects, in PyTorch)",
    ),
    Row(
        "cold_staircase",
        "1, 4, 16, 64 requests for distinct cold adapters of rank 1 at once: the last one's time"
        " over a single one's",
        _each("{at_once[rank=1,kind=distinct,count=@].over_one|times}", (1, 4, 16, 64)),
        "MinT, 16: 16.9×",
    ),
    Row(
        "cold_staircase",
        "the same for one adapter; reads of its file",
        _each("{at_once[rank=1,kind=identical,count=@].over_one|times}", (1, 4, 16, 64))
        + "; {at_once[rank=1,kind=identical,count=64].reads|count}",
        "MinT, 16: 1 read",
    ),
    Row(
        "catalog",
        "a name's resolution among 10^3, 10^4, 10^5, 10^6 (SQLite, Zipf), 99th percentile",
        _each(
            "{names[database=sqlite,entries=@,traffic=zipf].resolve_p99_ms|ms}",
            (1_000, 10_000, 100_000, 1_000_000),
        ),
    ),
    Row(
        "catalog",
        "a cold load of it to a device slot, median",
        _each(
            "{names[database=sqlite,entries=@,traffic=zipf].cold_p50_ms|ms}",
            (1_000, 10_000, 100_000, 1_000_000),
        ),
        "MinT, whole cold requests of a 30B base: 193, 191, 190 s at 10^3, 10^4, 10^5",
    ),
    Row(
        "catalog",
        "PostgreSQL: a name's resolution among 10^3, 10^4, 10^5 (Zipf), 99th percentile",
        _each(
            "{names[database=postgres,entries=@,traffic=zipf].resolve_p99_ms|ms}",
            (1_000, 10_000, 100_000),
        ),
    ),
    Row(
        "catalog",
        "hit rates of 64 places under Zipf: our slots, LRU, the optimal policy",
        _each(
            "{hot_set[traffic=zipf,capacity=64,policy=@].hit_rate|ratio}",
            ("slots", "lru", "optimal"),
        ),
    ),
    Row(
        "active_wave",
        "a decoding step with 1, 8, 64, 256, 1,024 distinct adapters of rank 1 over one of the bare"
        " base",
        _each("{decode[rank=1,distinct=@].overhead|percent}", (1, 8, 64, 256, 1024)),
        "MinT: 64 in one batch without errors; times not given",
    ),
    Row(
        "active_wave",
        "the same of rank 8, 1 to 256",
        _each("{decode[rank=8,distinct=@].overhead|percent}", (1, 8, 64, 256)),
    ),
    Row(
        "active_wave",
        "a training step of 4, 16, 64 policies of rank 8: as many steps of one policy each / one"
        " step",
        _each("{train[rank=8,policies=@].ratio_one_by_one|times}", (4, 16, 64)),
        "MinT does not batch policies: 1×",
    ),
    Row(
        "active_wave",
        "the same of 4, 16, 64, 256 policies: what it takes longer than one step of a single policy"
        " with all the rows",
        _each("{train[rank=8,policies=@].overhead|percent}", (4, 16, 64))
        + ", {train_many[rank=8,policies=256].overhead|percent}",
    ),
    *(
        Row(
            "learning",
            f"GRPO, 12 steps, mean reward of `{policy}` before, and after at ranks 1, 4, 16, 64 and"
            " 512 of 576 (three seeds)",
            f"{{rl[loss=ppo,rank=1,policy={policy}].reward_before|ratio}}; "
            + _each(
                f"{{rl[loss=ppo,rank=@,policy={policy}].reward_after|ratio}}", (1, 4, 16, 64, 512)
            ),
            others,
        )
        for policy, others in (
            ("adder", "MinT, rank 1, another task: 0.11 to 0.47"),
            ("bracket", ""),
            ("copier", ""),
            ("larger", ""),
        )
    ),
    Row(
        "learning",
        "CISPO: the same of `adder`",
        "{rl[loss=cispo,rank=1,policy=adder].reward_before|ratio}; "
        + _each("{rl[loss=cispo,rank=@,policy=adder].reward_after|ratio}", (1, 4, 16, 64, 512)),
    ),
    Row(
        "learning",
        "PPO, two updates a rollout: `adder` after at ranks 1, 4, 16, 64",
        _each("{rl_two_updates[rank=@,policy=adder].reward_after|ratio}", (1, 4, 16, 64)),
    ),
    Row(
        "learning",
        "SFT, held-out loss of `adder` before, and after at ranks 1, 4, 16, 64",
        "{sft[rank=1,policy=adder].loss_before|3}; "
        + _each("{sft[rank=@,policy=adder].loss_after|3}", (1, 4, 16, 64)),
    ),
    Row(
        "learning",
        "DPO, held-out margin of `adder` after at ranks 1, 4, 16, 64",
        _each("{dpo[rank=@,policy=adder].margin_after|ratio}", (1, 4, 16, 64)),
        "MinT, chat pairs: -0.03 to 30.88",
    ),
    Row(
        "learning",
        "a trainer whose routers differ by noise of 0, 0.3, 1: |log ratio| of its tokens with"
        " replayed routes; without",
        _each("{replay[router_noise=@,replay=True,policy=everything].gap|3}", (0.0, 0.3, 1.0))
        + "; "
        + _each("{replay[router_noise=@,replay=False,policy=everything].gap|3}", (0.0, 0.3, 1.0)),
    ),
    Row(
        "learning",
        "a sampler in int8, in float8, GRPO of rank 16: `adder` after, without a band; with it",
        _each("{eight_bits[quantise=@,policy=adder].reward_after|ratio}", ("int8", "float8"))
        + "; "
        + _each(
            "{eight_bits_band[quantise=@,policy=adder].reward_after|ratio}", ("int8", "float8")
        ),
    ),
    Row(
        "scale_up",
        "Qwen3-4B on its pod, rank 16 on all linear projections: bytes a device of training,"
        " prefill, decode",
        _each(
            "{compiled[base=qwen3_4b,rank=16,targets=('all-linear',),program=@].bytes_per_device|GB}",
            ("train", "prefill", "decode"),
        ),
    ),
    Row(
        "fleet_model",
        "engines for a wave of 64, 512, 2,300, 10,000 policies, a tenth of whose streams load cold:"
        " a model",
        _each("{engines[wave=@,cold_rate=0.1].engines|count}", (64, 512, 2_300, 10_000)),
        "MinT sized 2,300 on paper",
    ),
)


def field(report: Mapping[str, Any], grid: str, settings: str, figure: str) -> Any:
    """The figure of the one row that has these settings, each ``name=value``.

    Raises:
        KeyError: there is none, or several.
    """
    asked = dict(one.split("=", 1) for one in re.split(r",(?=\w+=)", settings) if one)
    rows = [row for point in report["points"] if point["grid"] == grid for row in point["rows"]]
    found = [
        row
        for row in rows
        if all(str(row["settings"].get(name)) == value for name, value in asked.items())
    ]
    if len(found) != 1 or figure not in found[0]["figures"]:
        raise KeyError(f"{len(found)} rows of {report['sweep']} have {grid}[{settings}].{figure}")
    return found[0]["figures"][figure]


def committed() -> dict[str, dict[str, Any]]:
    """The reports there are, by sweep."""
    return {path.parent.name: stamp.load(path) for path in sorted(FOLDER.glob("*/report.json"))}


def table() -> str:
    """What the committed reports found; a sweep without one is not in it."""
    reports = committed()
    if not reports:
        return "None is measured yet.\n"
    lines = [
        "| sweep | what | ours | 95 % interval, n | others |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if row.sweep in reports:
            spread: list[str] = []
            figure = filled(row.figure, reports[row.sweep], spread)
            lines.append(
                f"| `{row.sweep}` | {row.text} | {figure} | {' / '.join(spread)} | {row.others} |"
            )
    return (
        "\n".join(
            [
                *lines,
                "",
                *sources(point for report in reports.values() for point in report["points"]),
            ]
        )
        + "\n"
    )


def filled(template: str, report: Mapping[str, Any], spread: list[str]) -> str:
    """A template with its fields; intervals and n go to ``spread``."""

    def fill(match: re.Match) -> str:
        return tables.shown(field(report, match[1], match[2], match[3]), match[4], spread)

    return _FIELD.sub(fill, template)


TABLES = {"sweeps": table}


def write() -> None:
    """Writes the page."""
    PAGE.write_text(tables.render(PAGE.read_text(), TABLES))


if __name__ == "__main__":
    write()
