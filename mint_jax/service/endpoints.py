"""All endpoints: method, path, scopes, bodies and a summary, for the gate and for OpenAPI."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mint_jax.errors import UserError
from mint_jax.service import openai_types as openai
from mint_jax.service import tinker_types as tinker
from mint_jax.service.keys import SCOPES
from mint_jax.service.queries import CostsQuery, ModelsQuery, PageQuery, RunsQuery
from mint_jax.service.responses import ResponseBody

JSON, STREAM, PROTOBUF = "application/json", "text/event-stream", "application/x-protobuf"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One method of a path.

    Attributes:
        method: HEAD counts as GET.
        path: ``{name}`` stands for one segment, ``{name:path}`` for one or more.
        scopes: one of them is needed; empty: any key; None: no key.
        summary: for OpenAPI; empty: not documented.
        body: model of the request's JSON; None if it has none.
        query: model of the query's parameters.
        answer: name of the answer's schema in ``openapi.py``.
        data: bodies may be as large as a batch or a long prompt; others must be small.
        protobuf: bodies may be protobuf, a ``ForwardBackwardRequest``.
        kinds: content types of the answer.
        status: of a successful answer.
    """

    method: str
    path: str
    scopes: tuple[str, ...] | None
    summary: str = ""
    body: Any = None
    query: Any = None
    answer: str = ""
    data: bool = False
    protobuf: bool = False
    kinds: tuple[str, ...] = (JSON,)
    status: int = 200

    @property
    def open(self) -> bool:
        """The endpoint needs no key."""
        return self.scopes is None


def _endpoints() -> Iterator[Endpoint]:
    yield from _operators()
    yield from _tinker()
    for prefix in ("/v1", "/oai/api/v1"):
        for one in _openai():
            yield dataclasses.replace(one, path=prefix + one.path)
    yield from _console()


def _operators() -> Iterator[Endpoint]:
    yield Endpoint("GET", "/health", None, "The process is alive.")
    yield Endpoint("GET", "/ready", None, "Returns whether requests are served now.")
    yield Endpoint("GET", "/openapi.json", None, "Returns this document.")
    # these name the policies of all tenants
    admin, text = ("admin",), ("text/plain",)
    yield Endpoint("GET", "/metrics", admin, "Returns metrics for Prometheus.", kinds=text)
    yield Endpoint("GET", "/debug/state", admin, "Returns the server's state.")
    yield Endpoint(
        "GET", "/admin/costs", admin, "Lists costs of policies or tenants.", query=CostsQuery
    )


