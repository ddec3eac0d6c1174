"""The console's pages: templates, static files, headers, and checks of every browser request.

A handler is a function of ``Asked`` that returns a ``Page``; it runs in a thread, since it reads
databases. Templates escape whatever they show. The pages' policy for browsers
(Content-Security-Policy) allows this server's own files and nothing inline.
"""

import asyncio
import dataclasses
import datetime
import functools
import hashlib
import json
import mimetypes
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from mint_jax.errors import UserError
from mint_jax.service.console.sessions import UNDER, Browsers, same_origin
from mint_jax.service.errors import Forbidden, status_of

HERE = Path(__file__).parent
THEME = "mint_theme"  # a cookie that the page's own script sets
TOKEN = "x-console-token"  # a header, where a script sends what a form would
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "HX-Request, Cookie",
}
MOST_FIELDS = 20  # of a form


@dataclasses.dataclass(frozen=True)
class Asked:
    """A browser's request.

    Attributes:
        path, query, form: parts of the path, fields of the query and of the form.
        tenant, scopes, session: as the gate found.
        root: what stands before all paths.
        part: htmx asks, for a part of a page.
        theme: ``light`` or ``dark``; empty: as the system has it.
    """

    path: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, str]
    tenant: str
    scopes: tuple[str, ...]
    session: str
    root: str
    part: bool
    theme: str

    @property
    def everything(self) -> bool:
        """The browser sees all tenants."""
        return "admin" in self.scopes

    def may(self, *scopes: str) -> bool:
        return bool(set(scopes) & set(self.scopes))


@dataclasses.dataclass(frozen=True)
class Page:
    """A template and its values; or, with ``to``, another path of the console's; or ``data`` as
    JSON.
    """

    template: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 200
    to: str = ""
    data: Any = None


Handler = Callable[[Asked], Page]


class Pages:
    """Makes responses of handlers.

    Args:
        browsers: their sessions.
        base: name of the resident base, at the head of every page.
    """

    def __init__(self, browsers: Browsers, base: str):
        self.browsers = browsers
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader,
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "when": when,
            "size": size,
            "number": number,
            "seconds": seconds,
        }
        self._templates.globals |= {
            "base_name": base,
            "static": static_path,
            "has_keys": browsers.keys is not None,
        }

    def endpoint(self, handler: Handler) -> Callable[[Request], Any]:
        """A handler as a route's endpoint."""

        async def answer(request: Request) -> Response:
            asked = await read(request)
            return await self.answered(asked, functools.partial(self._handled, request, handler))

        return answer

    async def answered(self, asked: Asked, call: Callable[[Asked], Page]) -> Response:
        """The response of what a call gives, in a thread; a user's mistake is a page that says
        so.
        """
        try:
            page = await asyncio.to_thread(call, asked)
        except UserError as error:
            page = of_error(error)
        return await asyncio.to_thread(self.response, asked, page)

    def _handled(self, request: Request, handler: Handler, asked: Asked) -> Page:
        self.pass_(request, asked.form.get("token", ""))
        return handler(asked)

    def pass_(self, request: Request, token: str) -> None:
        """Refuses forms that no page of this console sent. The gate checks the Host header.

        Raises:
            Forbidden: a form of another site, or from before a restart.
        """
        if request.method == "POST":
            if not same_origin(request.headers):
                raise Forbidden(
                    "this form does not come from a page of the console: open the console, and do"
                    " it there"
                )
            if not self.browsers.check(request.state.session, token):
                raise Forbidden(
                    "this form is of another session, or of before a restart: load its page again"
                )

    def response(self, asked: Asked, page: Page) -> Response:
        if page.data is not None:
            return Response(json.dumps(page.data), page.status, HEADERS, "application/json")
        if page.to:
            return RedirectResponse(asked.root + page.to, 303, HEADERS)
        shown = self._templates.get_template(page.template).render(
            page.values, asked=asked, root=asked.root, token=self.browsers.token(asked.session)
        )
        return Response(shown, page.status, HEADERS, "text/html")


async def read(request: Request) -> Asked:
    """A request as handlers take it."""
    headers, state = request.headers, request.state
    theme = request.cookies.get(THEME, "")
    return Asked(
        request.path_params,
        dict(request.query_params),
        await form_of(request) if request.method == "POST" else {},
        getattr(state, "tenant", "-"),
        getattr(state, "scopes", ()),
        getattr(state, "session", ""),
        request.scope.get("root_path", ""),
        "hx-request" in headers and "hx-history-restore-request" not in headers,
        theme if theme in ("light", "dark") else "",
    )


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; the last of those of one name."""
    try:
        return dict(
            urllib.parse.parse_qsl(
                (await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS
            )
        )
    except ValueError:
        return {}  # no form of ours: it has no token


def of_error(error: UserError) -> Page:
    """The page of a mistake."""
    status = status_of(error)
    return Page("error.html", {"error": str(error)[:2000], "status": status}, status)


def url_of(policy: str) -> str:
    """A policy's page."""
    return f"{UNDER}/policies/{quoted(policy)}"


def quoted(policy: str) -> str:
    """A policy's full name as the end of a path."""
    return urllib.parse.quote(policy, safe="/")


# -- static files


@functools.cache
def static_files() -> dict[str, tuple[bytes, str, str]]:
    """By their names: bytes, type and version."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        data = path.read_bytes()
        found[path.name] = (
            data,
            mimetypes.guess_type(path.name)[0] or "text/plain",
            hashlib.sha256(data).hexdigest()[:12],
        )
    return found


def static_path(name: str) -> str:
    """Path and version of a static file: it may be kept for good."""
    return f"{UNDER}/static/{name}?v={static_files()[name][2]}"


async def static(request: Request) -> Response:
    """A static file."""
    found = static_files().get(request.path_params["name"])
    if found is None:
        return Response("there is no such file", 404)
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "x-content-type-options": "nosniff",
    }
    return Response(found[0], 200, headers, found[1])


# -- how values are shown


def when(at: float) -> str:
    """A time of day in UTC, to the second."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def number(value: float) -> str:
    """With thin groups of three."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def seconds(value: float) -> str:
    """A span of time."""
    if value < 60:
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
    minutes, hours, days = value // 60, value // 3600, value // 86400
    if hours < 1:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h {minutes % 60:.0f} min" if days < 2 else f"{days:.0f} days"
