"""Bad input to one server of two tenants: each request is refused for a reason that names the
mistake, and the other tenant is not affected.

A refusal is a 4xx that clients do not repeat (not 408, 409 or 429), or a future that fails as the
user's mistake. The tests run in the file's order: the first record what must not change, the last
compare.
"""

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from mint_jax.service import keys as keys_
from mint_jax.service import tinker_sampling
from mint_jax.service.gate import Limits
from mint_jax.service.keys import SCOPES
from mint_jax.service.monitoring import state_of
from tests.service.bad_world import (
    CHUNKS,
    MISSING,
    NOBODY,
    ROUTES,
    SAVES,
    TRAINING,
    Tenant,
    batch,
    body_of,
    changed,
    refused,
    wrongs,
)
from tests.service.sites import sites as sites

pytestmark = pytest.mark.long

LIMITS = Limits(body_bytes=4 << 20, held_bytes=256 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def tenants(sites, tiny_base, folder):
    secrets = [keys_.add(folder / "keys", tenant, SCOPES)[1] for tenant in ("ann", "bob")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinker_sampling, "POLL_S", 20.0)
        keys = keys_.Keys(folder / "keys")
        site = sites(tiny_base(), folder / "server", keys=keys, limits=LIMITS)
        yield [Tenant(site, secret).settle() for secret in secrets]


@pytest.fixture(scope="module")
def ann(tenants):
    """The tenant that sends bad input."""
    return tenants[0]


@pytest.fixture(scope="module")
def bob(tenants):
    """The tenant that must not be affected."""
    return tenants[1]


@pytest.fixture(scope="module")
def site(ann):
    return ann.site


def results_of(bob: Tenant, number: int) -> list:
    """Returns the bits of a training step from a checkpoint, log-probabilities after it, and
    greedy samples.
    """
    new = {"session_id": bob.ids["session"], "model_seq_id": number, "optimizer": True}
    model = bob.done("load_weights", new | {"path": bob.ids["weights"]})["model_id"]
    data = batch((9, 8, 7, 6, 5))
    return [
        bob.train("forward_backward", model, forward_backward_input=data),
        bob.train("optim_step", model, adam_params={"learning_rate": 1e-2}),
        bob.train("forward", model, forward_input=data),
        bob.sample(max_tokens=8, temperature=0),
    ]


@pytest.fixture(scope="module")
def before(tenants, bob):
    """Bob's results and the threads before any bad input."""
    threads = {thread.name for thread in threading.enumerate()}
    assert {"database", "engine", "web"} <= threads
    return results_of(bob, 1), threads


@pytest.fixture(autouse=True)
def goes_on(before, ann):
    """After each test the model of bad requests trains on: its order is not stuck."""
    yield
    ann.step("forward_backward", {"forward_backward_input": batch()})
    ann.step("optim_step", {"adam_params": {"learning_rate": 1e-3}})


class Battery:
    """Collects requests that were not refused as they should be."""

    def __init__(self, ann: Tenant):
        self.ann, self.wrong = ann, []

    def refuse(self, route: str, body: Any, words: str = "", *statuses: int) -> None:
        """Posts a bad body; one of several words, parted by ``|``, must be in the reason."""
        answer = self.ann.post(route, body)
        if route in TRAINING and answer.status_code == 200:
            self.ann.place += body["model_id"] == self.ann.ids["model"]  # its number is used up
        self.check(f"{route} {str(body)[-200:]}", answer, words, statuses or (400,))

    def check(self, what: str, answer: httpx.Response, words: str, statuses: Any) -> None:
        try:
            reason = refused(self.ann, answer, statuses)
            assert not words or any(word in reason for word in words.split("|")), (
                f"the reason has none of {words}: {reason[:300]}"
            )
        except AssertionError as error:
            self.wrong.append(f"{what}: {str(error).splitlines()[0]}")


@pytest.fixture
def battery(ann):
    made = Battery(ann)
    yield made
    if made.wrong:
        pytest.fail(f"{len(made.wrong)}:\n" + "\n".join(made.wrong), pytrace=False)


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_of_each_route(route, ann, battery):
    for path, value in wrongs(body_of(route, ann)):
        if route == "load_weights" and path == ("model_id",) and value in (None, MISSING):
            continue  # its other form
        names = [part for part in path if isinstance(part, str)][-3:]
        body = changed(body_of(route, ann), path, value)
        battery.refuse(route, body, "|".join(["NaN", "Infinity", "datum", *names]))


def test_bodies_that_are_no_objects(ann, battery):
    for route in ("create_session", "forward_backward", "asample"):
        good = json.dumps(body_of(route, ann)).encode()
        for body in (b"", good[:-1], good + b"}", b"[]", b"null", b'{"model_id": "\xff"}'):
            battery.refuse(route, body, "body|JSON")
        for body in (b"[" * 100_000, b'{"a":' * 1000 + b"1" + b"}" * 1000):
            battery.refuse(route, body, "JSON")


def test_another_tenants_objects_look_missing(ann, bob, battery):
    """Bob's ids get the same status and the same words as ids of nobody."""
    session = bob.ids["session"]
    nobody = {name: id.replace(session, NOBODY) for name, id in bob.ids.items()}
    nobody |= {"future": NOBODY, "answer": "a-" + NOBODY}
    own, project = {"session_id": ann.ids["session"]}, {"destination_project_id": "p"}
    requests: list[tuple[str, str, Any]] = [("POST", route, None) for route in ROUTES]
    requests += [
        ("POST", "load_weights", own | {"model_seq_id": 78, "path": ann.ids["weights"]}),
        ("POST", "asample", {"model_path": ann.ids["sampler_weights"], "prompt": CHUNKS}),
        ("POST", "retrieve_future", {"request_id": ann.ids["answer"]}),
        ("POST", "copy_weights", project | {"source_path": ann.ids["weights"]}),
    ]
    run = f"training_runs/{ann.ids['model']}"
    kept = f"{run}/checkpoints/weights/kept"
    session_path = f"sessions/{ann.ids['session']}"
    requests += [("GET", path, b"") for path in (run, f"{run}/checkpoints", session_path)]
    requests += [("GET", f"samplers/{ann.ids['sampler']}", b"")]
    requests += [("POST", path, b"") for path in (f"{session_path}/finish", f"{kept}/publish")]
    requests += [("DELETE", kept, b""), ("PUT", f"{kept}/ttl", {"ttl_seconds": 3600})]
    tried = 0
    for method, path, given in requests:
        body = body_of(path, ann) if given is None else given
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        for name, id in ann.ids.items():
            if f'"{id}"' not in text.decode() and id not in path:
                continue
            bob.done("session_heartbeat", {"session_id": session})
            reasons = []
            for other in (bob.ids, nobody):
                sent = text.replace(f'"{id}"'.encode(), f'"{other[name]}"'.encode())
                sent = sent.replace(b'"model_seq_id": 78', b'"model_seq_id": %d' % (3000 + tried))
                if given is None and path in TRAINING:
                    sent = json.dumps(json.loads(sent) | {"seq_id": ann.place}).encode()
                answer = ann.send(method, path.replace(id, other[name]), sent)
                if path in TRAINING and answer.status_code == 200 and "model_seq_id" not in body:
                    ann.place += 1
                gone = path in ("retrieve_future", "cancel_future")
                words, statuses = ("not kept", (410,)) if gone else ("there is no", (404,))
                battery.check(f"{method} {path} {name}", answer, words, statuses)
                result = answer.json()
                if answer.status_code == 200:
                    result = ann.outcome(result["request_id"])
                reasons.append(str(result).replace(other[name], name).replace(session, NOBODY))
                tried += 1
            assert reasons[0] == reasons[1], f"{method} {path} {name}"
    assert tried > 60


ODD = """samplers/..%2f..%2fetc samplers/%00 samplers/%ff%fe samplers/ training_runs/.. nonsense
training_runs/{model}/checkpoints/weights/..%2fkept training_runs/%22%27;-- sessions/%0a
training_runs/{model}/checkpoints/nonsense/kept training_runs/{model}/checkpoints/weights/none
sessions/none/trace_export %2e%2e/debug/state files/ files/x files/..%2f..%2fserver.db files/e30"""


def test_paths_methods_queries_and_keys(ann, battery):
    for route in ROUTES:
        battery.check(f"BREW {route}", ann.send("BREW", route, {}), route, (405,))
    for path in (*ODD.split(), "samplers/" + "x" * 5000, "files/" + "A" * 86):
        for method in ("GET", "POST", "DELETE") if "/" in path else ("GET",):
            answer = ann.send(method, path.format(**ann.ids))
            battery.check(f"{method} {path[:80]}", answer, "", (400, 404, 405))
    for query in ("limit=-1", "limit=x", "limit=", "limit=1.5", "offset=-1", "limit=" + "9" * 30):
        for page in ("training_runs", "checkpoints", "sessions"):
            answer = ann.send("GET", f"{page}?{query}")
            battery.check(f"{page}?{query}", answer, query.split("=")[0], (400,))
    for key in ("", "x", "tml-" + "A" * 43, "x" * 10_000):
        answer = ann.send("POST", "get_info", {}, **{"x-api-key": key})
        battery.check(f"key {key[:10]}", answer, "key", (401,))


NAMES = ["a/b", "../x", "..", "", " ", "a\\b", "a@b", "\0", "a\nb", "x" * 201, ".hidden", "\u202ex"]
PATHS = """x tinker:// tinker://a tinker://a/weights tinker://a/weights/b/c tinker://../weights/x
tinker://a/nonsense/b file:///etc/passwd /etc/passwd tinker:///weights/x"""
PLACES = {"load_weights": "path", "weights_info": "tinker_path", "copy_weights": "source_path"}
PLACES |= {"create_sampling_session": "model_path", "asample": "model_path"}


def test_names_paths_and_bases(ann, battery):
    for route in SAVES:
        for name in NAMES:
            battery.refuse(route, body_of(route, ann) | {"path": name}, "name")
        for ttl in (0, 3599, 10 * 366 * 86400 + 1, 2**62):
            battery.refuse(route, body_of(route, ann) | {"ttl_seconds": ttl}, "ttl_seconds")
    battery.refuse(
        "save_weights", body_of("save_weights", ann) | {"path": "kept"}, "exists already"
    )
    for key in ("x", "age1nobody", "age1" + "q" * 58):
        external = body_of("save_weights_external", ann) | {"age_encryption_recipients": [key]}
        battery.refuse("save_weights_external", external, "age")
    for route, field in PLACES.items():
        body = {"prompt": CHUNKS} if route == "asample" else body_of(route, ann)
        for path in (*PATHS.split(), "tinker://" + "x" * 100_000):
            words = "path|checkpoint|sampled"
            battery.refuse(route, body | {"seq_id": ann.place, field: path}, words, 400, 404)
        if route not in ("weights_info", "copy_weights"):
            wrong = {"seq_id": ann.place, "base_model": "nonsense"}
            battery.refuse(route, body | wrong, "base_model")


def test_models_that_cannot_be_made(ann, battery):
    """Whatever is requested of such a model fails too."""
    nothing = {"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False}
    wrong = [({"lora_config": {"rank": rank}}, "rank") for rank in (0, -1, 9, 2**31, 2**70)]
    wrong += [({"lora_config": nothing}, "train"), ({"optimizer_config": {"type": "x"}}, "adamw")]
    wrong += [({"optimizer_config": {"type": "dimuon", "version": 2}}, "version")]
    wrong += [({"user_metadata": {"note": "x" * (1 << 16)}}, "user_metadata")]
    wrong += [({"base_model": "nonsense"}, "base_model")]
    for i, (options, words) in enumerate(wrong):
        battery.refuse("create_model", ann.new_model(800 + i, **options), words)
    for field, value in {"tags": ["x" * (1 << 19)], "display_name": "x" * (1 << 19)}.items():
        battery.refuse("create_session", {field: value}, field)
    here = {"model_id": f"{ann.ids['session']}:train:800"}
    asked = {"forward_backward": {"forward_backward_input": batch()}, "save_weights": {"path": "x"}}
    asked["optim_step"] = {}
    for place, (route, body) in enumerate(asked.items(), 1):
        words = "create or load it|is not in training"
        battery.refuse(route, here | {"seq_id": place} | body, words)


def test_prompts_and_settings_of_samples(ann, site, battery):
    context = site.server.base.cfg.context

    def prompt(*chunks):
        return {"prompt": {"chunks": list(chunks)}, "target_prompt_logprobs": None}

    def targets(data, *shape):
        return {"target_prompt_logprobs": {"data": data, "dtype": "int64", "shape": shape}}

    cases = [
        (prompt({"tokens": [5] * context}), "context"),
        (prompt({"tokens": [2**31 - 1]}), str(2**31 - 1)),
        (prompt(), "prompt"),
        (prompt({"type": "image", "data": "eA=="}), "image"),
        *(({"num_samples": n}, "num_samples") for n in (0, -1, 4097, 2**40)),
        *(({name: 21}, name) for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k")),
        (targets([5], 1, 1), "target_prompt"),
        (targets([5, 97], 2, 1), "97"),
        (targets([], 2, 2**61), "target_prompt"),
        (targets([], 2**50, 0), "target_prompt"),
    ]
    params = {
        "max_tokens": [0, -1, context, 2**31 - 1],
        "temperature": [-0.1, 1e39],
        "top_p": [0, 1.01, -1],
        "top_k": [-2, 2**31],
        "seed": [2**64, -(2**63) - 1],
        "stop": [[[5]], [5, "x"], 5, "x", [""], [-1], list(range(90)), {"x": 1}, [2**40]],
    }
    for change, words in cases:
        battery.refuse("asample", body_of("asample", ann) | change, words)
    for name, values in params.items():
        for value in values:
            body = changed(body_of("asample", ann), ("sampling_params", name), value)
            battery.refuse("asample", body, name)


def test_numbers_of_requests(ann, battery):
    """A used number gets 409. A request far ahead waits, and delays no other."""
    here: dict[str, Any] = {"model_id": ann.ids["model"]}
    ann.step("optim_step", {"adam_params": {"learning_rate": 0.5}})
    used = here | {"seq_id": ann.place - 1}
    words = f"request {ann.place} of"
    battery.refuse("optim_step", used | {"adam_params": {"learning_rate": 0.6}}, words, 409)
    battery.refuse("forward_backward", used | {"forward_backward_input": batch()}, words, 409)
    battery.refuse("create_model", ann.new_model(0, lora_config={"rank": 2}), "number|request", 409)
    sample = {"sampling_session_id": ann.ids["sampler"], "seq_id": 1, "prompt": CHUNKS}
    battery.refuse("asample", sample | {"num_samples": 2}, "number", 409)
    sampler = {"session_id": ann.ids["session"], "sampling_session_seq_id": 0}
    base = {"base_model": ann.site.server.name}
    battery.refuse("create_sampling_session", sampler | base, "number", 409)
    copied = body_of("copy_weights", ann) | {"model_seq_id": 0}
    battery.refuse("copy_weights", copied, "new model_seq_id", 409)
    ann.done("unload_model", {"model_id": ann.done("create_model", ann.new_model(400))["model_id"]})
    battery.refuse("create_model", ann.new_model(400), "has ended", 409)
    for place in (ann.place + 7_000, 2**31 - 1):
        answer = ann.post("optim_step", here | {"seq_id": place, "adam_params": {}})
        assert answer.status_code == 200
    for place in (2**31, 2**63, 10**40):
        battery.refuse("optim_step", here | {"seq_id": place, "adam_params": {}}, "seq_id")
        battery.refuse("create_model", ann.new_model(place), "model_seq_id")
        new = sampler | base | {"sampling_session_seq_id": place}
        battery.refuse("create_sampling_session", new, "sampling_session_seq_id")


def test_clients_that_disconnect_leave_nothing(ann, site):
    """While they wait for a result, and within a body."""

    def leave(path: str, body: bytes, length: int) -> None:
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {ann.key}\r\n"
        with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)

    ahead = {"model_id": ann.ids["model"], "seq_id": ann.place + 9_000, "adam_params": {}}
    waiting = ann.post("optim_step", ahead).json()["request_id"]
    poll = json.dumps({"request_id": waiting}).encode()
    threads = len(threading.enumerate())
    for _ in range(30):
        leave("retrieve_future", poll, len(poll))
        leave("asample", b'{"prompt', 1 << 20)
    assert ann.outcome(ann.ids["future"])
    assert len(threading.enumerate()) <= threads + 8  # at most a few more of asyncio's own


def test_the_other_tenant_is_not_affected(bob, site, before):
    results, threads = before
    assert results_of(bob, 2) == results
    assert threads <= {thread.name for thread in threading.enumerate()}
    until = time.monotonic() + 30  # a snapshot may be taken just now
    while state_of(site.server)["training"]["waiting"] and time.monotonic() < until:
        time.sleep(0.05)
    state = state_of(site.server)
    assert (state["trouble"], state["training"]["waiting"]) == ("", 0)
    assert httpx.get(f"{site.url}/ready").status_code == 200


def test_the_folder_opens_again(site, sites, tiny_base, folder, ann, bob, before):
    """States and failed futures survive a restart."""
    bad = {"model_id": ann.ids["model"], "seq_id": ann.place, "adam_params": {"beta1": 2}}
    failed = ann.post("optim_step", bad).json()["request_id"]
    ann.place += 1
    reason = ann.outcome(failed)
    unnamed = {"sampling_session_id": bob.ids["unnamed"], "prompt": CHUNKS}
    sampled = bob.done("asample", unnamed | {"seq_id": 1, "sampling_params": {"seed": 1}})
    site.close()
    keys = keys_.Keys(folder / "keys")
    ann.site = bob.site = sites(tiny_base(), folder / "server", keys=keys, limits=LIMITS)
    assert ann.outcome(failed) == reason
    assert reason["category"] == "user"
    assert results_of(bob, 3) == before[0]
    again = bob.done("asample", unnamed | {"seq_id": 2, "sampling_params": {"seed": 1}})
    assert again == sampled
    gone = bob.post("retrieve_future", {"request_id": bob.ids["answer"]})
    assert gone.status_code == 410, "clients ask again for samples of before"
