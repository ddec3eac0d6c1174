"""All endpoints: the gate, the routes and OpenAPI are made from this table."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.routing import Route, compile_path

from mint_jax.service import openai_types as openai
from mint_jax.service import tinker_types as tinker
from mint_jax.service.custom_loss import CreateCustomLoss
from mint_jax.service.responses import ResponseBody
from mint_jax.service.validation import CostsQuery, ModelsQuery, PageQuery, RunsQuery, UsageQuery

JSON, STREAM, PROTOBUF = "application/json", "text/event-stream", "application/x-protobuf"
TEXT = "text/plain"
OPENAI_PREFIXES = ("/v1", "/oai/api/v1")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One method of a path.

    Attributes:
        path: ``{name}`` stands for one segment, ``{name:path}`` for one or more.
        scopes: one of them is needed; empty: any key; None: no key.
        summary: for OpenAPI; empty: not documented.
        body, query: models of the request's JSON and of its parameters.
        call: name of the handler; empty: the path's last segment.
        data: bodies may be as large as a batch or a long prompt; others must be small.
        protobuf: bodies may be protobuf, a ``ForwardBackwardRequest``.
        kinds: content types of a successful answer.
    """

    method: str
    path: str
    scopes: tuple[str, ...] | None
    summary: str = ""
    body: Any = None
    call: str = ""
    query: Any = None
    data: bool = False
    protobuf: bool = False
    kinds: tuple[str, ...] = (JSON,)
    status: int = 200

    @property
    def open(self) -> bool:
        """The endpoint needs no key."""
        return self.scopes is None

    @property
    def name(self) -> str:
        """Name of the handler."""
        return self.call or self.path.rpartition("/")[2]


def _below(prefix: str, *methods: str) -> Iterator[Callable[..., Endpoint]]:
    """Yields makers of endpoints below a prefix."""
    for method in methods:
        yield lambda path, *row, m=method, **more: Endpoint(m, prefix + path, *row, **more)


def operators() -> Iterator[Endpoint]:
    [get] = _below("", "GET")
    yield get("/health", None, "Returns 200: the process is alive.")
    yield get("/ready", None, "Returns 200 once all programs are compiled.")
    yield get("/openapi.json", None, "Returns this document.", call="openapi")
    # these name the policies of all tenants
    admin = ("admin",)
    yield get("/metrics", admin, "Returns metrics for Prometheus.", kinds=(TEXT,))
    yield get("/debug/state", admin, "Returns queues, policies, memory and costs.")
    yield get("/admin/costs", admin, "Lists device seconds and tokens.", query=CostsQuery)


def tinker_endpoints() -> Iterator[Endpoint]:
    get, post, put, delete = _below("/api/v1/", "GET", "POST", "PUT", "DELETE")
    train, sample, read, sampled = ("train",), ("sample",), ("read", "train"), ("read", "sample")
    place, batch = tinker.RequestPlace, {"data": True, "protobuf": True, "call": "forward_backward"}
    one, session = "training_runs/{model}/checkpoints/{kind}/{name}", "sessions/{session}"
    files = ("application/octet-stream", JSON)

    yield get("healthz", None, "Returns 200: the process is alive.")
    yield post("client/config", None, "Returns options of the SDK.", call="client_config")
    yield get("files/{token}", None, "Downloads the file of a link.", call="file", kinds=files)
    yield post("auth/token", (), "Exchanges a key for a token of an hour.")
    yield get("get_server_capabilities", (), "Returns the base model and its context.")
    yield post("client/dynamic_config", (), "Returns options of the SDK that may change.")
    yield post("create_session", (), "Opens a session.", tinker.CreateSession)
    yield post("session_heartbeat", (), "Keeps a session open.", tinker.SessionRef)
    yield post(f"{session}/finish", (), "Ends a session.", call="finish_session")
    yield post("telemetry", (), "Accepts telemetry and drops it.")
    both = (JSON, PROTOBUF)
    yield post("retrieve_future", (), "Waits for a result.", tinker.RetrieveFuture, kinds=both)
    yield post("retrieve_futures", (), "Waits for samples of a sampler.", tinker.RetrieveFutures)
    yield post("cancel_future", (), "Cancels samples.", tinker.CancelFuture)

    yield post("create_model", train, "Creates a policy to train.", tinker.ModelPlace)
    yield post("load_weights", train, "Loads a checkpoint into a policy.", tinker.LoadPlace)
    yield post("unload_model", train, "Ends a policy's training.", tinker.ModelRef)
    yield post("forward", train, "Computes losses and log-probabilities.", place, **batch)
    yield post("forward_backward", train, "Computes losses and adds gradients.", place, **batch)
    yield post("create_custom_loss", train, "Checks a traced loss.", CreateCustomLoss)
    yield post("optim_step", train, "Applies the added gradients.", place)
    yield post("save_weights", train, "Saves the adapter and its moments.", place)
    yield post("save_weights_for_sampler", train, "Saves a revision to sample.", place)
    yield post("save_weights_external", train, "Saves an adapter to download.", place)
    interpolate, reverse_kl = "mint/checkpoints/interpolate", "mint/forward_backward_reverse_kl"
    yield post(interpolate, train, "Saves a sum of adapters.", tinker.Interpolate, data=True)
    unsupported = "Not supported: its future fails."
    yield post(reverse_kl, train, unsupported, tinker.ReverseKl, "reverse_kl", data=True)
    yield post("copy_weights", train, "Copies a checkpoint.", tinker.CopyWeights)
    yield post("get_info", read, "Returns a policy's base and rank.", tinker.ModelRef)
    yield post("weights_info", read, "Returns a checkpoint's base and rank.", tinker.WeightsInfo)
    yield post("sessions/search", read, "Searches sessions.", tinker.SearchSessions)
    yield post("asample", sample, "Samples completions.", tinker.SampleRequest, data=True)
    yield post("create_sampling_session", sample, "Creates a sampler.", tinker.CreateSampler)
    yield get("samplers/{sampler}", sampled, "Returns a sampler's model.", call="sampler")

    yield get("training_runs", read, "Lists policies.", query=RunsQuery)
    yield get("training_runs/{model}", read, "Returns one policy.", call="training_run")
    run_checkpoints = "training_runs/{model}/checkpoints"
    yield get(run_checkpoints, read, "Lists a policy's checkpoints.", call="checkpoints_of")
    yield get("checkpoints", read, "Lists checkpoints.", query=PageQuery)
    yield get("billing/usage/events", read, "Lists tokens by hour.", call="usage", query=UsageQuery)
    current = "billing/usage/checkpoints/current"
    yield get(current, read, "Counts checkpoints by project.", call="stored", query=RunsQuery)
    yield get("sessions", read, "Lists sessions.", query=PageQuery)
    yield get(session, read, "Returns one session.", call="session")
    yield get(f"{session}/trace_export", read, "Returns a link to a session's timeline.")
    project = tinker.AssignProject
    yield put(f"{session}/project", train, "Assigns a session to a project.", project)
    yield delete(one, train, "Deletes a checkpoint.", call="delete", status=204)
    yield post(f"{one}/publish", train, "Lets other tenants load a checkpoint.")
    yield delete(f"{one}/publish", train, "Makes a checkpoint private.", call="unpublish")
    yield put(f"{one}/ttl", train, "Sets a checkpoint's time to live.", tinker.SetTtl)
    yield get(f"{one}/external_weights_urls", read, "Returns links to weights for an hour.")


