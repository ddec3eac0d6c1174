"""The console's routes: pages for people, rendered here, under ``/console``.

/policies /policies/NAME /curves/NAME /promote/NAME /rollback/NAME    policies.py
/training /costs /server                                              operations.py
/playground                                                           here; it samples as OpenAI's
API does /sign-in /sign-out                                                    here; sessions.py
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mint_jax.errors import UserError
from mint_jax.service import openai
from mint_jax.service.binding import is_ours
from mint_jax.service.console import pages, sessions
from mint_jax.service.console.operations import Operations
from mint_jax.service.console.pages import HEADERS, TOKEN, Asked, Page, Pages
from mint_jax.service.console.policies import Policies
from mint_jax.service.console.sessions import COOKIE, LONGEST_S, UNDER, Browsers
from mint_jax.service.errors import Forbidden
from mint_jax.service.quotas import Busy
from mint_jax.service.server import Server

# the first that a key may see
HOMES = {"/policies": ("read", "train", "admin"), "/playground": ("sample",)}
SUGGESTED = 100  # names that the playground's fields offer


class Console:
    """The handlers over one server.

    Args:
        serves: the server as OpenAI's routes ask for it.
    """

    def __init__(self, server: Server, browsers: Browsers, serves: openai.Serves):
        self.server, self.browsers, self._serves = server, browsers, serves
        self.pages = Pages(browsers, server.name)

    def routes(self) -> list[Route]:
        policies, operations, page = (
            Policies(self.server),
            Operations(self.server),
            self.pages.endpoint,
        )
        completions, chats = openai.sampling(self._serves)
        get: dict[str, Any] = {
            "": page(self.home),
            "/policies": page(policies.listed),
            "/policies/{policy:path}": page(policies.shown),
            "/curves/{policy:path}": page(policies.curves),
            "/training": page(operations.training),
            "/costs": page(operations.costs),
            "/server": page(operations.state),
            "/playground": page(self.playground),
            "/sign-in": page(self.asks),
            "/static/{name}": pages.static,
        }
        post: dict[str, Any] = {
            "/promote/{policy:path}": page(policies.promote),
            "/rollback/{policy:path}": page(policies.rollback),
            "/playground/completions": _Passed(self.pages, completions),
            "/playground/chat": _Passed(self.pages, chats),
            "/sign-in": self.sign_in,
            "/sign-out": page(self.sign_out),
        }
        methods = [("GET", get), ("POST", post)]
        return [
            Route(UNDER + path, endpoint, methods=[method])
            for method, table in methods
            for path, endpoint in table.items()
        ]

    def home(self, asked: Asked) -> Page:
        return Page(to=UNDER + next(path for path, scopes in HOMES.items() if asked.may(*scopes)))

    def playground(self, asked: Asked) -> Page:
        tokenizer = self.server.base.tokenizer
        cards = self.server.weights.page(asked.tenant, limit=SUGGESTED).cards
        values = {
            "names": [card["id"] for card in cards],
            "a": asked.query.get("a", "") or self.server.name,
            "b": asked.query.get("b", ""),
            "has_tokenizer": tokenizer is not None,
            "chats": tokenizer is not None and tokenizer.chats,
        }
        return Page("playground.html", values)

    # -- sessions

    def asks(self, asked: Asked) -> Page:
        if self.browsers.keys is None:
            return Page(to=UNDER)
        return Page("sign_in.html", {"next": asked.query.get("next", ""), "error": ""})

    async def sign_in(self, request: Request) -> Response:
        """Takes a key, and gives a cookie for it."""
        asked = await pages.read(request)
        try:
            if not sessions.same_origin(request.headers):
                raise Forbidden(
                    "this form does not come from a page of the console: open the console, and sign"
                    " in there"
                )
            if self.browsers.keys is None:
                raise UserError("this server has no keys: its console is open, to this machine")
            found = await self.browsers.sign_in(asked.form.get("key", ""))
        except sessions.TooMany:
            return self.pages.response(
                asked,
                pages.of_error(Busy("too many wrong keys are being tried: come back in a minute")),
            )
        except UserError as error:
            return self.pages.response(asked, pages.of_error(error))
        where = asked.form.get("next", "")
        if found is None:
            wrong = (
                "This key is unknown, revoked or expired. Ask the server's operator for another."
            )
            return self.pages.response(
                asked, Page("sign_in.html", {"next": where, "error": wrong}, 401)
            )
        response = self.pages.response(
            asked, Page(to=where if self.browsers.covers(where) else UNDER)
        )
        secure = request.url.scheme == "https" or not is_ours(request.headers.get("host", ""))
        options: Any = {
            "path": asked.root + UNDER,
            "secure": secure,
            "httponly": True,
            "samesite": "strict",
        }
        response.set_cookie(COOKIE, found[1], max_age=int(LONGEST_S), **options)
        return response

    def sign_out(self, asked: Asked) -> Page:
        self.browsers.sign_out(asked.session)
        return Page(to=f"{UNDER}/sign-in")


class _Passed:
    """An ASGI app that is called by scripts of our pages alone; their token is in a header."""

    def __init__(self, pages: Pages, app: Any):
        self._pages, self._app = pages, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self._pages.pass_(request, request.headers.get(TOKEN, ""))
        except Forbidden as error:
            await Response(str(error), 403, HEADERS, "text/plain")(scope, receive, send)
            return
        await self._app(scope, receive, send)
