"""What no client should send, to one server of two tenants: each is refused for a reason that names
it, and nobody else notices.

A refusal is a 4xx that clients do not repeat (not 408, 409 or 429, which mean load or a number that
was used), or a future that fails as the user's mistake. The tests run in the file's order: the
first makes what must be unchanged, the last look whether it is.
"""

import copy
import gzip
import json
import resource
import socket
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from mint_jax.service import keys as keys_
from mint_jax.service import tinker_futures
from mint_jax.service.endpoints import TABLE
from mint_jax.service.gate import Limits
from mint_jax.service.keys import SCOPES
from mint_jax.service.monitoring import state_of
from mint_jax.service.wire import messages
from tests.service import bad_world
from tests.service.bad_world import (
    CHUNKS,
    JSON,
    MISSING,
    NOBODY,
    PROTOBUF,
    TRAINING,
    Tenant,
    batch,
    bodies,
    changed,
    put,
    refused,
    wrongs,
)
from tests.service.sites import sites as sites

pytestmark = pytest.mark.long

BODY = 4 << 20  # bytes
BODY_S = 1.0
LIMITS = Limits(body_bytes=BODY, held_bytes=64 * BODY, body_s=BODY_S)
COUNT = []  # a mark for each bad input


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def secrets(folder):
    return [keys_.add(folder / "keys", tenant, SCOPES)[1] for tenant in ("ann", "bob")]


@pytest.fixture(scope="module")
def site(sites, tiny_base, folder, secrets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinker_futures, "POLL_S", 20.0)
        yield sites(tiny_base(), folder / "server", keys=keys_.Keys(folder / "keys"), limits=LIMITS)


@pytest.fixture(scope="module")
def tenants(site, secrets):
    with httpx.Client(timeout=60) as web:
        yield [Tenant(site, secret, web).settle() for secret in secrets]


@pytest.fixture(scope="module")
def ann(tenants):
    """Who sends what is bad."""
    return tenants[0]


@pytest.fixture(scope="module")
def bob(tenants):
    """Who must not notice."""
    return tenants[1]


def told_of(bob: Tenant, number: int) -> list:
    """What a tenant gets: a step of training from its checkpoint, log-probabilities behind it, and
    greedy samples. All bits of it.
    """
    told = {
        "session_id": bob.session,
        "model_seq_id": number,
        "path": bob.paths["weights"],
        "optimizer": True,
    }
    model = bob.done("load_weights", told)["model_id"]
    input_ = batch((9, 8, 7, 6, 5))
    calls = (
        ("forward_backward", {"forward_backward_input": input_}),
        ("optim_step", {"adam_params": {"learning_rate": 1e-2}}),
    )
    calls = *calls, ("forward_backward", {"forward_input": input_})
    results = [
        bob.done(path, one | {"model_id": model, "seq_id": i})
        for i, (path, one) in enumerate(calls, 1)
    ]
    sampled = bob.sample(max_tokens=8, temperature=0)
    return [
        {key: value for key, value in result.items() if key != "request_id"}
        for result in (*results, sampled)
    ]


@pytest.fixture(scope="module")
def before(tenants, bob, site):
    """What bob gets before anything bad was sent, and which threads there are then."""
    threads = {thread.name for thread in threading.enumerate()}
    assert {"executor", "finisher", "database", "engine", "web"} <= threads
    return told_of(bob, 1), threads


@pytest.fixture(autouse=True)
def goes_on(before, ann):
    """Behind each test the model that was wronged trains on: its order is not stuck."""
    yield
    ann.train("forward_backward", {"forward_backward_input": batch()})
    ann.train("optim_step", {"adam_params": {"learning_rate": 1e-3}})


class Battery:
    """Collects what was not refused as it should be, so that one failure does not hide the
    others.
    """

    def __init__(self, ann: Tenant):
        self.ann, self.wrong = ann, []

    def refuse(
        self,
        what: str,
        answer: httpx.Response,
        names: str = "",
        statuses: tuple[int, ...] = (400,),
        trains: bool = False,
    ) -> None:
        """
        Args:
            names: what the reason says; one of several, parted by ``|``.
            trains: a number of the model is used up where this was accepted.
        """
        COUNT.append(what)
        if trains and answer.status_code == 200:
            self.ann.place += 1
        try:
            reason = refused(self.ann, answer, statuses)
            assert not names or any(name in reason for name in names.split("|")), (
                f"the reason names no {names}: {reason[:300]}"
            )
        except AssertionError as error:
            self.wrong.append(f"{what}: {str(error).splitlines()[0]}")

    def end(self) -> None:
        if self.wrong:
            pytest.fail(f"{len(self.wrong)}:\n" + "\n".join(self.wrong), pytrace=False)


@pytest.fixture
def battery(ann):
    made = Battery(ann)
    yield made
    made.end()


@pytest.mark.parametrize("route", bad_world.FIELDS)
def test_each_field_of_each_route(route, ann, battery):
    """Left out, null, and of every type and size that it has not."""
    for field, value in wrongs(route):
        body = changed(bodies(ann)[route], field, value)
        if route == "load_weights" and field == "model_id" and value in (None, MISSING):
            continue  # the other form of it
        shown = "left out" if value is MISSING else repr(value)[:40]
        names = "|".join(
            [
                "NaN",
                "Infinity",
                "datum",
                *[part for part in field.split(".") if not part.isdecimal()][-3:],
            ]
        )
        own = field in ("model_id", "seq_id")
        battery.refuse(
            f"{route} {field} {shown}",
            ann.post(route, body),
            names,
            trains=route in TRAINING and not own,
        )