def _tinker() -> Iterator[Endpoint]:
    def get(path: str, scopes: Any, summary: str, **more: Any) -> Endpoint:
        return Endpoint("GET", f"/api/v1/{path}", scopes, summary, **more)

    def post(path: str, scopes: Any, summary: str, body: Any = None, **more: Any) -> Endpoint:
        return Endpoint("POST", f"/api/v1/{path}", scopes, summary, body, **more)

    def put(path: str, scopes: Any, summary: str, body: Any) -> Endpoint:
        return Endpoint("PUT", f"/api/v1/{path}", scopes, summary, body)

    def delete(path: str, summary: str, **more: Any) -> Endpoint:
        return Endpoint("DELETE", f"/api/v1/{path}", train, summary, **more)

    train, sample, read, sampled = ("train",), ("sample",), ("read", "train"), ("read", "sample")
    yield get("healthz", None, "The process is alive.")
    yield post("client/config", None, "Returns options of the SDK.")
    files = ("application/octet-stream", "application/x-tar", JSON)
    yield get("files/{token}", None, "Downloads the file of a signed link.", kinds=files)
    yield post("auth/token", (), "Exchanges a key for a short-lived token.", answer="Token")
    yield get("get_server_capabilities", (), "Returns the base model.")
    yield post("client/dynamic_config", (), "Returns options of the SDK that may change.")
    yield post(
        "create_session", (), "Opens a session.", tinker.CreateSession, answer="SessionAnswer"
    )
    yield post("session_heartbeat", (), "Keeps a session open.", tinker.SessionRef)
    yield post("sessions/{session}/finish", (), "Ends a session.")
    yield post("telemetry", (), "Accepts telemetry and drops it.")
    yield post(
        "retrieve_future",
        (),
        "Waits for a result.",
        tinker.RetrieveFuture,
        kinds=(JSON, PROTOBUF),
    )
    yield post("retrieve_futures", (), "Waits for results of a sampler.", tinker.RetrieveFutures)
    yield post("cancel_future", (), "Cancels samples.", tinker.CancelFuture)

    place, future = tinker.RequestPlace, {"answer": "FutureAnswer"}
    yield post("create_model", train, "Creates a policy.", tinker.ModelPlace, **future)
    yield post(
        "load_weights",
        train,
        "Loads a checkpoint into a new policy, or into one in training.",
        tinker.LoadPlace,
    )
    yield post("unload_model", train, "Ends a policy.", tinker.ModelRef, **future)
    both = {"data": True, "protobuf": True} | future
    yield post("forward", train, "Computes log-probabilities and losses.", place, **both)
    yield post("forward_backward", train, "Accumulates gradients.", place, **both)
    yield post("optim_step", train, "Updates a policy by AdamW.", place, **future)
    yield post("save_weights", train, "Saves a training state.", place, **future)
    yield post("save_weights_for_sampler", train, "Saves a revision to sample.", place, **future)
    yield post("save_weights_external", train, "Saves weights to download.", place, **future)
    yield post(
        "mint/checkpoints/interpolate", train, "Sums adapters.", tinker.Interpolate, data=True
    )
    yield post(
        "mint/forward_backward_reverse_kl",
        train,
        "Not supported: its future fails.",
        tinker.ReverseKl,
        data=True,
    )
    yield post("copy_weights", train, "Copies a checkpoint.", tinker.CopyWeights)
    yield post("get_info", read, "Returns a policy's base and rank.", tinker.ModelRef)
    yield post("weights_info", read, "Returns a checkpoint's base and rank.", tinker.WeightsInfo)
    yield post("sessions/search", read, "Searches sessions.", tinker.SearchSessions)
    yield post("asample", sample, "Samples.", tinker.SampleRequest, data=True)
    yield post("create_sampling_session", sample, "Creates a sampler.", tinker.CreateSampler)
    yield post("join_sampling_session", sample, "Adds a copy of a client.", tinker.SamplerRef)
    yield get("samplers/{sampler}", sampled, "Returns a sampler's model.")

    yield get("training_runs", read, "Lists policies.", query=RunsQuery)
    yield get("training_runs/{model}", read, "Returns one policy.")
    yield get("training_runs/{model}/checkpoints", read, "Lists a policy's checkpoints.")
    yield get("checkpoints", read, "Lists checkpoints.", query=PageQuery)
    yield get("sessions", read, "Lists sessions.", query=PageQuery)
    yield get("sessions/{session}", read, "Returns one session.")
    yield get("sessions/{session}/trace_export", read, "Returns a link to a session's timeline.")
    yield put(
        "sessions/{session}/project", train, "Assigns a session to a project.", tinker.AssignProject
    )
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    yield delete(checkpoint, "Deletes a checkpoint.", status=204)
    yield post(f"{checkpoint}/publish", train, "Lets other tenants load a checkpoint.")
    yield delete(f"{checkpoint}/publish", "Makes a checkpoint private.")
    yield put(f"{checkpoint}/ttl", train, "Sets a checkpoint's time to live.", tinker.SetTtl)
    yield get(
        f"{checkpoint}/external_weights_urls", read, "Returns links to weights, valid for an hour."
    )
    yield get(
        f"{checkpoint}/archive", read, "Redirects to a tar of an adapter for an hour.", status=302
    )


