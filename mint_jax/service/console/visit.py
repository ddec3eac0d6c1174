"""A browser's request to the console: its sender, templates, static files and formats.

A page is a function of a ``Visit`` that returns a response; it runs in a thread, since it reads
databases. Templates escape whatever they show. The Content-Security-Policy allows this server's own
files and nothing inline.
"""

import asyncio
import contextlib
import datetime
import functools
import hashlib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import pydantic
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from mint_jax.catalog.records import names
from mint_jax.errors import UserError
from mint_jax.service.book import Model
from mint_jax.service.console.sessions import ROOT
from mint_jax.service.errors import Forbidden, status_of
from mint_jax.service.server import Server
from mint_jax.service.validation import check

HERE = Path(__file__).parent
STATIC = HERE / "static"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "HX-Request, Cookie",
}
MAX_FIELDS = 20  # of a form
T = TypeVar("T", bound=pydantic.BaseModel)
Page = Callable[["Visit"], Response]


class Visit:
    """A browser's request, with the tenant, scopes and session that the gate found. ``part``: htmx
    requests a part of a page; ``root``: prefix of all paths.
    """

    def __init__(
        self,
        server: Server,
        templates: jinja2.Environment,
        request: Request,
        form: Mapping[str, str],
    ):
        self.server, self.request, self._templates = server, request, templates
        self.path, self.query, self.form = request.path_params, request.query_params, form
        self.tenant: str = request.state.tenant
        self.scopes: tuple[str, ...] = request.state.scopes
        self.session: str = request.state.session
        self.root: str = request.scope.get("root_path", "")
        headers, theme = request.headers, request.cookies.get("mint_theme", "")
        self.part = "hx-request" in headers and "hx-history-restore-request" not in headers
        self.theme = theme if theme in ("light", "dark") else ""

    @property
    def owner(self) -> str | None:
        """Tenant whose objects are visible; None for operators, who see those of all tenants."""
        return None if self.may("admin") else self.tenant

    def may(self, *scopes: str) -> bool:
        """Returns whether the visitor has one of these scopes."""
        return bool(set(scopes) & set(self.scopes))

    def fields(self, model: type[T]) -> T:
        """Returns the query's parameters. Raises ``BadRequest``; empty ones are absent."""
        given = {name: value for name, value in self.query.items() if value}
        return check(model, given, strict=False)

    def page(self, template: str, values: Mapping[str, Any], status: int = 200) -> Response:
        text = self._templates.get_template(template).render(values, visit=self, root=self.root)
        return Response(text, status, media_type="text/html")

    def to(self, path: str) -> Response:
        """Returns a redirect to another path of the console."""
        return RedirectResponse(self.root + path, 303)

    def place(self, model: Model) -> str:
        """Returns the place of a model's training state; empty if it is not in training."""
        if model.ended is None:
            with contextlib.suppress(UserError):
                return self.server.live.where(model.id)
        return ""


def endpoints(server: Server, has_keys: bool, pages: Mapping[str, Page]) -> dict[str, Any]:
    """Returns the routes' endpoints by name; a user's mistake is shown on a page."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"when": when, "number": number, "seconds": seconds}
    templates.globals |= {"base_name": server.name, "static": static_path, "has_keys": has_keys}
    templates.globals["full_name"] = names.full_name

    async def endpoint(page: Page, request: Request) -> Response:
        form: dict[str, str] = {}
        with contextlib.suppress(ValueError):  # a malformed form has no fields
            text = (await request.body()).decode()
            form = dict(urllib.parse.parse_qsl(text, True, max_num_fields=MAX_FIELDS))
        visit = Visit(server, templates, request, form)

        def answer() -> Response:
            try:
                if request.method == "POST":
                    check_origin(request)
                return page(visit)
            except UserError as error:
                values = {"error": str(error)[:2000], "status": status_of(error)}
                return visit.page("error.html", values, values["status"])

        response = await asyncio.to_thread(answer)
        response.headers.update(HEADERS)
        return response

    return {name: functools.partial(endpoint, page) for name, page in pages.items()}


def check_origin(request: Request) -> None:
    """Raises ``Forbidden`` unless a page of this server sent a form, by the browser's headers."""
    headers = request.headers
    origin = urllib.parse.urlsplit(headers.get("origin", "")).netloc
    is_ours = bool(origin) and origin == headers.get("host")
    if (site := headers.get("sec-fetch-site")) is not None:
        is_ours = site == "same-origin"
    if not is_ours:
        raise Forbidden(
            "this form does not come from a page of the console: open the console, and do it there"
        )


# -- static files


@functools.cache
def static_path(name: str) -> str:
    """Returns path and version of a static file, which browsers may keep for good."""
    version = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"{ROOT}/static/{name}?v={version}"


async def static(request: Request) -> Response:
    """Answers with a static file."""
    name = request.path_params["name"]
    if name not in {path.name for path in STATIC.iterdir()}:
        return Response("there is no such file", 404)
    cached = {"cache-control": "public, max-age=31536000, immutable"}
    return FileResponse(STATIC / name, headers=cached | {"x-content-type-options": "nosniff"})


# -- formats


def when(at: float) -> str:
    """Formats a time of day in UTC, to the second."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float) -> str:
    """Formats a number with groups of three digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def seconds(value: float) -> str:
    """Formats a duration."""
    if value < 60:
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
    minutes, hours, days = value // 60, value // 3600, value // 86400
    if hours < 1:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h {minutes % 60:.0f} min" if days < 2 else f"{days:.0f} days"
