"""What each path needs: a table of methods, templates of paths and scopes. ``gate.py`` asks it
before every request.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from mint_jax.errors import UserError
from mint_jax.service.keys import SCOPES


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a route needs.

    Attributes:
        methods: HEAD counts as GET.
        template: its path; ``{}`` stands for one segment, ``{*}`` for one or more.
        scopes: one of them is needed; any key where there are none; None where no key is needed
            either.
        data: bodies may be as large as a batch or a long prompt; else they are small.
        protobuf: bodies may be ``ForwardBackwardRequest`` in protobuf; else they are JSON or a
            form.
    """

    methods: tuple[str, ...]
    template: str
    scopes: tuple[str, ...] | None
    data: bool = False
    protobuf: bool = False

    @property
    def open(self) -> bool:
        return self.scopes is None


def _rules() -> Iterator[Rule]:
    def of(
        scopes: tuple[str, ...] | None,
        methods: str,
        *templates: str,
        under: str = "/api/v1",
        **more: bool,
    ) -> Iterator[Rule]:
        return (
            Rule(tuple(methods.split()), under + template, scopes, **more) for template in templates
        )

    yield from of(None, "GET", "/health", "/ready", "/openapi.json", under="")
    # they name what all tenants have
    yield from of(("admin",), "GET", "/metrics", "/debug/state", "/admin/costs", under="")

    yield from of(None, "GET", "/healthz")
    yield from of(None, "POST", "/client/config")
    yield from of(None, "GET", "/files/{}")  # a link carries its right in itself
    yield from of((), "POST", "/auth/token")
    yield from of((), "GET", "/get_server_capabilities")
    yield from of(
        (),
        "POST",
        "/client/dynamic_config",
        "/create_session",
        "/session_heartbeat",
        "/sessions/{}/finish",
        "/telemetry",
    )
    yield from of((), "POST", "/retrieve_future", "/retrieve_futures", "/cancel_future")
    yield from of(
        ("train",),
        "POST",
        "/create_model",
        "/load_weights",
        "/unload_model",
        "/create_custom_loss",
        "/copy_weights",
    )
    yield from of(("train",), "POST", "/forward", "/forward_backward", data=True, protobuf=True)
    yield from of(("train",), "POST", "/mint/{*}", data=True)
    yield from of(
        ("train",),
        "POST",
        "/optim_step",
        "/save_weights",
        "/save_weights_for_sampler",
        "/save_weights_external",
    )
    yield from of(("read", "train"), "POST", "/get_info", "/weights_info", "/sessions/search")
    yield from of(("sample",), "POST", "/asample", data=True)
    yield from of(("sample",), "POST", "/create_sampling_session", "/join_sampling_session")
    yield from of(("read", "sample"), "GET", "/samplers/{}")
    yield from of(
        ("read", "train"),
        "GET",
        "/training_runs",
        "/training_runs/{}",
        "/training_runs/{}/checkpoints",
        "/checkpoints",
    )
    yield from of(
        ("read", "train"), "GET", "/sessions", "/sessions/{}", "/sessions/{}/trace_export"
    )
    checkpoint = "/training_runs/{}/checkpoints/{*}"
    yield from of(
        ("read", "train"), "GET", checkpoint + "/archive", checkpoint + "/external_weights_urls"
    )
    yield from of(("train",), "DELETE", checkpoint)
    yield from of(("train",), "POST DELETE", checkpoint + "/publish")
    yield from of(("train",), "PUT", checkpoint + "/ttl", "/sessions/{}/project")

    for under in ("/v1", "/oai/api/v1"):
        yield from of(("read", "sample"), "GET", "/models", "/models/{*}", under=under)
        yield from of(
            ("sample",),
            "POST",
            "/completions",
            "/chat/completions",
            "/responses",
            under=under,
            data=True,
        )
        yield from of(("sample",), "GET DELETE", "/responses/{}", under=under)
        yield from of(("admin",), "POST", "/load_lora_adapter", "/unload_lora_adapter", under=under)

    yield from of(None, "GET POST", "/sign-in", under="/console")
    yield from of(None, "GET", "/static/{}", under="/console")
    yield from of((), "GET", "", under="/console")
    yield from of((), "POST", "/sign-out", under="/console")
    yield from of(
        ("read", "train", "admin"),
        "GET",
        "/policies",
        "/policies/{*}",
        "/curves/{*}",
        "/training",
        "/costs",
        under="/console",
    )
    yield from of(("train", "admin"), "POST", "/promote/{*}", "/rollback/{*}", under="/console")
    yield from of(("admin",), "GET", "/server", under="/console")
    yield from of(("sample",), "GET", "/playground", under="/console")
    yield from of(
        ("sample",),
        "POST",
        "/playground/completions",
        "/playground/chat",
        under="/console",
        data=True,
    )


class Table:
    """Which rule a request falls under.

    Raises:
        UserError: a scope that there is not, or two rules for one method and template.
    """

    def __init__(self, rules: Iterable[Rule]):
        self.rules = tuple(rules)
        self._exact: dict[tuple[str, str], Rule] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Rule]] = []
        seen = set()
        for rule in self.rules:
            for scope in rule.scopes or ():
                if scope not in SCOPES:
                    raise UserError(
                        f"the rule of {rule.template} has scope {scope!r}; expected some of"
                        f" {', '.join(SCOPES)}"
                    )
            for method in rule.methods:
                if (method, rule.template) in seen:
                    raise UserError(f"{method} {rule.template} has two rules: leave one")
                seen.add((method, rule.template))
                if "{" not in rule.template:
                    self._exact[method, rule.template] = rule
                else:
                    pattern = (
                        re.escape(rule.template).replace(r"\{\}", "[^/]+").replace(r"\{\*\}", ".+")
                    )
                    self._patterns.append((method, re.compile(pattern, re.DOTALL), rule))

    def find(self, method: str, path: str) -> Rule | None:
        """The rule of a request; None of a path that no rule names, which needs any key."""
        method = "GET" if method == "HEAD" else method
        path = path.rstrip("/") or "/"
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact
        return next(
            (
                rule
                for of, pattern, rule in self._patterns
                if of == method and pattern.fullmatch(path)
            ),
            None,
        )


TABLE = Table(_rules())