@pytest.mark.parametrize("route", bad_world.FIELDS)
def test_bodies_that_are_no_objects(route, ann, battery):
    good = json.dumps(bodies(ann)[route]).encode()
    for body in (b"", good[:-1], good + b"}", b"[]", b"null", b'{"model_id": "\xff"}', b"\x00"):
        battery.refuse(f"{route} {body[:30]!r}", ann.post(route, body), "body|JSON")
    for body in (
        b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"model_id": ' + b"9" * 5000 + b"}",
    ):
        battery.refuse(f"{route} {body[:30]!r}", ann.post(route, body), "JSON|session_id|model_id")


def of(bob: Tenant, whose: Tenant | None) -> dict[str, str]:
    """Bob's ids; or nobody's, formed as his are."""
    told = {
        "session": bob.session,
        "model": bob.model,
        "sampler": bob.sampler,
        "future": bob.future,
        "answer": bob.answer,
    } | bob.paths
    if whose is None:
        told = {name: id.replace(bob.session, NOBODY) for name, id in told.items()} | {
            "future": NOBODY,
            "answer": "a-" + NOBODY,
        }
    return told


FOREIGN = [  # (method, path, body), with ids to be put in
    ("POST", "session_heartbeat", {"session_id": "{session}"}),
    ("POST", "sessions/{session}/finish", {"reason": {"type": "success"}}),
    (
        "POST",
        "create_model",
        {"session_id": "{session}", "model_seq_id": 77, "lora_config": {"rank": 8}},
    ),
    ("POST", "load_weights", {"session_id": "{session}", "model_seq_id": 78, "path": "{weights}"}),
    ("POST", "load_weights", {"model_id": "{model}", "seq_id": 50, "path": "{weights}"}),
    ("POST", "load_weights", {"mine": True, "path": "{weights}"}),
    ("POST", "load_weights", {"mine": True, "path": "{sampler_weights}"}),
    ("POST", "get_info", {"model_id": "{model}"}),
    ("POST", "unload_model", {"model_id": "{model}"}),
    (
        "POST",
        "forward_backward",
        {"model_id": "{model}", "seq_id": 50, "forward_backward_input": batch()},
    ),
    ("POST", "forward", {"model_id": "{model}", "seq_id": 50, "forward_input": batch()}),
    ("POST", "optim_step", {"model_id": "{model}", "seq_id": 50, "adam_params": {}}),
    ("POST", "save_weights", {"model_id": "{model}", "seq_id": 50, "path": "x"}),
    ("POST", "save_weights_for_sampler", {"model_id": "{model}", "seq_id": 50, "path": "x"}),
    ("POST", "save_weights_external", {"model_id": "{model}", "seq_id": 50, "path": "x"}),
    (
        "POST",
        "create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 79, "base_model": "{base}"},
    ),
    (
        "POST",
        "create_sampling_session",
        {"session_id": "{own}", "sampling_session_seq_id": 79, "model_path": "{sampler_weights}"},
    ),
    (
        "POST",
        "create_sampling_session",
        {"session_id": "{own}", "sampling_session_seq_id": 79, "model_path": "{weights}"},
    ),
    ("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
    ("POST", "asample", {"sampling_session_id": "{sampler}", "seq_id": 50, "prompt": CHUNKS}),
    ("POST", "asample", {"model_path": "{sampler_weights}", "prompt": CHUNKS}),
    ("GET", "samplers/{sampler}", None),
    ("POST", "retrieve_future", {"request_id": "{future}"}),
    ("POST", "retrieve_future", {"request_id": "{answer}"}),
    ("POST", "retrieve_futures", {"target": {"sampling_session_id": "{sampler}"}, "timeout": 0}),
    ("POST", "cancel_future", {"request_id": "{answer}"}),
    ("POST", "cancel_future", {"request_ids": ["{answer}"]}),
    ("POST", "weights_info", {"tinker_path": "{weights}"}),
    (
        "POST",
        "copy_weights",
        {"source_path": "{weights}", "session_id": "{own}", "model_seq_id": 80},
    ),
    (
        "POST",
        "copy_weights",
        {"source_path": "{mine}", "session_id": "{session}", "model_seq_id": 80},
    ),
    ("POST", "copy_weights", {"source_path": "{weights}", "destination_project_id": "p"}),
    ("GET", "training_runs/{model}", None),
    ("GET", "training_runs/{model}/checkpoints", None),
    ("DELETE", "training_runs/{model}/checkpoints/weights/kept", None),
    ("POST", "training_runs/{model}/checkpoints/weights/kept/publish", None),
    ("DELETE", "training_runs/{model}/checkpoints/weights/kept/publish", None),
    ("PUT", "training_runs/{model}/checkpoints/weights/kept/ttl", {"ttl_seconds": 3600}),
    ("GET", "training_runs/{model}/checkpoints/external_weights/kept/external_weights_urls", None),
    ("GET", "sessions/{session}", None),
]


@pytest.mark.parametrize(
    "number", range(len(FOREIGN)), ids=lambda i: f"{FOREIGN[i][1].split('/')[0]}-{i}"
)
def test_what_is_another_tenant_s_is_as_if_it_were_not(number, ann, bob, site, battery):
    """The same status and the same words for bob's things as for nobody's, though bob was heard of
    a moment ago.
    """
    method, path, body = FOREIGN[number]
    bob.done("session_heartbeat", {"session_id": bob.session})
    heard = []
    own = {"own": ann.session, "mine": ann.paths["weights"], "base": site.server.name}
    for whose in (bob, None):
        told, ids = dict(body or {}), of(bob, whose)
        if told.pop("mine", False):
            told |= {"model_id": ann.model, "seq_id": ann.place}
        path_, text = path, json.dumps(told)
        for name, id in (ids | own).items():
            path_, text = path_.replace("{" + name + "}", id), text.replace("{" + name + "}", id)
        answer = ann.send(method, path_, b"" if body is None else text.encode())
        # of which an id of before a restart is one too: clients ask anew
        gone = path in ("retrieve_future", "cancel_future")
        kind = '"model_path": "{weights}"' in json.dumps(body)  # looked at before the checkpoint
        statuses, words = (
            ((410,), "not kept")
            if gone
            else ((400,), "cannot be sampled")
            if kind
            else ((404,), "there is no")
        )
        battery.refuse(f"{method} {path_}", answer, words, statuses, trains="mine" in (body or {}))
        reason = (
            answer.json() if answer.status_code != 200 else ann.outcome(answer.json()["request_id"])
        )
        heard.append(
            str(reason)
            .replace(bob.session, NOBODY)
            .replace(ids["future"], NOBODY)
            .replace(ids["answer"], "a-" + NOBODY)
        )
    assert heard[0] == heard[1]


METHODS = ("GET", "HEAD", "PUT", "DELETE", "BREW")
ODD = [
    "samplers/..%2f..%2fetc", "samplers/%00", "samplers/%ff%fe", "samplers/" + "x" * 5000, "samplers/a/b", "samplers/%2e%2e", "samplers/",  # noqa: E501
    "training_runs/..", "training_runs/%2e%2e%2f%2e%2e", "training_runs/{model}/checkpoints/weights/..%2fkept",  # noqa: E501
    "training_runs/{model}/checkpoints/weights/kept%00", "training_runs/{model}/checkpoints/nonsense/kept", "training_runs/%22%27;--",  # noqa: E501
    "training_runs/{model}/checkpoints/weights/none", "training_runs/{model}%20/checkpoints", "sessions/%0a", "sessions/*", "sessions/%25",  # noqa: E501
    "training_runs/{model}/checkpoints/weights/kept/archive", "sessions/none/trace_export", "nonsense", "%2e%2e/debug/state", "",  # noqa: E501
    "files/", "files/x", "files/..%2f..%2fserver.db", "files/" + "A" * 86, "files/%00", "files/" + "é" * 20, "files/e30",  # noqa: E501
]  # fmt: skip
QUERIES = [
    "limit=-1",
    "limit=x",
    "limit=",
    "limit=1.5",
    "offset=-1",
    "limit=" + "9" * 30,
    "limit=+1",
]


def test_paths_methods_and_queries(ann, battery):
    for route in bad_world.FIELDS:
        for method in METHODS:
            answer = ann.send(method, route, {})
            if method == "HEAD":
                assert (answer.status_code, answer.content) == (405, b"")
                continue
            battery.refuse(f"{method} {route}", answer, route.split("/")[-1], (405,))
    for path in ODD:
        path = path.format(model=ann.model, session=ann.session)
        for method in ("GET", "POST", "DELETE") if "/" in path else ("GET",):
            battery.refuse(
                f"{method} {path[:80]}", ann.send(method, path), statuses=(400, 404, 405)
            )
    for query in QUERIES:
        for page in ("training_runs", "checkpoints", "sessions"):
            battery.refuse(
                f"GET {page}?{query}", ann.send("GET", f"{page}?{query}"), query.split("=")[0]
            )
    huge = ann.send("GET", f"training_runs?limit={10**17}&offset={10**17}")
    assert (huge.status_code, huge.json()["training_runs"]) == (200, [])
    for key in ("", "x", "tml-" + "A" * 43, "é".encode().decode("latin-1"), "x" * 10_000):
        answer = ann.web.post(
            f"{ann.site.url}/api/v1/get_info",
            headers={"x-api-key": key.encode("latin-1")},
            json={"model_id": ann.model},
        )
        battery.refuse(f"key {key[:10]}", answer, "key", (401,))


def zstd(data: bytes) -> bytes:
    return zstandard.compress(data)


def test_codings_types_and_sizes(ann, battery):
    """Bombs, broken frames and what is no protobuf; the largest amount of memory that the process
    ever had hardly grows.
    """
    good = bad_world.message(ann.model, ann.place).SerializeToString()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bombs = {"gzip": gzip.compress(bytes(1 << 28), 1), "zstd": zstd(bytes(1 << 28))}
    peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    for coding, pack in (("gzip", gzip.compress), ("zstd", zstd)):
        said = PROTOBUF | {"content-encoding": coding}
        whole = pack(good)
        for what, data, status in [
            ("a bomb", bombs[coding], 413), ("a bomb in a bomb", pack(bombs[coding]), 400), ("cut off", whole[:-3], 400), ("", b"", 400),  # noqa: E501
            ("no frame", b"nonsense", 400), ("a flip", whole[:-6] + bytes([whole[-6] ^ 255]) + whole[-5:], 400), ("plain", good, 400),  # noqa: E501
            ("rubbish behind", whole + b"xyz", 400), ("many frames", pack(b"") * 3000, 400), ("one byte", whole[:1], 400),  # noqa: E501
        ]:  # fmt: skip
            battery.refuse(
                f"{coding}: {what}", ann.post("forward_backward", data, said), statuses=(status,)
            )
    for coding in ("br", "deflate", "gzip, gzip", "zstd, br", "x" * 100):
        battery.refuse(
            coding,
            ann.post("forward_backward", good, PROTOBUF | {"content-encoding": coding}),
            "Content-Encoding",
            (415,),
        )
    for kind in ("text/plain", "", "application/x-protobuf2", "x" * 5000):
        battery.refuse(
            f"type {kind[:30]}",
            ann.post("forward_backward", good, {"content-type": kind}),
            "content type",
        )
    battery.refuse(
        "JSON as protobuf",
        ann.post("forward_backward", bodies(ann)["forward_backward"], PROTOBUF),
        "ForwardBackwardRequest",
    )
    battery.refuse("protobuf as JSON", ann.post("forward_backward", good, JSON), "JSON")
    for route in bad_world.FIELDS:
        rule = TABLE.find("POST", f"/api/v1/{route}")
        most = BODY if rule is not None and rule.data else LIMITS.small_body_bytes
        battery.refuse(f"{route}: too long", ann.post(route, b" " * (most + 1)), str(most), (413,))
    battery.refuse(
        "too long without a key", ann.send("POST", "client/config", b" " * 20_000), statuses=(413,)
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 100 << 10, f"{grown >> 10} MiB more"


def of_message(ann: Tenant, change) -> bytes:
    told = bad_world.message(ann.model, ann.place)
    change(told, told.data[0])
    return told.SerializeToString()


def sparse(values, rows, columns, shape=(3, 4), dtype=messages.INT64, name="target_tokens"):
    def change(told, datum):
        tensor = datum.loss_fn_inputs[name]
        tensor.Clear()
        tensor.sparse_csr.values = np.array(values, "<i8").tobytes()
        tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
            np.array(rows, "<i8").tobytes(),
            np.array(columns, "<i8").tobytes(),
        )
        tensor.dtype = dtype
        tensor.shape.extend(shape)
        put(datum, "weights", np.ones(12, "<f4"), messages.FLOAT32, (3, 4))

    return change


def tensor(name, values, dtype, shape=(3,)):
    return lambda told, datum: put(datum, name, values, dtype, shape)


def tokens(data: bytes | list[int]):
    def change(told, datum):
        datum.model_input[0].encoded_text.tokens = (
            data if isinstance(data, bytes) else np.array(data, "<i4").tobytes()
        )

    return change


ONES, IDS = np.ones(3, "<f4"), np.array([5, 6, 7], "<i8")
NAN, INF = np.array([1, np.nan, 1], "<f4"), np.array([1, np.inf, 1], "<f4")
CHANGES = {
    "no data": lambda told, datum: told.ClearField("data"),
    "no tokens": lambda told, datum: datum.ClearField("model_input"),
    "an image": lambda told, datum: datum.model_input.add().image.SetInParent(),
    "token 97": tokens([5, 97, 6]),
    "too many tokens": tokens([5] * 1000),
    "no targets": lambda told, datum: datum.loss_fn_inputs.pop("target_tokens"),
    "targets as floats": tensor("target_tokens", ONES, messages.FLOAT32),
    "int32 said to be int64": tensor("target_tokens", IDS.astype("<i4"), messages.INT64),
    "a target out of the vocabulary": tensor("target_tokens", np.array([5, 97, 6]), messages.INT64),
    "too many targets a position": tensor("target_tokens", np.zeros(3000, "<i8"), messages.INT64, (3, 1000)),  # noqa: E501
    "NaN as weight": tensor("weights", NAN, messages.FLOAT32),
    "a sparse shape bomb": sparse([5], [0, 1, 1, 1], [0], (3, 2**40)),
    "a sparse column beyond": sparse([5, 6], [0, 1, 2, 2], [0, 4]),
    "an unknown loss": lambda told, datum: setattr(told, "loss_fn", "nonsense"),
    "dro without beta": lambda told, datum: setattr(told, "loss_fn", "dro"),
    "an unknown option": lambda told, datum: told.loss_fn_config.update({"nonsense": 1.0}),
    "a span that is too long": lambda told, datum: datum.model_input_spans.add().prompt_tokens.MergeFrom(span("x", 0, 2**62)),  # noqa: E501
}  # fmt: skip


def span(id: str, offset: int, length: int):
    made = messages.ForwardBackwardRequest().data.add().model_input_spans.add().prompt_tokens
    made.sequence_id, made.offset, made.length = id, offset, length
    return made


def test_protobuf(ann, battery):
    for what, change in CHANGES.items():
        battery.refuse(
            what, ann.post("forward_backward", of_message(ann, change), PROTOBUF), trains=True
        )
    for what, change in {
        "clip": ("clip_low_threshold", 2.0),
        "NaN": ("clip_high_threshold", float("nan")),
        "": ("beta", -1.0),
    }.items():

        def options(told, datum, change=change):
            told.loss_fn = "dro" if change[0] == "beta" else "ppo"
            told.loss_fn_config[change[0]] = change[1]
            for name in ("logprobs", "advantages"):
                put(datum, name, ONES, messages.FLOAT32)

        battery.refuse(
            f"option {what}",
            ann.post("forward_backward", of_message(ann, options), PROTOBUF),
            change[0],
            trains=True,
        )
    good = bad_world.message(ann.model, ann.place).SerializeToString()
    for cut in range(1, len(good), 7):
        answer = ann.post("forward_backward", good[:-cut], PROTOBUF)
        if answer.status_code == 200:  # cut between two fields, it is a message still
            battery.refuse(f"cut by {cut}", answer, trains=True)
        else:
            battery.refuse(f"cut by {cut}", answer, "ForwardBackwardRequest|seq_id|model_id")
    for seq_id in (0, -1, -(2**31)):
        told = bad_world.message(ann.model, seq_id).SerializeToString()
        battery.refuse(f"seq_id {seq_id}", ann.post("forward_backward", told, PROTOBUF), "seq_id")
    for id in ("", "x", "x" * 10_000, "\0", NOBODY + ":train:0"):
        told = bad_world.message(id, 1).SerializeToString()
        battery.refuse(
            f"model {id[:10]!r}", ann.post("forward_backward", told, PROTOBUF), "model", (400, 404)
        )
    for junk in (
        b"\xff" * 9,
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x1a\x80\x80\x80\x80\x08",
        b"\x0b" * 200_000,
        b"\x0a\x02\xff\xfe",
    ):
        battery.refuse(f"junk {junk[:8]!r}", ann.post("forward_backward", junk, PROTOBUF))


def test_a_sequence_of_another_tenant_s_gives_nothing(ann, bob):
    """Spans may name any sequence; what they name of bob's is as if nobody had it."""
    told = []
    for id in (f"{bob.answer}.0", "nobody.0"):
        body = of_message(
            ann,
            lambda told, datum, id=id: datum.model_input_spans.add().prompt_tokens.MergeFrom(
                span(id, 0, 3)
            ),
        )
        ann.place += 1
        told.append(ann.outcome(ann.post("forward_backward", body, PROTOBUF).json()["request_id"]))
    assert told[0] == told[1]
    assert "error" not in told[0]


NAMES = ["a/b", "../x", "..", "", " ", "a\\b", "a@b", "\0", "a\nb", "x" * 201, ".hidden", "\u202ex"]
PATHS = [
    "x", "tinker://", "tinker://a", "tinker://a/weights", "tinker://a/weights/b/c", "tinker://../weights/x", "tinker://a/nonsense/b",  # noqa: E501
    "file:///etc/passwd", "/etc/passwd", "tinker:///weights/x", "tinker://a//x", "http://127.0.0.1/", "tinker://" + "x" * 100_000,  # noqa: E501
]  # fmt: skip


def test_names_paths_and_what_is_told_beside_them(ann, site, battery):
    large = {"note": "x" * (1 << 16)}
    for route in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        for name in NAMES:
            battery.refuse(
                f"{route} {name[:20]!r}",
                ann.post(route, bodies(ann)[route] | {"path": name}),
                "name",
                trains=True,
            )
        for ttl in (0, 1, 3599, 10 * 366 * 86400 + 1, 2**62):
            battery.refuse(
                f"{route} ttl {ttl}",
                ann.post(route, bodies(ann)[route] | {"ttl_seconds": ttl}),
                "ttl_seconds",
                trains=True,
            )
        taken = bodies(ann)[route] | {"path": "kept"}
        if route == "save_weights":
            battery.refuse("a taken name", ann.post(route, taken), "exists already", trains=True)
    battery.refuse(
        "metadata",
        ann.post("save_weights", bodies(ann)["save_weights"] | {"user_metadata": large}),
        "user_metadata",
        trains=True,
    )
    for kind in ("inflight", "nonsense", "x" * 10_000):
        battery.refuse(
            "kind",
            ann.post(
                "save_weights_for_sampler", bodies(ann)["save_weights_for_sampler"] | {"kind": kind}
            ),
            trains=True,
        )
    for keys in (["x"], ["age1nobody"], ["age1" + "q" * 58], ["x" * 10_000]):
        told = bodies(ann)["save_weights_external"] | {"age_encryption_recipients": keys}
        battery.refuse(
            f"age {keys[0][:9]}", ann.post("save_weights_external", told), "age", trains=True
        )
    for path in PATHS:
        told = bodies(ann)["load_weights"] | {"path": path}
        battery.refuse(
            f"load {path[:30]}", ann.post("load_weights", told), "path|checkpoint", trains=True
        )
        battery.refuse(
            f"info {path[:30]}",
            ann.post("weights_info", {"tinker_path": path}),
            "path|checkpoint",
            (400, 404),
        )
        told = bodies(ann)["create_sampling_session"] | {"model_path": path}
        battery.refuse(
            f"sample {path[:30]}",
            ann.post("create_sampling_session", told),
            "path|checkpoint|sampled",
            (400, 404),
        )
        told = {"model_path": path, "prompt": CHUNKS}
        battery.refuse(
            f"sample {path[:30]}", ann.post("asample", told), "path|checkpoint|sampled", (400, 404)
        )
        told = bodies(ann)["copy_weights"] | {"source_path": path}
        battery.refuse(
            f"copy {path[:30]}", ann.post("copy_weights", told), "path|checkpoint", (400, 404)
        )
    for base in ("nonsense", "../" + site.server.name, "x" * 10_000):
        for route in ("create_model", "load_weights", "create_sampling_session", "asample"):
            told = bodies(ann)[route] | {"base_model": base}
            if route == "asample":
                del told["sampling_session_id"]
            battery.refuse(
                f"{route} base {base[:9]}",
                ann.post(route, told),
                "base_model",
                trains=route == "load_weights",
            )
    for rank in (0, -1, 9, 2**31, 2**70, "8", 8.0, True):
        told = ann.adopted(900 + len(COUNT), lora_config={"rank": rank})
        battery.refuse(f"rank {rank}", ann.post("create_model", told), "rank")
    nothing = {"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False}
    battery.refuse(
        "nothing to train", ann.post("create_model", ann.adopted(899, lora_config=nothing)), "train"
    )
    battery.refuse(
        "dimuon",
        ann.post("create_model", ann.adopted(898, optimizer_config={"type": "dimuon"})),
        "dimuon",
    )
    for route, told in (("create_session", {}), ("create_model", ann.adopted(897))):
        battery.refuse(
            f"{route} metadata", ann.post(route, told | {"user_metadata": large}), "user_metadata"
        )
    battery.refuse("tags", ann.post("create_session", {"tags": ["x" * (1 << 19)]}), "tags")
    battery.refuse(
        "display_name",
        ann.post("create_session", {"display_name": "x" * (1 << 19)}),
        "display_name",
    )
    for seed in (-(2**63), 2**63 - 1):
        ann.done(
            "create_model", ann.adopted(890 + (seed > 0), lora_config={"rank": 8, "seed": seed})
        )


def test_a_model_that_was_not_made_takes_nothing(ann, battery):
    """Its creation failed: whatever is asked of it fails too, and none of it touches the server."""
    failed = ann.post("create_model", ann.adopted(700, lora_config={"rank": 99}))
    battery.refuse("create", failed, "rank")
    here = {"model_id": failed.json()["model_id"]}
    for place, (route, told) in enumerate(
        [
            ("forward_backward", {"forward_backward_input": batch()}), ("optim_step", {"adam_params": {}}), ("save_weights", {"path": "x"}),  # noqa: E501
            ("save_weights_for_sampler", {"path": "x"}), ("save_weights_for_sampler", {"sampling_session_seq_id": 700}),  # noqa: E501
            ("save_weights_external", {"path": "x"}), ("forward", {"forward_input": batch()}),
        ], 1,
    ):  # fmt: skip
        battery.refuse(
            route,
            ann.post(route, here | {"seq_id": place} | told),
            "create or load it|is not in training",
        )


def test_prompts_and_settings_of_samples(ann, site, battery):
    context = site.server.base.cfg.context
    of = lambda tokens: {  # noqa: E731
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "target_prompt_logprobs": None,
    }
    cases = [
        ("a million tokens", of([5] * 10**6), "context"), ("beyond the context", of([5] * context), "context"), ("none", of([]), "prompt"),  # noqa: E501
        ("token -1", of([5, -1]), "-1"), ("token 97", of([97, 5]), "97"), ("the largest", of([2**31 - 1]), str(2**31 - 1)),  # noqa: E501
        ("no chunks", {"prompt": {"chunks": []}, "target_prompt_logprobs": None}, "prompt"),
        ("an image", {"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "png"}]}}, "image"),  # noqa: E501
        ("a kind", {"prompt": {"chunks": [{"type": ["x"], "tokens": [5]}]}}, "encoded_text"),
        *((f"num_samples {n}", {"num_samples": n}, "num_samples") for n in (0, -1, 4097, 2**40)),
        *((f"{name} 21", {name: 21}, name) for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")),  # noqa: E501
        ("targets of another shape", {"target_prompt_logprobs": {"data": [5], "dtype": "int64", "shape": [1, 1]}}, "target_prompt"),  # noqa: E501
        ("targets beyond", {"target_prompt_logprobs": {"data": [5, 97], "dtype": "int64", "shape": [2, 1]}}, "97"),  # noqa: E501
        ("targets of 2**62", {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [2, 2**61]}}, "target_prompt"),  # noqa: E501
        ("many targets", {"target_prompt_logprobs": {"data": [5] * 200, "dtype": "int64", "shape": [2, 100]}}, "target_prompt"),  # noqa: E501
    ]  # fmt: skip
    params = [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", context), ("max_tokens", 2**31 - 1), ("temperature", -0.1),  # noqa: E501
        ("temperature", 1e39), ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_k", -2), ("top_k", 2**31), ("seed", 2**64),  # noqa: E501
        ("seed", -(2**63) - 1), ("stop", [[5]]), ("stop", [5, "x"]), ("stop", 5), ("stop", "x"), ("stop", ["x"]), ("stop", [""]),  # noqa: E501
        ("stop", [-1]), ("stop", list(range(90))), ("stop", {"x": 1}), ("stop", ["x" * 10_000]), ("stop", [2**40]),  # noqa: E501
    ]  # fmt: skip
    for what, change, names in cases:
        battery.refuse(what, ann.post("asample", bodies(ann)["asample"] | change), names)
    for name, value in params:
        body = bodies(ann)["asample"]
        body["sampling_params"][name] = value
        battery.refuse(f"{name} {str(value)[:20]}", ann.post("asample", body), name)
    drawn: dict[str, Any] = bodies(ann)["asample"] | {"prompt_alt_tokens_k": 2}
    drawn["sampling_params"]["temperature"] = 0.5
    battery.refuse("alternatives at 0.5", ann.post("asample", drawn), "temperature")


def test_numbers_of_an_update_that_float32_has_not(ann, bob, site):
    """They are no mistakes of form: an update that is not finite is left out and told of, and
    whoever is behind it is served.
    """
    huge = [3e38, -3e38, 3e38]
    model = ann.done("create_model", ann.adopted(600))["model_id"]
    data = batch()
    data["data"][0]["loss_fn_inputs"]["weights"]["data"] = huge
    place = 0
    for rate in (0.0, 1e-45, 1e30, 3.4e38):
        for input_ in (data, batch()):
            told = []
            for route, one in (
                ("forward_backward", {"forward_backward_input": input_}),
                (
                    "optim_step",
                    {
                        "adam_params": {
                            "learning_rate": rate,
                            "eps": 0.0,
                            "weight_decay": 3e38,
                            "grad_clip_norm": 1e-45,
                        }
                    },
                ),
            ):
                place += 1
                told.append(ann.done(route, one | {"model_id": model, "seq_id": place}))
            assert "loss:sum" in told[0]["metrics"]
            assert told[1]["metrics"]["skipped"] == 1 or input_ is not data
            assert told[1]["metrics"].keys() - {"grad_norm"} == {"learning_rate", "skipped"}
    place += 1
    answer = ann.post("save_weights_for_sampler", {"model_id": model, "seq_id": place, "path": "x"})
    assert "NaN or infinite" in refused(ann, answer)


def test_numbers_of_requests(ann, bob, site, battery):
    """A number that was used is another request's: 409. One that is far ahead waits, and holds
    nobody up.
    """
    here = {"model_id": ann.model}
    ann.train("optim_step", {"adam_params": {"learning_rate": 0.5}})
    used = ann.place - 1
    for route, told in (
        ("optim_step", {"adam_params": {"learning_rate": 0.6}}), ("forward_backward", {"forward_backward_input": batch()}),  # noqa: E501
        ("save_weights", {"path": "other"}), ("load_weights", {"path": ann.paths["weights"]}), ("optim_step", {"adam_params": "x"}),  # noqa: E501
    ):  # fmt: skip
        battery.refuse(
            f"{route} {used} again",
            ann.post(route, here | {"seq_id": used} | told),
            f"request {used + 1} of",
            (409,),
        )
    for route, told in {
        "create_model": ann.adopted(0, lora_config={"rank": 2}),
        "asample": {},
        "create_sampling_session": {},
    }.items():
        if route == "asample":
            told = {
                "sampling_session_id": ann.sampler,
                "seq_id": 1,
                "prompt": CHUNKS,
                "num_samples": 2,
            }
        elif route == "create_sampling_session":
            told = {
                "session_id": ann.session,
                "sampling_session_seq_id": 0,
                "base_model": site.server.name,
            }
        battery.refuse(f"{route} again", ann.post(route, told), "number|request 1 of", (409,))
    told = bodies(ann)["copy_weights"] | {"model_seq_id": 0}
    battery.refuse(
        "a copy over a model", ann.post("copy_weights", told), "new model_seq_id", (409,)
    )
    ann.done("unload_model", {"model_id": ann.done("create_model", ann.adopted(400))["model_id"]})
    battery.refuse(
        "a model that has ended", ann.post("create_model", ann.adopted(400)), "has ended", (409,)
    )
    far = [
        ann.post("optim_step", here | {"seq_id": place, "adam_params": {}})
        for place in (ann.place + 7_000, 2**31 - 1)
    ]
    assert [answer.status_code for answer in far] == [200, 200]
    for place in (2**31, 2**63 - 1, 2**63, 2**64, 10**40):
        battery.refuse(
            f"place {place}",
            ann.post("optim_step", here | {"seq_id": place, "adam_params": {}}),
            "seq_id",
        )
        battery.refuse(
            f"model {place}", ann.post("create_model", ann.adopted(place)), "model_seq_id"
        )
        if place >= 2**63:  # those of copied clients are that large
            battery.refuse(
                f"sample {place}",
                ann.post("asample", bodies(ann)["asample"] | {"seq_id": place}),
                "seq_id",
            )
        told = bodies(ann)["create_sampling_session"] | {"sampling_session_seq_id": place}
        battery.refuse(
            f"sampler {place}", ann.post("create_sampling_session", told), "sampling_session_seq_id"
        )


def raw(site, data: bytes, wait: bool = True, half: bool = False) -> bytes:
    """What a socket hears; ``half``: of which nothing more comes, ``wait``: else it is closed at
    once.
    """
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
        connection.sendall(data)
        if half:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")) if wait else b""


def head(ann: Tenant, path: str, length: int, *more: str) -> bytes:
    lines = [
        f"POST /api/v1/{path} HTTP/1.1",
        "Host: x",
        f"X-API-Key: {ann.key}",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def test_connections_that_are_no_good(ann, site):
    """Slow bodies, half bodies, no HTTP, and clients that vanish while they wait; nothing is held
    for any of them.
    """
    body = json.dumps({"request_id": ann.future}).encode()
    waits = ann.post(
        "optim_step", {"model_id": ann.model, "seq_id": ann.place + 9_000, "adam_params": {}}
    ).json()["request_id"]
    poll = json.dumps({"request_id": waits}).encode()
    began = time.perf_counter()
    slow = raw(site, head(ann, "get_info", 100) + b'{"model')
    assert b" 408 " in slow.split(b"\r\n")[0]
    assert b"did not arrive within" in slow
    assert time.perf_counter() - began < 15 + BODY_S
    for data in (
        head(ann, "get_info", 100) + b"{",
        head(ann, "retrieve_future", len(body)) + body[:-1],
    ):
        raw(site, data, half=True)
    for junk in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"POST /api/v1/get_info HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\0" * 100,
    ):
        assert raw(site, junk).startswith((b"HTTP/1.1 400", b""))
    for length in ("-1", "9" * 25, "1e3"):
        assert (
            b" 400 "
            in raw(
                site,
                head(ann, "get_info", 0).replace(
                    b"Content-Length: 0", b"Content-Length: " + length.encode()
                ),
            )[:40]
        )
    smuggled = head(ann, "get_info", 3, "Transfer-Encoding: chunked") + b"zz\r\n{}"
    assert b" 400 " in raw(site, smuggled)[:40]
    before = len(threading.enumerate())
    for _ in range(30):
        raw(site, head(ann, "retrieve_future", len(poll)) + poll, wait=False)
        raw(site, head(ann, "asample", 1 << 20) + b'{"prompt', wait=False)
    whole = raw(site, head(ann, "retrieve_future", len(body), "Connection: close") + body)
    assert whole.startswith(b"HTTP/1.1 200")
    assert len(threading.enumerate()) <= before + 8  # at most a few more of asyncio's own


MUTATIONS = 300


def mutated(rng: np.random.Generator, body: dict) -> bytes:
    """A body with one to three changes: of a value anywhere in it, of its keys, or of its bytes."""
    junk = [None, True, -1, 7, 1.5, 10**40, "", "\0", "é" * 50, [], {}, [[1]], {"x": [5]}]
    junk += [float("nan"), [10**40]]

    def places(at, path=()):
        items = (
            at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        )
        for key, value in items:
            yield at, key
            yield from places(value, (*path, key))

    for _ in range(rng.integers(1, 4)):
        found = list(places(body))
        if not found:
            break
        at, key = found[rng.integers(len(found))]
        kind = rng.integers(4)
        if kind == 0:
            del at[key]
        elif kind == 1 and isinstance(at, list):
            at.append(copy.deepcopy(junk[rng.integers(len(junk))]))
        elif kind == 2 and isinstance(at, dict):
            at[str(key) + "x"] = at.pop(key)
        else:
            at[key] = copy.deepcopy(junk[rng.integers(len(junk))])
    text = bytearray(json.dumps(body).encode())
    if rng.random() < 0.3:
        for _ in range(rng.integers(1, 5)):
            text[rng.integers(len(text))] = rng.integers(256)
    return bytes(text if rng.random() < 0.9 else text[: rng.integers(len(text))])


def test_random_changes_of_good_bodies(rng, ann, bob, site, monkeypatch):
    """Whatever they are, they are answered: well, or as the caller's mistake; and what is accepted
    ends so too.
    """
    monkeypatch.setattr(tinker_futures, "POLL_S", 0.2)
    model = ann.done("create_model", ann.adopted(500))["model_id"]
    # the model stays
    routes = [
        route
        for route in bad_world.FIELDS
        if route not in ("unload_model", "create_model", "load_weights")
    ]
    place, wrong, waiting = 1, [], []
    for _ in range(MUTATIONS):
        route = routes[rng.integers(len(routes))]
        body = bodies(ann)[route]
        if route in TRAINING:
            body |= {"model_id": model, "seq_id": place}
        data = mutated(rng, body)
        answer = ann.post(route, data)
        COUNT.append(route)
        fine = answer.status_code in (200, 400, 404, 409, 410)
        if (
            not fine
            or not isinstance(answer.json(), dict)
            or (answer.status_code != 200 and len(answer.json()["detail"]) <= 10)
        ):
            wrong.append(f"{answer.status_code} {route} {data[:300]!r}: {answer.text[:200]}")
        if answer.status_code == 200 and route in (*TRAINING, "asample"):
            waiting.append((route, data, answer.json()["request_id"]))
        # A request with a changed number leaves its own free: later ones would wait for it.
        if route in TRAINING and answer.status_code in (200, 409):
            place += json.loads(data).get("seq_id") == place
    for _ in range(10):  # these may be taken by changed numbers
        answer = ann.post("optim_step", {"model_id": model, "seq_id": place, "adam_params": {}})
        place += 1
        assert answer.status_code in (200, 409, 410), answer.text
    for route, data, id in waiting:
        deadline = time.monotonic() + 60
        while (
            answer := ann.post("retrieve_future", {"request_id": id})
        ).status_code == 408 and time.monotonic() < deadline:
            if (
                b"seq_id" not in data
                or json.loads(data).get("seq_id", 0) > place
                or json.loads(data).get("model_id") != model
            ):
                break
        told = answer.json()
        if answer.status_code not in (200, 408) or ("error" in told and told["category"] != "user"):
            wrong.append(f"{answer.status_code} {route} {data[:300]!r}: {str(told)[:200]}")
    assert not wrong, "\n".join(wrong)


def test_nobody_noticed(ann, bob, site, before):
    """The other tenant's bits, all threads, what is queued, and the process's memory."""
    told, threads = before
    assert len(COUNT) >= 1200, "most of the table was not sent"
    assert told_of(bob, 2) == told
    assert threads <= {thread.name for thread in threading.enumerate()}
    assert site.server.durable.failed is None
    give_up = time.monotonic() + 30
    # a snapshot may be taken just now
    while state_of(site.server)["training"]["waiting"] and time.monotonic() < give_up:
        time.sleep(0.05)
    state = state_of(site.server)
    assert (state["trouble"], state["training"]["waiting"]) == ("", 0)
    ready = httpx.get(f"{site.url}/ready", headers={"x-api-key": bob.key})
    assert ready.status_code == 200


def test_the_folder_opens_again(site, sites, tiny_base, folder, ann, bob, before):
    """Ended, and served again from its folder: states, futures that failed, and what waits are
    there.
    """
    failed = ann.post(
        "optim_step", {"model_id": ann.model, "seq_id": ann.place, "adam_params": {"beta1": 2}}
    ).json()["request_id"]
    ann.place += 1
    reason = ann.outcome(failed)
    site.close()
    again = sites(tiny_base(), folder / "server", keys=keys_.Keys(folder / "keys"), limits=LIMITS)
    ann.site = bob.site = again
    assert ann.outcome(failed) == reason
    assert reason["category"] == "user"
    assert told_of(bob, 3) == before[0]