def _openai() -> Iterator[Endpoint]:
    sample, admin, read = ("sample",), ("admin",), ("read", "sample")
    yield Endpoint(
        "GET", "/models", read, "Lists models.", query=ModelsQuery, answer="ModelsAnswer"
    )
    yield Endpoint("GET", "/models/{name:path}", read, "Returns one model.", answer="ModelAnswer")
    bodies = {
        "completions": ("Completes prompts.", openai.CompletionBody, "CompletionAnswer"),
        "chat/completions": ("Answers a chat.", openai.ChatBody, "ChatAnswer"),
        "responses": ("Answers input with items.", ResponseBody, "ResponseAnswer"),
    }
    for path, (summary, body, answer) in bodies.items():
        kinds = (JSON, STREAM)
        yield Endpoint(
            "POST", f"/{path}", sample, summary, body, answer=answer, data=True, kinds=kinds
        )
    one = "/responses/{id}"
    yield Endpoint("GET", one, sample, "Returns a stored response.", answer="ResponseAnswer")
    yield Endpoint("DELETE", one, sample, "Deletes a stored response.", answer="DeletedAnswer")
    text = ("text/plain",)
    yield Endpoint(
        "POST",
        "/load_lora_adapter",
        admin,
        "Names a revision, as vLLM does.",
        openai.LoadAdapter,
        kinds=text,
    )
    yield Endpoint(
        "POST",
        "/unload_lora_adapter",
        admin,
        "Releases a name.",
        openai.UnloadAdapter,
        kinds=text,
    )


def _console() -> Iterator[Endpoint]:
    every, train, sample = ("read", "train", "admin"), ("train", "admin"), ("sample",)
    pages = {
        None: "GET /sign-in, POST /sign-in, GET /static/{name}",
        (): "GET , POST /sign-out",
        every: (
            "GET /policies, GET /policies/{policy:path}, GET /curves/{policy:path},"
            " GET /training, GET /costs"
        ),
        train: "POST /promote/{policy:path}, POST /rollback/{policy:path}",
        ("admin",): "GET /server",
        sample: "GET /playground",
    }
    for scopes, rows in pages.items():
        for row in rows.split(", "):
            method, path = row.split(" ")
            yield Endpoint(method, f"/console{path}", scopes)
    for path in ("completions", "chat"):
        yield Endpoint("POST", f"/console/playground/{path}", sample, data=True)


class Table:
    """Finds the endpoint of a request.

    Raises:
        UserError: an unknown scope, or two endpoints with one method and path.
    """

    def __init__(self, endpoints: Iterable[Endpoint]):
        self.endpoints = tuple(endpoints)
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Endpoint]] = []
        known = set()
        for one in self.endpoints:
            for scope in one.scopes or ():
                if scope not in SCOPES:
                    raise UserError(
                        f"endpoint {one.path} has scope {scope!r}; expected some of"
                        f" {', '.join(SCOPES)}"
                    )
            if (one.method, one.path) in known:
                raise UserError(f"{one.method} {one.path} has two endpoints: leave one")
            known.add((one.method, one.path))
            if "{" not in one.path:
                self._exact[one.method, one.path] = one
            else:
                pattern = re.sub(r"\\{\w+:path\\}", ".+", re.escape(one.path))
                pattern = re.sub(r"\\{\w+\\}", "[^/]+", pattern)
                self._patterns.append((one.method, re.compile(pattern, re.DOTALL), one))

    def find(self, method: str, path: str) -> Endpoint | None:
        """Returns the endpoint of a request; None if there is none: it needs any key."""
        method = "GET" if method == "HEAD" else method
        path = path.rstrip("/") or "/"
        if (exact := self._exact.get((method, path))) is not None:
            return exact
        matches = (
            one for of, pattern, one in self._patterns if of == method and pattern.fullmatch(path)
        )
        return next(matches, None)


TABLE = Table(_endpoints())
