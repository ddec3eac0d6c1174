"""The peer gets the fastest options for each work, and the report lists every trial."""

import pytest

from benchmarks import peft_peer
from benchmarks.peft_peer import ATTENTION, CACHES, THREADS, Options, Work

COST = {
    "updates": {"sdpa": 2.0, "eager": 1.0},
    "generate": {"sdpa": 3.0, "eager": 4.0, "dynamic": 0.5, "static": 0.1},
}


@pytest.mark.parametrize(
    ("compiled", "compile_s", "chosen"),
    [
        ({"train": "not compiled in 1 s", "sample": 9.0}, 1.0, []),
        ({"train": 0.5, "sample": "failed: RuntimeError: no"}, 1.0, ["train"]),
        ({}, 0.0, []),
    ],
)
def test_each_work_has_its_own_best(compiled, compile_s, chosen, monkeypatch):
    def seconds(peer, options, work):
        of = COST[work.method]
        return of[options.attention] + 0.01 * options.threads + of.get(options.cache, 0.0)

    monkeypatch.setattr(peft_peer, "_seconds", seconds)
    monkeypatch.setattr(peft_peer, "compiled_seconds", lambda made, wanted, limit_s: compiled)
    works = {"train": Work("updates", ()), "sample": Work("generate", ())}
    best, tried = peft_peer.fastest(None, (), works, compile_s)  # type: ignore[arg-type]
    plain = {
        "train": Options("eager", min(THREADS), CACHES[0]),
        "sample": Options("sdpa", min(THREADS), "static"),
    }
    assert best == plain | {name: plain[name]._replace(compiled=True) for name in chosen}
    assert len(tried["train"]) == len({*ATTENTION}) + len({*THREADS}) - 1 + len(compiled) // 2
    for name, found in compiled.items():
        assert tried[name][str(plain[name]._replace(compiled=True))] == found
    assert any("static cache" in name for name in tried["sample"])
