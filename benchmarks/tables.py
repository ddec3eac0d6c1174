"""The tables of the README and of docs/numbers.md, made from the reports under
``notebooks/reports``.

Between ``<!-- figures:NAME -->`` and ``<!-- /figures -->`` of a page stands what ``TABLES[NAME]``
makes, and a test holds it so. A row's text and figure are templates: ``{path.to.field|format}`` is
read from the row's report, ``{other:path|format}`` from another; an entry of a list is found by its
``name`` or as ``last``. Formats in ``MEASURED`` are for what was measured and show the interval and
n of the figure in a column of their own; those in ``PLAIN`` are for what is counted or set.

``python -m benchmarks.tables`` writes the pages.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import timing
from mint_jax import stamp

CPU = stamp.ROOT / "notebooks" / "reports" / "cpu-2-cores"
PODS = stamp.ROOT / "notebooks" / "reports" / "tpu-aot"
# reports that are to be measured, from before stamps or new
UNSTAMPED = stamp.ROOT / "notebooks" / "reports" / "unstamped.txt"
PAGES = (
    stamp.ROOT / "README.md",
    *(stamp.ROOT / "docs" / f"{name}.md" for name in ("numbers", "kernels", "pods")),
)
BASES = {
    "qwen3_4b": "Qwen3-4B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_30b_a3b_experts": "Qwen3-30B-A3B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "kimi_k2": "Kimi-K2",
    "kimi_k2_experts": "Kimi-K2",
    "glm_5": "GLM-5",
}
_BLOCK = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
_FIELD = re.compile(r"\{(?:(\w+):)?([\w./]+)\|(\w+)\}")


class Row(NamedTuple):
    """One line of a table.

    Attributes:
        text, figure: templates.
        report: whose fields they name, unless they name another.
        command: how to repeat it.
    """

    text: str
    figure: str
    report: str
    command: str


def _bench(name: str, *rows: tuple[str, str], command: str = "") -> list[Row]:
    command = command or f"`configs/bench/{name}.py`"
    return [Row(text, figure, name, command) for text, figure in rows]


def _both(one: str, other: str, what: str) -> str:
    """Before and after of two policies."""
    return ", ".join(
        f"{{policies.{name}.{what}_before|3}} → {{policies.{name}.{what}_after|3}}"
        for name in (one, other)
    )


ROWS = [
    *_bench(
        "handoff",
        (
            (
                "from an optimizer step to weights that can be sampled, SmolLM2 rank 8: merged"
                " checkpoint through disk / adapter in memory"
            ),
            "{handoff_ratio|times}",
        ),
        ("the same for a random base of {large.base|text}, rank 32", "{large.handoff_ratio|times}"),
        (
            (
                "the same, SmolLM2: adapter through a file, as LoRA users save one and let the"
                " sampler load it / adapter in memory"
            ),
            "{handoff_s.adapter_disk/handoff_s.adapter_memory|times}",
        ),
        (
            (
                "from an optimizer step to the first token of the new weights, SmolLM2: merged"
                " checkpoint through disk / adapter in memory"
            ),
            "{first_token_ratio|times}",
        ),
        (
            "the same: adapter through a file / adapter in memory",
            "{to_first_token_s.adapter_disk/to_first_token_s.adapter_memory|times}",
        ),
        (
            (
                "the same, SmolLM2, with the next {new_tokens|count} tokens, whose sampling is most"
                " of the time on a CPU"
            ),
            "{step_ratio|times}",
        ),
        (
            "bytes handed over, SmolLM2: merged checkpoint / adapter",
            "{bytes.merged_disk|count} / {bytes.adapter_memory|count}",
        ),
    ),
    *_bench(
        "concurrent_grpo",
        (
            (
                "GRPO of 3 policies over SmolLM2, 4 rollouts each, {steps|count} step(s): one after"
                " another / batched"
            ),
            "{ratio_3|times}",
        ),
        (
            (
                "GRPO of 8 policies over SmolLM2, 4 rollouts each, {steps|count} step(s): one after"
                " another / batched"
            ),
            "{ratio_8|times}",
        ),
        (
            (
                "the same of 3 policies where a reward takes 1 s: one after another / overlapped, /"
                " batched"
            ),
            "{ratio_3_waiting_overlapped|times}, {ratio_3_waiting|times}",
        ),
    ),
    *_bench(
        "concurrent_grpo",
        (
            "peak memory of the batched schedule over the sequential one, 8 policies",
            "{memory_8.peak_memory_ratio|ratio}",
        ),
        command="`configs/bench/concurrent_grpo.py`, `--config.memory=(8,)`, `--config.memory_n=5`",
    ),
    *_bench(
        "train_vs_peft",
        (
            (
                "one training step of {policies|count} policies, GRPO groups of {rows|count} ×"
                " {tokens|count} tokens that share their prompt, float32: torch + PEFT"
                " ({peer_options.train|text}), {policies|count} updates / ours"
            ),
            "{ratio_train|times}",
        ),
        (
            "the same with rows that share nothing ({peer_options.train_distinct|text})",
            "{ratio_train_distinct|times}",
        ),
        (
            (
                "sampling with {policies|count} adapters in one batch: PEFT's mixed batch"
                " ({peer_options.sample|text}) / ours; share of greedy tokens that are equal"
            ),
            "{ratio_sample|times}; {sample_same_tokens|share}",
        ),
        command="`configs/bench/train_vs_peft.py`, `--config.compile_s=75`",
    ),
    *_bench(
        "engine",
        (
            (
                "decoding SmolLM2 greedily behind prompts that are cached, 1, 8, 32 rows: torch +"
                " transformers in float32 ({peer_options_decode_1|text};"
                " {peer_options_decode_8|text}; {peer_options_decode_32|text}) / ours, the same"
                " numbers in the checkpoint's blocks of 4 bits; ours in float32"
            ),
            (
                "{ratio_decode_1|times}, {ratio_decode_8|times}, {ratio_decode_32|times};"
                " {ratio_decode_1_in_full|times}, {ratio_decode_8_in_full|times},"
                " {ratio_decode_32_in_full|times}"
            ),
        ),
        (
            (
                "{prefill_tokens|count} tokens of prompts to the first new tokens: torch +"
                " transformers / ours"
            ),
            "{ratio_prefill|times}",
        ),
        (
            (
                "{continuous_tokens|count} tokens of ragged lengths: groups in lockstep until their"
                " slowest row ends / continuous batching; groups whose ended rows cost nothing /"
                " continuous batching"
            ),
            "{ratio_continuous|times}; {ratio_continuous_idle_rows_free|times}",
        ),
        (
            (
                "{prefix_samples|count} samples of {prefix_tokens|count} tokens behind prompts of"
                " {prefix_prompt|count}: a prompt each / one prompt, read once"
            ),
            "{ratio_prefix|times}",
        ),
        (
            (
                "bytes that a step must read over its time, as a share of what reading memory"
                " reaches: 1, 8, 32 rows"
            ),
            "{bandwidth_shares.1|ratio}, {bandwidth_shares.8|ratio}, {bandwidth_shares.32|ratio}",
        ),
        (
            (
                "programs compiled by {mixtures|count} mixtures of requests once the engine is"
                " warm; of {company_tokens|count} tokens those with another bit when asked alone,"
                " when samples lose their pages on the way"
            ),
            (
                "{compiles_after_warmup|count}; {differing_tokens|count},"
                " {differing_tokens_preempted|count}"
            ),
        ),
    ),
    *_bench(
        "decode_vs_vllm",
        (
            (
                "decoding 1, 8, 32 rows that name {adapters|count} adapters of rank 8 and the bare"
                " base in turn, SmolLM2, prompts cached: vLLM {vllm|text} on CPUs, float32 / ours,"
                " the same numbers in blocks of 4 bits; vLLM in bfloat16 / ours"
            ),
            (
                "{ratio_1|times}, {ratio_8|times}, {ratio_32|times}; {ratio_1_bfloat16|times},"
                " {ratio_8_bfloat16|times}, {ratio_32_bfloat16|times}"
            ),
        ),
        command="`configs/bench/decode_vs_vllm.py`, `--config.python=`",
    ),
    *_bench(
        "active_wave",
        (
            (
                "a step of decoding over the bare base's: 32 rows of one adapter of rank 8, 64 rows"
                " of 64 adapters of rank 1, 1,024 rows of 1,024"
            ),
            "{overhead_1|percent}, {overhead_64|percent}, {overhead_1024|percent}",
        ),
        (
            (
                "bytes of these adapters over the base's; rows of {checked|count} with another bit"
                " when decoded alone"
            ),
            (
                "{bytes_share_1|share}, {bytes_share_64|share}, {bytes_share_1024|share};"
                " {errors|count}"
            ),
        ),
    ),
    Row(
        "SFT on SmolLM2, 20 steps, held-out loss of two policies",
        _both("bracket", "adder", "loss"),
        "sft",
        "`configs/sft/smollm2.py`",
    ),
    Row(
        "DPO on SmolLM2, 20 steps, held-out reward margin of two policies",
        _both("adder", "larger", "margin"),
        "dpo",
        "`configs/dpo/smollm2.py`",
    ),
    Row(
        "GRPO with LoRA on routed experts of a tiny latent-attention base, held-out reward of two"
        " policies",
        _both("experts", "everything", "reward"),
        "grpo_moe",
        "`configs/tiny/pretrain_moe.py`, then `grpo_moe.py`",
    ),
    *_bench(
        "moe_step",
        (
            (
                "adapters of 1 / 8 / 64 policies, rank {rank|count}, on a layer of"
                " {size.experts|count} experts of Qwen3-30B-A3B's shape, {size.rows|count} ×"
                " {size.tokens|count} tokens: forward and backward over the bare base"
            ),
            (
                "{forward_backward_overhead.1|percent} / {forward_backward_overhead.8|percent} /"
                " {forward_backward_overhead.64|percent}"
            ),
        ),
        (
            "the same, forward alone",
            (
                "{forward_overhead.1|percent} / {forward_overhead.8|percent} /"
                " {forward_overhead.64|percent}"
            ),
        ),
        (
            (
                "adapters as `ragged_dot` over (expert, slot) groups / ours, 8 policies, on a"
                " smaller layer of {ragged_size.experts|count} experts, {ragged_size.d_model|count}"
                " × {ragged_size.width|count}, {ragged_size.rows|count} ×"
                " {ragged_size.tokens|count} tokens"
            ),
            "{ratio_ragged|times}",
        ),
        (
            (
                "a step of 1 / 8 / 32 rows over {decode_size.layers|count} layers of"
                " {decode_size.experts|count} experts, {decode_size.d_model|count} ×"
                " {decode_size.width|count}, {decode_size.per_token|count} a token: with experts as"
                " slices of the scan over layers / ours"
            ),
            (
                "{decode_ratio_sliced.1|times} / {decode_ratio_sliced.8|times} /"
                " {decode_ratio_sliced.32|times}"
            ),
        ),
    ),
    *_bench(
        "catalog_scale",
        (
            (
                "a catalog of {entries|count} revisions of 2.4 KB: made in / disk / files / memory"
                " of the process"
            ),
            "{sizes.last.create_s|s} / {bytes|GB} / {files|count} / {rss_bytes|MB}",
        ),
        (
            (
                "resolving a name in a catalog of {entries|count} revisions, {requests|count}"
                " requests: median / 99th percentile / errors"
            ),
            "{resolve_p50_ms|ms} / {resolve_p99_ms|ms} / {errors|count}",
        ),
        (
            "a cold load from it into a slot, files in the page cache: median / 99th percentile",
            "{cold_p50_ms|ms} / {cold_p99_ms|ms}",
        ),
        ("the same from the disk", "{sizes.last.disk.p50_ms|ms} / {sizes.last.disk.p99_ms|ms}"),
        command="`configs/bench/catalog_scale.py:million`",
    ),
    *_bench(
        "switch",
        (
            (
                "promotions and rollbacks of {sqlite.entries|count} entries under traffic: stale"
                " reads on SQLite, of those that had one right answer; on PostgreSQL"
            ),
            (
                "{sqlite.stale_reads|count} of {sqlite.decided|count}; {postgres.stale_reads|count}"
                " of {postgres.decided|count}"
            ),
        ),
        (
            "median promotion on SQLite / PostgreSQL under that traffic",
            "{sqlite.promote.p50_ms|ms} / {postgres.promote.p50_ms|ms}",
        ),
        (
            "the same without traffic",
            "{sqlite.quiet.promote.p50_ms|ms} / {postgres.quiet.promote.p50_ms|ms}",
        ),
    ),
    *_bench(
        "journal",
        (
            (
                "a training request of {body_bytes|count} bytes accepted, run and answered durably:"
                " two transactions in SQLite / the journal of futures, 1, 8, 64 clients"
            ),
            "{ratio_1|times}, {ratio_8|times}, {ratio_64|times}",
        ),
        (
            "the same, requests a second: SQLite / the journal",
            (
                "{sqlite_per_s_1|count}, {sqlite_per_s_8|count}, {sqlite_per_s_64|count} /"
                " {journal_per_s_1|count}, {journal_per_s_8|count}, {journal_per_s_64|count}"
            ),
        ),
    ),
    *_bench(
        "service",
        (
            (
                "a round of training of 1, 4 and 8 tenants ({tokens_a_round|count} tokens each, and"
                " an update), CPU time: one tenant after the other / all at once"
            ),
            "{cpu_ratio_1|times}, {cpu_ratio_4|times}, {cpu_ratio_8|times}",
        ),
        (
            "a tenant's rounds beside another that floods / alone, 95th percentile",
            "{flood_p95_ratio|times}",
        ),
        (
            (
                "rows that decode wait for a slice of training, median and 90th percentile; asked"
                " for at most {gap_bound_ms|count} ms"
            ),
            "{gap_p50_ms|count} ms, {gap_p90_ms|count} ms",
        ),
        (
            (
                "an update's answer to the first token of exactly these weights, median and 95th"
                " percentile; answers of other weights"
            ),
            "{handoff_p50_ms|count} ms, {handoff_p95_ms|count} ms; {wrong_revisions|count}",
        ),
        (
            (
                "resident memory of a tenant without a slot over its adapter and moments; failed"
                " requests"
            ),
            "{rss_a_tenant|ratio}; {errors|count}",
        ),
    ),
    *_bench(
        "service_load",
        (
            (
                "{clients|count} clients over HTTP, {policies|count} policies over {slots|count}"
                " training slots, {revisions|count} revisions over {adapters|count} adapter slots,"
                " ten minutes: rounds of training, samples; of these failed; answers by another"
                " revision"
            ),
            (
                "{rounds|count}, {samples|count}; {errors|count}; {wrong_revisions|count} of"
                " {checked|count} that were scored again"
            ),
        ),
        (
            "a round, a sample, a heartbeat meanwhile: median, and 99th percentile",
            (
                "{round_p50_ms|count}, {sample_p50_ms|count}, {heartbeat_p50_ms|count} ms;"
                " {round_p99_ms|count}, {sample_p99_ms|count}, {heartbeat_p99_ms|count} ms"
            ),
        ),
        (
            "the server's resident memory when that began, and when it ended",
            "{rss_mb_start|count}, {rss_mb_end|count} MB",
        ),
    ),
    *_bench(
        "packed_load",
        (
            (
                "a rank-1 adapter of Qwen3-30B-A3B's experts from file to device slot:"
                " {tensors.unpacked|count} tensors of a PEFT file, an array for each / one packed"
                " object"
            ),
            "{ratio_packed|times}",
        ),
        (
            (
                "the same: tensors stacked on the host first / {tensors.middle|count} stacked"
                " tensors / a small dense adapter by PEFT's `load_adapter`"
            ),
            "{ratio_stacked_on_host|times} / {ratio_672|times} / {ratio_peft_load_adapter|times}",
        ),
        (
            (
                "16 different cold adapters at once over one, which keeps both cores busy already;"
                " loads when one is asked for 16 times"
            ),
            "{cold16_over_1|times}; {same16_loads|count}",
        ),
        (
            "99th percentile of a decode step while adapters load, over that without",
            "{decode_pause_p99|ratio}",
        ),
        ("bytes that the host cache takes, over those it counts", "{host_bytes_ratio|ratio}"),
    ),
    *_bench(
        "revision_stores",
        (
            (
                "exporting a revision of {revision_bytes|count} bytes into a folder, many at once:"
                " an Orbax checkpoint each / packs, {entries|count} revisions in packs and"
                " {folder.many.orbax.measured|count} beside"
            ),
            "{folder.many.ratio_export_orbax|times}",
        ),
        (
            "a cold load of one of them: an Orbax checkpoint / a pack",
            "{folder.many.ratio_cold_load_orbax|times}",
        ),
        (
            "bytes on the disk over those of the adapters: packs / Orbax",
            (
                "{folder.many.packs.bytes_over_payload|share} /"
                " {folder.many.orbax.bytes_over_payload|share}"
            ),
        ),
    ),
    Row(
        "MLflow's registry / ours at {mlflow.entries|count} entries on SQLite: register, resolve,"
        " move an alias (ours also stores the payload)",
        "{mlflow.ratio_register|times}, {mlflow.ratio_resolve|times}, {mlflow.ratio_move|times}",
        "catalog_against_mlflow",
        "`configs/bench/catalog_scale.py` with `mlflow-skinny`, `--config.entries='(10000,)'`",
    ),
    *_bench(
        "kernels",
        (
            (
                "an expert layer's gate and up with adapters of rank 16 over the bare base's: 512"
                " rows of 64 adapters, 8,192 rows of 8, forward and backward of these"
            ),
            (
                "{cells.decode_64.over_base.model|ratio}, {cells.prefill_8.over_base.model|ratio},"
                " {cells.train_8.over_base.model|ratio}"
            ),
        ),
        (
            "the same two forward by a Python loop over experts and adapters / ours",
            "{cells.decode_64.ratio_loop|times}, {cells.prefill_8.ratio_loop|times}",
        ),
        (
            (
                "the least bytes of these three, adapters as a call of their own, over the base's"
                " (counted)"
            ),
            (
                "{cells.decode_64.floor_over_base.alone|share},"
                " {cells.prefill_8.floor_over_base.alone|share},"
                " {cells.train_8.floor_over_base.alone|share}"
            ),
        ),
    ),
    *_bench(
        "load_base",
        (
            (
                "peak host memory while a {checkpoint_bytes|GB} indexed checkpoint loads / its"
                " bytes: bfloat16, int8, float8"
            ),
            (
                "{loads.bfloat16.rss_over_share|ratio}, {loads.int8.rss_over_share|ratio},"
                " {loads.float8.rss_over_share|ratio}"
            ),
        ),
        (
            (
                "SmolLM2 with 8-bit matrices against float32 on {quantised.int8.tokens|count}"
                " tokens: KL of the next token in nats, int8 / float8"
            ),
            "{quantised.int8.kl_nats|3} / {quantised.float8.kl_nats|3}",
        ),
    ),
]

# What the README shows: one ratio a row, in words that need no other page.
HEADLINE = [
    Row(
        "an update, then the first token with the new weights: adapter through a file, as LoRA"
        " tools do / in memory",
        "{to_first_token_s.adapter_disk/to_first_token_s.adapter_memory|times}",
        "handoff",
        "`configs/bench/handoff.py`",
    ),
    Row(
        "GRPO steps of 8 policies: one policy after another / all in one batch",
        "{ratio_8|times}",
        "concurrent_grpo",
        "`configs/bench/concurrent_grpo.py`",
    ),
    Row(
        "a training step of {policies|count} policies: torch + PEFT, {policies|count} updates /"
        " ours, one update",
        "{ratio_train|times}",
        "train_vs_peft",
        "`configs/bench/train_vs_peft.py`",
    ),
    Row(
        "sampling with {policies|count} adapters in one batch: PEFT / ours",
        "{ratio_sample|times}",
        "train_vs_peft",
        "`configs/bench/train_vs_peft.py`",
    ),
    Row(
        "decoding 8 rows with {adapters|count} adapters: vLLM for CPUs, bfloat16 / ours, the"
        " checkpoint's 4-bit blocks",
        "{ratio_8_bfloat16|times}",
        "decode_vs_vllm",
        "`configs/bench/decode_vs_vllm.py`",
    ),
    Row(
        "time that 64 different adapters add to a decoding step of 64 rows of the bare base",
        "{overhead_64|percent}",
        "active_wave",
        "`configs/bench/active_wave.py`",
    ),
]

# How the trainer may differ from the sampler: name of the report (with ``_no_replay`` for the run
# without), words, options.
MISMATCHES = (
    ("grpo_moe", "nothing", ()),
    (
        "grpo_moe_noise",
        "router weights, noise of 0.3 of their spread",
        ("--config.router_noise=0.3",),
    ),
    (
        "grpo_moe_more_noise",
        "router weights, noise as large as they are",
        ("--config.router_noise=1.0",),
    ),
    (
        "grpo_moe_dtype",
        "arithmetic: sampler bfloat16, trainer float32",
        ("--config.dtype=bfloat16", "--config.trainer_dtype=float32"),
    ),
)
TASKS = {
    "adder": "sum of two digits, bare answer",
    "bracket": "a word in square brackets",
    "copier": "repeat a word, nothing else",
    "larger": "larger of two digits, bare answer",
}


def _digits(x: float) -> str:
    """Three significant digits, thousands apart, whole from 100 on."""
    return (
        f"{x:,.0f}"
        if abs(x) >= 100
        else f"{x:.3g}"
        if x == 0 or abs(x) >= 10
        else f"{x:.{2 if abs(x) >= 1 else 3}f}"
    )


MEASURED: dict[str, tuple[Callable[[float], str], str]] = {  # format -> number, unit
    "times": (_digits, "×"),
    "ratio": (lambda x: f"{x:.2f}", ""),
    "percent": (lambda x: f"{100 * x:+.3g}", " %"),
    "s": (_digits, " s"),
    "ms": (lambda x: f"{x:.2g}" if x < 1 else f"{x:.1f}", " ms"),
    "3": (lambda x: f"{x:.3f}", ""),
}
PLAIN: dict[str, Callable[[Any], str]] = {
    "count": lambda x: f"{timing.value(x):,.0f}",
    "MB": lambda x: f"{timing.value(x) / 1e6:,.0f} MB",
    "GB": lambda x: f"{timing.value(x) / 1e9:.1f} GB",
    "share": lambda x: f"{x:.3f}",
    "text": str,
}


class Reports:
    """The committed reports of a folder, and which of them were looked at."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._loaded: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._loaded:
            self._loaded[name] = stamp.load(self.folder / f"{name}.json")
        return self._loaded[name]

    def has(self, name: str) -> bool:
        """Whether there is such a report."""
        return (self.folder / f"{name}.json").is_file()

    def field(self, name: str, path: str) -> Any:
        """The value behind ``path.to.field``, or the ratio of two medians behind ``one/other``,
        whose interval spans the ends of both.

        Raises:
            KeyError: with report and path.
        """
        if "/" in path:
            (low, mid, high, n), (least, middle, most, m) = (
                (each["interval"][0], each["median"], each["interval"][1], each["n"])
                for each in (self.field(name, part) for part in path.split("/"))
            )
            return {"median": mid / middle, "interval": [low / most, high / least], "n": min(n, m)}
        found: Any = self[name]
        for key in path.split("."):
            if isinstance(found, list):
                found = {row.get("name"): row for row in found} | {"last": found[-1]}
            if not isinstance(found, Mapping) or key not in found:
                raise KeyError(f"report {name} has no {path}")
            found = found[key]
        return found

    def where(self) -> str:
        """Where and at which commit the reports that were looked at were measured."""
        groups: dict[str, list[str]] = {}
        for name, report in self._loaded.items():
            groups.setdefault(source(report), []).append(name)
        if len(groups) == 1:
            return f"Measured {next(iter(groups))}."
        return (
            "Measured "
            + "; ".join(f"{of} ({', '.join(names)})" for of, names in groups.items())
            + "."
        )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def source(report: Mapping[str, Any]) -> str:
    """Commit, machine and versions of a report, as a page says them."""
    if "stamp" not in report:
        return "before reports carried their commit"
    at = report["stamp"]
    machine, versions = at["machine"], at["versions"]
    changed = " with changes" if at["dirty"] else ""
    cores, memory = machine["cores"], machine["memory_bytes"] / 1e9
    return (
        f"at `{at['commit'][:10]}`{changed} on {machine['cpu']}, {cores} cores, {memory:.0f} GB;"
        f" jax {versions['jax']}"
    )