def openai_endpoints() -> Iterator[Endpoint]:
    sample, admin, read, kinds = ("sample",), ("admin",), ("read", "sample"), (JSON, STREAM)
    bodies = (
        ("completions", "completions", openai.CompletionBody, "Completes prompts."),
        ("chat/completions", "chats", openai.ChatBody, "Answers a chat."),
        ("responses", "responses", ResponseBody, "Answers input with items."),
    )
    for prefix in OPENAI_PREFIXES:
        get, post, delete = _below(f"{prefix}/", "GET", "POST", "DELETE")
        yield get("models", read, "Lists the base and revisions.", query=ModelsQuery)
        yield get("models/{name:path}", read, "Returns one model.", call="model")
        for path, call, body, summary in bodies:
            yield post(path, sample, summary, body, call, data=True, kinds=kinds)
        stored, load, unload = "responses/{id}", openai.LoadAdapter, openai.UnloadAdapter
        yield get(stored, sample, "Returns a stored response.", call="response")
        yield delete(stored, sample, "Deletes a stored response.", call="delete_response")
        yield post(
            "feedback", sample, "Rewards an answer of a canary or of auto.", openai.FeedbackBody
        )
        yield post("route", sample, "Returns what auto would draw from.", openai.RouteBody)
        describe, train = openai.DescribeBody, ("train",)
        yield post("routes", train, "Says what a policy is for.", describe, call="describe")
        yield post("load_lora_adapter", admin, "Loads an adapter by a name.", load, kinds=(TEXT,))
        yield post("unload_lora_adapter", admin, "Releases the name.", unload, kinds=(TEXT,))


def console_endpoints() -> Iterator[Endpoint]:
    every, train = ("read", "train", "admin"), ("train", "admin")
    pages = (
        ("GET", "/sign-in", None, "sign_in_page"),
        ("POST", "/sign-in", None, "sign_in"),
        ("GET", "/static/{name}", None, "static"),
        ("GET", "", (), "home"),
        ("POST", "/sign-out", (), "sign_out"),
        ("GET", "/policies", every, "policies"),
        ("GET", "/policies/{policy:path}", every, "policy"),
        ("GET", "/training", every, "training"),
        ("GET", "/costs", every, "costs"),
        ("POST", "/promote/{policy:path}", train, "promote"),
        ("POST", "/rollback/{policy:path}", train, "rollback"),
        ("GET", "/server", ("admin",), "state"),
    )
    for method, path, scopes, call in pages:
        yield Endpoint(method, f"/console{path}", scopes, call=call)


class Table:
    """Finds the endpoint of a request."""

    def __init__(self, endpoints: Iterable[Endpoint]):
        self.endpoints = tuple(endpoints)
        self._exact = {(one.method, one.path): one for one in self.endpoints if "{" not in one.path}
        self._patterns = [(e, compile_path(e.path)[0]) for e in self.endpoints if "{" in e.path]

    def find(self, method: str, path: str) -> Endpoint | None:
        """Returns the endpoint of a request; None if there is none: it needs any key."""
        method, path = "GET" if method == "HEAD" else method, path.rstrip("/") or "/"
        matches = (e for e, pattern in self._patterns if e.method == method and pattern.match(path))
        return self._exact.get((method, path)) or next(matches, None)


def routes(endpoints: Iterable[Endpoint], *owners: Any) -> list[Route]:
    """Returns the routes of endpoints; the handler of each is the method of an owner."""
    out = []
    for one in endpoints:
        handler = next(getattr(owner, one.name) for owner in owners if hasattr(owner, one.name))
        out.append(Route(one.path, handler, methods=[one.method]))
    return out


TABLE = Table([*operators(), *tinker_endpoints(), *openai_endpoints(), *console_endpoints()])
