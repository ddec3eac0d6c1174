"""Cold requests answered by a stand-in: who answers, what is loaded meanwhile, and what is not
replaced.
"""

import json
import time

import httpx
import openai
import pytest

from mint_jax.catalog.packed import Schema, pack
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.service.server import Sizes
from mint_jax.train.blocks import BlockShape
from tests.service.openai_world import random_adapter
from tests.service.sites import sites as sites

CONFIG = AdapterConfig(4, 8.0, ("q", "v"))
SIZES = Sizes(slots={4: 1}, adapters={4: 2}, shapes=(BlockShape(1, 1, 32),), max_rows=4)
ASKED = {"prompt": "count", "max_tokens": 6, "seed": 3, "extra_body": {"ignore_eos": True}}
WAIT_S = 30.0


@pytest.fixture(scope="module")
def mesh_base(mesh):
    return base_lib.load("tiny-random", mesh)


@pytest.fixture
def site(sites, mesh_base, tmp_path, rng):
    """A server of two slots with policies a, b, c and m; m stands in for a."""
    site = sites(mesh_base, tmp_path / "server", SIZES)
    for name in "abcm":
        packed = pack(random_adapter(rng, mesh_base, CONFIG), Schema(mesh_base.fingerprint, CONFIG))
        site.server.catalog.export(name, packed, 1, create=True)
    site.server.catalog.stand_in("a", "m")
    yield site
    site.close()


def digest(site, name: str) -> str:
    return site.server.catalog.resolve(name).digest


def ask(site, name: str):
    api = openai.OpenAI(base_url=f"{site.url}/v1", api_key="-", max_retries=0)
    return api.completions.create(model=name, **ASKED)


def loaded(site, name: str) -> bool:
    """Waits until a policy's adapter is in a slot, at most ``WAIT_S``; the engine writes it between
    the steps of other requests.
    """
    deadline = time.monotonic() + WAIT_S
    while site.server.residency.eta_s(digest(site, name)) and time.monotonic() < deadline:
        ask(site, "tiny-random")
    return not site.server.residency.eta_s(digest(site, name))


def test_the_stand_in_answers_until_the_policy_is_loaded(site):
    first = ask(site, "a")
    assert first.mint_revision == digest(site, "a"), "nothing is loaded yet: it waits"
    assert loaded(site, "m"), "the stand-in was loaded for the next cold request"
    for name in "bc":  # a and m lose their slots
        assert ask(site, name).mint_revision == digest(site, name)
    expected = ask(site, "m")
    answer = ask(site, "a")
    assert answer.mint_revision == digest(site, "m")
    assert answer.model == "a"
    assert answer.choices[0].text == expected.choices[0].text
    assert loaded(site, "a"), "it was loaded meanwhile"
    again = ask(site, "a")
    assert again.mint_revision == digest(site, "a")
    assert again.choices[0].text == first.choices[0].text
    leases = [
        one.leases for tier in site.server.residency.device.values() for one in tier.copies.values()
    ]
    assert leases == [0, 0], "what was loaded in advance is kept by nobody"


def test_a_canarys_answers_and_accepted_pins_are_never_replaced(site, rng):
    catalog, base = site.server.catalog, site.server.base
    packed = pack(random_adapter(rng, base, CONFIG), Schema(base.fingerprint, CONFIG))
    catalog.promote("a", 1)
    catalog.export("a", packed, 2)
    catalog.open_canary("a", 2, share=0.5, guard="reward>=parent-0.1")
    ask(site, "m")
    for _ in range(4):
        assert ask(site, "a@serving").mint_revision in (digest(site, "a@1"), digest(site, "a@2"))
    for name in "bcm":
        ask(site, name)
    own = digest(site, "a@1")
    for accepted, expected in ((True, own), (False, digest(site, "m"))):
        for name in "bcm":
            ask(site, name)
        pin = {"revision": own, "id": "x", "seed": 1, "at": 1, "accepted": accepted}
        text = json.dumps(pin).encode()
        body = json.dumps({"model": "a", "prompt": "b", "max_tokens": 1}).encode()
        headers = {"x-mint-pin": str(len(text))}
        answer = httpx.post(f"{site.url}/v1/completions", content=text + body, headers=headers)
        assert answer.json()["mint_revision"] == expected


def test_a_full_queue_of_loads_is_no_error(site, monkeypatch):
    from mint_jax.residency.loads import QueueFull

    ask(site, "m")
    acquire = site.server.residency.acquire

    def full(wanted, tenant="default"):
        if wanted == digest(site, "a"):
            raise QueueFull("full", 1.0)
        return acquire(wanted, tenant)

    monkeypatch.setattr(site.server.residency, "acquire", full)
    assert ask(site, "a").mint_revision == digest(site, "m")
