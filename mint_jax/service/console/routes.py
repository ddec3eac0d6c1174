"""The console's routes, under ``/console``: pages of policies (``policies.py``), of training, costs
and the server's state, sign-in, and the playground, which samples through OpenAI's API.
"""

import math
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.service import endpoints
from mint_jax.service.binding import is_ours
from mint_jax.service.checkpoints import found_or_none
from mint_jax.service.console import pages, policies
from mint_jax.service.console.pages import Visit
from mint_jax.service.console.sessions import COOKIE, ROOT, SESSION_S, Browsers, covers
from mint_jax.service.costs import KINDS
from mint_jax.service.handlers import PageQuery
from mint_jax.service.monitoring import state_of
from mint_jax.service.openai import OpenAI
from mint_jax.service.server import Server

# the first that a key may see
HOMES = {"/policies": ("read", "train", "admin"), "/playground": ("sample",)}
SUGGESTED = 100  # names that the playground's fields offer
MODELS = 50  # of a page
RESIDENT = 50  # revisions on the device that are named
COSTS = 50  # policies and tenants whose costs are shown
QUANTILES = (0.5, 0.95, 0.99)
NO_SUCH_KEY = "This key is unknown, revoked or expired. Ask the server's operator for another."


def console_routes(server: Server, browsers: Browsers, openai: OpenAI) -> list[Route]:
    """Returns the console's routes."""

    def sign_in_page(visit: Visit) -> Response:
        if browsers.keys is None:
            return visit.to(ROOT)
        return visit.page("sign_in.html", {"next": visit.query.get("next", ""), "error": ""})

    def sign_in(visit: Visit) -> Response:
        """Exchanges a key for a cookie."""
        if browsers.keys is None:
            raise UserError("this server has no keys: its console is open, to this machine")
        cookie, where = browsers.sign_in(visit.form.get("key", "")), visit.form.get("next", "")
        if cookie is None:
            return visit.page("sign_in.html", {"next": where, "error": NO_SUCH_KEY}, 401)
        response, request = visit.to(where if covers(where) else ROOT), visit.request
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

    def sign_out(visit: Visit) -> Response:
        browsers.sign_out(visit.session)
        return visit.to(f"{ROOT}/sign-in")

    async def completions(request: Request) -> Response:
        pages.check_origin(request)
        return await openai.completions(request)

    async def chats(request: Request) -> Response:
        pages.check_origin(request)
        return await openai.chats(request)

    shown = (sign_in_page, sign_in, sign_out, home, playground, training, costs, state)
    shown += (policies.policies, policies.policy, policies.curves)
    shown += (policies.promote, policies.rollback)
    by_name = {one.__name__: one for one in shown}
    handlers = pages.endpoints(server, browsers.keys is not None, by_name)
    handlers |= {"static": pages.static, "completions": completions, "chats": chats}
    return endpoints.routes(endpoints.console_endpoints(), SimpleNamespace(**handlers))


def home(visit: Visit) -> Response:
    return visit.to(ROOT + next(path for path, scopes in HOMES.items() if visit.may(*scopes)))


def playground(visit: Visit) -> Response:
    server = visit.server
    tokenizer = server.base.tokenizer
    values = {
        "names": [card["id"] for card in server.weights.page(visit.tenant, limit=SUGGESTED).cards],
        "a": visit.query.get("a", "") or server.name,
        "b": visit.query.get("b", ""),
        "has_tokenizer": tokenizer is not None,
        "chats": tokenizer is not None and tokenizer.chats,
    }
    return visit.page("playground.html", values)


def training(visit: Visit) -> Response:
    """Shows a page of the tenant's models, newest first."""
    book, offset = visit.server.book, visit.fields(PageQuery).offset
    count = book.count_models(visit.tenant)
    values = {
        "models": book.models(visit.tenant, MODELS, offset),
        "count": count,
        "offset": offset,
        "before": max(0, offset - MODELS),
        "next": offset + MODELS if offset + MODELS < count else 0,
    }
    return visit.page("training.html", values)


def costs(visit: Visit) -> Response:
    """Shows the policies and tenants with the highest costs; operators see all tenants."""
    kinds = ("policy",) if visit.owner is not None else ("tenant", "policy")
    listed = visit.server.costs.listed
    tables = {by: list(listed(by, visit.owner, COSTS, 0).items()) for by in kinds}
    return visit.page("costs.html", {"tables": tables, "kinds": KINDS, "most": COSTS})


def state(visit: Visit) -> Response:
    """Shows residency and queues of all tenants."""
    server, found = visit.server, state_of(visit.server)
    gaps, resident = sorted(server.durable.gaps), found["residency"]["resident"]
    served = {tenant: cost.seconds for tenant, cost in server.costs.since_start().items()}
    values = {
        "state": found,
        "sizes": server.sizes,
        "unfinished": server.engine.in_flight().total(),
        "gaps": [(f"{q:.0%}", gaps[math.ceil(q * len(gaps)) - 1]) for q in QUANTILES if gaps],
        "resident": [(digest, *_named(server, digest)) for digest in resident[:RESIDENT]],
        "more": max(0, len(resident) - RESIDENT),
        "served": sorted(served.items(), key=lambda one: -one[1]),
    }
    return visit.page("server_state.html" if visit.part else "server.html", values)


def _named(server: Server, digest: str) -> tuple[str, str]:
    """Returns name and policy of a revision; outside the catalog its loaded names and no policy."""
    found: Any = found_or_none(server.catalog.resolve, digest)
    if found is not None:
        return f"{found.policy}@{found.number}", found.policy
    return ", ".join(name for name in server.weights.names_of(digest) if name != digest), ""