def _rows(rows: Iterable[Row]) -> str:
    reports = Reports(CPU)
    lines = ["| what | figure | 95 % interval, n | how to repeat it |", "| --- | --- | --- | --- |"]
    for row in rows:
        if f"{CPU.name}/{row.report}" in unstamped() and not reports.has(row.report):
            continue  # has never been measured with a stamp, and not without
        spread: list[str] = []
        text, figure = (
            _fill(template, row.report, reports, spread) for template in (row.text, row.figure)
        )
        lines.append(f"| {text} | {figure} | {' / '.join(spread)} | {row.command} |")
    lines += ["", _wrapped(reports.where())]
    return "\n".join(lines) + "\n"


def _fill(template: str, report: str, reports: Reports, spread: list[str]) -> str:
    """A template with its fields; intervals and n go to ``spread``."""

    return _FIELD.sub(
        lambda match: shown(reports.field(match[1] or report, match[2]), match[3], spread), template
    )


def shown(found: Any, kind: str, spread: list[str]) -> str:
    """A number or figure in a format of ``MEASURED`` or ``PLAIN``; interval and n of one that was
    measured go to ``spread``.
    """
    if kind in PLAIN:
        return PLAIN[kind](found)
    number, unit = MEASURED[kind]
    if timing.is_figure(found):
        low, high = map(number, found["interval"])
        spread.append(f"{low} to {high}, {found['n']:,}")
    return number(timing.value(found)) + unit


