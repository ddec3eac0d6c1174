"""The console's pages: templates, static files, headers, and checks of every browser request.

A handler is a function of a ``Visit`` that returns a ``Page``; it runs in a thread, since it reads
databases. Templates escape whatever they show. The pages' Content-Security-Policy allows this
server's own files and nothing inline.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import mimetypes
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import pydantic
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mint_jax.errors import UserError
from mint_jax.service.book import Model
from mint_jax.service.console.sessions import ROOT, same_origin
from mint_jax.service.errors import Forbidden, status_of
from mint_jax.service.server import Server
from mint_jax.service.validation import check

HERE = Path(__file__).parent
THEME = "mint_theme"  # a cookie that the page's own script sets
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


class Visit:
    """A browser's request, with the tenant, scopes and session that the gate found.

    Attributes:
        root: the prefix of all paths.
        part: htmx requests a part of a page.
        theme: ``light`` or ``dark``; empty: the system's.
    """

    def __init__(self, request: Request, form: Mapping[str, str]):
        state, headers = request.state, request.headers
        self.path, self.query, self.form = request.path_params, request.query_params, form
        self.tenant: str = getattr(state, "tenant", "-")
        self.scopes: tuple[str, ...] = getattr(state, "scopes", ())
        self.session: str = getattr(state, "session", "")
        self.root: str = request.scope.get("root_path", "")
        self.part = "hx-request" in headers and "hx-history-restore-request" not in headers
        theme = request.cookies.get(THEME, "")
        self.theme = theme if theme in ("light", "dark") else ""

    @property
    def owner(self) -> str | None:
        """Tenant whose objects are visible; None for operators, who see those of all tenants."""
        return None if self.may("admin") else self.tenant

    def may(self, *scopes: str) -> bool:
        """Returns whether the visitor has one of these scopes."""
        return bool(set(scopes) & set(self.scopes))

    def sees(self, tenant: str) -> bool:
        """Returns whether the visitor sees a tenant's objects."""
        return self.owner in (None, tenant)

    def fields(self, model: type[T]) -> T:
        """Returns the query's parameters. Raises ``BadRequest``; empty ones are absent."""
        return check(model, {name: value for name, value in self.query.items() if value})


@dataclasses.dataclass(frozen=True)
class Page:
    """A template and its values; or ``to``, another path of the console; or ``data`` as JSON."""

    template: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 200
    to: str = ""
    data: Any = None


class Pages:
    """Makes responses of handlers.

    Args:
        base: name of the resident base, at the head of every page.
    """

    def __init__(self, base: str, has_keys: bool):
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"when": when, "size": size, "number": number}
        self._templates.filters["seconds"] = seconds
        self._templates.globals |= {"base_name": base, "static": static_path, "has_keys": has_keys}

    def endpoint(self, handler: Callable[[Visit], Page]) -> Callable[[Request], Any]:
        """Returns a route's endpoint; a user's mistake is shown on a page."""

        async def endpoint(request: Request) -> Response:
            visit = await visit_of(request)

            def made() -> Response:
                try:
                    if request.method == "POST":
                        check_origin(request)
                    page = handler(visit)
                except UserError as error:
                    page = error_page(error)
                return self.response(visit, page)

            return await asyncio.to_thread(made)

        return endpoint

    def response(self, visit: Visit, page: Page) -> Response:
        if page.data is not None:
            return Response(json.dumps(page.data), page.status, HEADERS, "application/json")
        if page.to:
            return RedirectResponse(visit.root + page.to, 303, HEADERS)
        text = self._templates.get_template(page.template).render(
            page.values, visit=visit, root=visit.root
        )
        return Response(text, page.status, HEADERS, "text/html")


def check_origin(request: Request) -> None:
    """Raises ``Forbidden`` unless a page of this server sent a form."""
    if not same_origin(request.headers):
        raise Forbidden(
            "this form does not come from a page of the console: open the console, and do it there"
        )


async def visit_of(request: Request) -> Visit:
    """Returns a request as handlers take it. A malformed form has no fields."""
    form = {}
    if request.method == "POST":
        with contextlib.suppress(ValueError):
            text = (await request.body()).decode()
            form = dict(
                urllib.parse.parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
            )
    return Visit(request, form)


def error_page(error: UserError) -> Page:
    """Returns the page of a mistake."""
    status = status_of(error)
    return Page("error.html", {"error": str(error)[:2000], "status": status}, status)


def url_of(policy: str) -> str:
    """Returns the path of a policy's page."""
    return f"{ROOT}/policies/{quoted(policy)}"


def quoted(policy: str) -> str:
    """Returns a policy's full name as the end of a path."""
    return urllib.parse.quote(policy, safe="/")


def place_of(server: Server, model: Model) -> str:
    """Returns the place of a model's training state; empty if it is not in training."""
    if model.ended is None:
        with contextlib.suppress(UserError):
            return server.live.where(model.id)
    return ""


# -- static files


@functools.cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Returns bytes, type and version of each static file by name."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        data, kind = path.read_bytes(), mimetypes.guess_type(path.name)[0] or "text/plain"
        found[path.name] = data, kind, hashlib.sha256(data).hexdigest()[:12]
    return found


def static_path(name: str) -> str:
    """Returns path and version of a static file, which browsers may keep for good."""
    return f"{ROOT}/static/{name}?v={static_files()[name][2]}"


async def static(request: Request) -> Response:
    """Answers with a static file."""
    found = static_files().get(request.path_params["name"])
    if found is None:
        return Response("there is no such file", 404)
    cached = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(found[0], 200, cached | {"x-content-type-options": "nosniff"}, found[1])


# -- formats


def when(at: float) -> str:
    """Formats a time of day in UTC, to the second."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(count: float) -> str:
    """Formats bytes."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


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
