"""The console's routes, under ``/console``: pages for people, rendered here.

``policies.py`` and ``operations.py`` have the pages; here are sign-in, which ``sessions.py`` keeps,
and the playground, which samples through OpenAI's API.
"""

from types import SimpleNamespace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.service.binding import is_ours
from mint_jax.service.console import pages
from mint_jax.service.console.operations import Operations
from mint_jax.service.console.pages import Page, Pages, Visit
from mint_jax.service.console.policies import Policies
from mint_jax.service.console.sessions import COOKIE, ROOT, SESSION_S, Browsers, covers
from mint_jax.service.endpoints import console_endpoints, routes
from mint_jax.service.openai import OpenAI
from mint_jax.service.server import Server

# the first that a key may see
HOMES = {"/policies": ("read", "train", "admin"), "/playground": ("sample",)}
SUGGESTED = 100  # names that the playground's fields offer


class Console:
    """The handlers of one server."""

    def __init__(self, server: Server, browsers: Browsers, openai: OpenAI):
        self.server, self.browsers, self._openai = server, browsers, openai
        self.pages = Pages(server.name, browsers.keys is not None)

    def routes(self) -> list[Route]:
        policies, operations = Policies(self.server), Operations(self.server)
        shown = (self.sign_in_page, self.sign_out, self.home, self.playground)
        shown += (policies.policies, policies.policy, policies.curves)
        shown += (policies.promote, policies.rollback)
        shown += (operations.training, operations.costs, operations.state)
        handlers = SimpleNamespace(
            static=pages.static,
            sign_in=self.sign_in,
            completions=self.completions,
            chats=self.chats,
            **{one.__name__: self.pages.endpoint(one) for one in shown},
        )
        return routes(console_endpoints(), handlers)

    def home(self, visit: Visit) -> Page:
        return Page(to=ROOT + next(path for path, scopes in HOMES.items() if visit.may(*scopes)))

    def playground(self, visit: Visit) -> Page:
        tokenizer = self.server.base.tokenizer
        cards = self.server.weights.page(visit.tenant, limit=SUGGESTED).cards
        values = {
            "names": [card["id"] for card in cards],
            "a": visit.query.get("a", "") or self.server.name,
            "b": visit.query.get("b", ""),
            "has_tokenizer": tokenizer is not None,
            "chats": tokenizer is not None and tokenizer.chats,
        }
        return Page("playground.html", values)

    async def completions(self, request: Request) -> Response:
        pages.check_origin(request)
        return await self._openai.completions(request)

    async def chats(self, request: Request) -> Response:
        pages.check_origin(request)
        return await self._openai.chats(request)

    # -- sessions

    def sign_in_page(self, visit: Visit) -> Page:
        if self.browsers.keys is None:
            return Page(to=ROOT)
        return Page("sign_in.html", {"next": visit.query.get("next", ""), "error": ""})

    async def sign_in(self, request: Request) -> Response:
        """Exchanges a key for a cookie."""
        visit = await pages.visit_of(request)
        try:
            pages.check_origin(request)
            if self.browsers.keys is None:
                raise UserError("this server has no keys: its console is open, to this machine")
            cookie = self.browsers.sign_in(visit.form.get("key", ""))
        except UserError as error:
            return self.pages.response(visit, pages.error_page(error))
        where = visit.form.get("next", "")
        if cookie is None:
            error = (
                "This key is unknown, revoked or expired. Ask the server's operator for another."
            )
            page = Page("sign_in.html", {"next": where, "error": error}, 401)
            return self.pages.response(visit, page)
        response = self.pages.response(visit, Page(to=where if covers(where) else ROOT))
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_S,
            path=visit.root + ROOT,
            secure=request.url.scheme == "https" or not is_ours(request.headers.get("host", "")),
            httponly=True,
            samesite="strict",
        )
        return response

    def sign_out(self, visit: Visit) -> Page:
        self.browsers.sign_out(visit.session)
        return Page(to=f"{ROOT}/sign-in")