def _accelerators() -> str:
    """One sentence on what was run on accelerators, from the reports of their folders."""
    measured: dict[str, list[str]] = {}
    for file in sorted(CPU.parent.glob("*/*.json")):
        if file.parent not in (CPU, PODS):
            measured.setdefault(stamp.load(file)["stamp"]["machine"]["devices"], []).append(
                file.stem
            )
    ran = "; ".join(
        f"{', '.join(f'`{name}`' for name in names)} on {device}"
        for device, names in measured.items()
    )
    on_tpu = any("TPU" in device for device in measured)
    tpu = (
        "" if on_tpu else " Nothing was run on a TPU: programs for TPUs are compiled ahead of time."
    )
    here = f"Measured on an accelerator: {ran}." if ran else "Nothing was run on an accelerator."
    return _wrapped(f"{here}{tpu} All other times are of a CPU.") + "\n"


def _quickstart() -> str:
    reports = Reports(CPU)
    report = reports["quickstart"]
    wall, memory = report["wall_s"], report["rss_bytes"]
    # bytes, not times: of SmolLM2 in float32, whenever that was run
    in_full = Reports(CPU)["handoff"]["bytes"]["merged_memory"]
    lines = [
        (
            f"{wall['n']} runs, seeds 0 and 1, from an empty compilation cache:"
            f" {wall['interval'][0]:.0f} and {wall['interval'][1]:.0f} s,"
            f" {max(memory['interval']) / 1e9:.1f} GB of"
        ),
        "memory at most; rewards are means of the runs, in brackets smallest and largest:",
        "",
        (
            "| policy | task | rank | held-out reward, base | after | adapter bytes | of the base"
            " in float32 |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for p in report["policies"]:
        before, after = p["reward_before"], p["reward_after"]
        cells = (
            p["name"],
            TASKS[p["name"]],
            p["rank"],
            f"{timing.value(before):.3f}",
            f"{timing.value(after):.3f} ({after['interval'][0]:.3f} to {after['interval'][1]:.3f})",
            f"{p['adapter_bytes']:,}",
            f"{100 * p['adapter_bytes'] / in_full:.1f} %",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", _wrapped(reports.where())]) + "\n"


def _replay() -> str:
    """Routing replay: what trainer and sampler disagree on, and what is learned, with the sampler's
    experts and without.
    """
    reports = Reports(CPU)
    head = (
        "the trainer differs in",
        "replay",
        "gap of a token's log-probability",
        "choices out of the trainer's route",
    )
    head += ("held-out reward: experts", "everything")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]

    def with_ends(report: str, path: str) -> str:
        figure = reports.field(report, path)
        low, high = figure["interval"]
        return f"{timing.value(figure):.3f} ({low:.3f} to {high:.3f})"

    for name, words, _ in MISMATCHES:
        for replay in (True, False):
            report = name if replay else f"{name}_no_replay"
            both = [
                [with_ends(report, f"policies.{p}.{what}") for p in ("experts", "everything")]
                for what in ("gap", "reward_after")
            ]
            strays = (
                [with_ends(report, f"policies.{p}.out_of_route") for p in ("experts", "everything")]
                if replay
                else []
            )
            cells = (
                words if replay else "",
                "yes" if replay else "no",
                ", ".join(both[0]),
                ", ".join(strays),
                *both[1],
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _wrapped(reports.where())]) + "\n"


def _pods() -> str:
    reports = Reports(PODS)
    head = (
        "base",
        "pod",
        "chips",
        "parameters",
        "adapters in the batch, each of the base",
        "rank, targets",
        "program",
        "arguments",
        "temporaries",
    )
    head += ("free HBM", "collectives", "bound, at least")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name in BASES:
        r = reports[name]
        adapter = r["adapter"]
        base = (
            BASES[name],
            r["topology"],
            r["chips"],
            f"{r['parameters'] / 1e9:.4g} G",
            f"{r['policies']}, {r['adapter_percent_of_base']:.2g} %",
            f"{adapter['rank']}: {', '.join(adapter['targets'])}",
        )
        for program in ("train", "prefill", "decode", "colocated"):
            p = r[program]
            cells = (*(base if program == "train" else ("",) * len(base)), program)
            if program == "colocated":
                cells += (
                    f"{p['argument_bytes'] / 1e9:.1f} GB",
                    f"{p['temporary_bytes'] / 1e9:.1f} GB",
                    f"{100 * p['free_hbm_fraction']:.0f} %",
                    "",
                    "",
                )
            else:
                cells += _pod_cells(p)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    search = reports["kimi_k2_smallest"]["tried"]
    lines += [
        "",
        "The search for Kimi-K2's smallest pod, with the batch of its config: "
        + "; ".join(f"`{n}`: {why}" for n, why in search.items())
        + ".",
    ]
    at = {source(reports[name]) for name in (*BASES, "kimi_k2_smallest")}
    return "\n".join([*lines, "", f"Compiled {'; '.join(sorted(at))}."]) + "\n"


def _pod_cells(p: Mapping[str, Any]) -> tuple[str, ...]:
    """Of one program: arguments, temporaries, free memory, collectives, bound."""
    if "refused" in p:
        return ("", "", f"{100 * p['free_hbm_fraction']:.0f} %", "", "refused by the compiler")
    sent = p["collectives"].values()
    least = "≥ " if any(kind["at_least"] for kind in sent) else ""
    estimate = p["estimate"]
    return (
        f"{p['argument_bytes'] / 1e9:.1f} GB",
        f"{p['temporary_bytes'] / 1e9:.1f} GB",
        f"{100 * p['free_hbm_fraction']:.0f} %",
        f"{least}{sum(kind['bytes'] for kind in sent) / 1e9:.1f} GB",
        f"{estimate['bound']}, {_digits(1e3 * estimate['step_s'])} ms",
    )


def _kernels() -> str:
    """Bundles of the TPU compiler's static schedule, packed LoRA over the base."""
    report = Reports(PODS)["kernels"]
    columns = (
        "chip",
        "base, bundles",
        "adapters in the tile",
        "forward, of the base's",
        "lanes' floor",
        "one pass, of two",
    )
    lines = ["| " + " | ".join((*columns, "backward, of the base's")) + " |", "|" + " --- |" * 7]

    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    met = []
    for name, chip in report["chips"].items():
        goal = chip["goal"]
        words = f"`{name}` {percent(goal['reached'])} of at most {100 * goal['over_base']:.0f} %"
        met.append(words + (", met" if goal["met"] else ", not met"))
        for k, (adapters, add) in enumerate(chip["add"].items()):
            cells = (name, f"{chip['base']['bundles']:,}") if k == 0 else ("", "")
            of_base = [percent(add[floor]) for floor in ("over_base", "lanes_over_base")]
            rest = (
                percent(chip["one_pass"][adapters]["over_two"]),
                percent(chip["backward"][adapters]["over_base"]),
            )
            lines.append("| " + " | ".join((*cells, adapters, *of_base, *rest)) + " |")
    shape = report["shape"]
    what = (
        f"A tile of {shape['tile']} rows, {shape['d_in']} to"
        f" {' and '.join(map(str, shape['d_out']))}, rank {shape['rank']}, {shape['dtype']}; libtpu"
        f" {report['libtpu']}."
    )
    most = next(iter(report["chips"].values()))["goal"]["adapters"]
    goals = f"Goals, up to {most} adapters in a tile: {'; '.join(met)}."
    return (
        "\n".join(
            [*lines, "", _wrapped(what), _wrapped(goals), _wrapped(f"Compiled {source(report)}.")]
        )
        + "\n"
    )


def unstamped() -> list[str]:
    """Reports that are to be measured: those from before stamps, and new ones."""
    return UNSTAMPED.read_text().splitlines() if UNSTAMPED.is_file() else []


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": _quickstart,
    "headline": lambda: _rows(HEADLINE),
    "accelerators": _accelerators,
    "all": lambda: _rows(ROWS),
    "replay": _replay,
    "pods": _pods,
    "kernels": _kernels,
}


def render(text: str, made_by: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """A page with its tables made anew; those of replay and of the pods once all of their reports
    are measured with a stamp.
    """
    parts = {"pods": f"{PODS.name}/", "replay": f"{CPU.name}/grpo_moe"}

    def made(match: re.Match) -> str:
        if any(name.startswith(parts.get(match[2], " ")) for name in unstamped()):
            return match[0]
        return match[1] + made_by[match[2]]() + match[3]

    return _BLOCK.sub(made, text)


def write() -> None:
    """Writes all pages."""
    for page in PAGES:
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    write()
