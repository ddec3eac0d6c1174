"""One writer per policy: fencing does not depend on clocks, expiry decides only who may take
over.
"""

import pytest

from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed


def writes(catalog, session):
    """Every way to write through a session."""
    return (
        lambda: catalog.export("p", packed(99), 99, session=session),
        lambda: catalog.checkpoint("p", 1, "there", session=session),
        lambda: catalog.rollout("p", 1, b"rollout", tokens=1, mean_reward=0.0, session=session),
        lambda: catalog.renew_session(session),
        lambda: catalog.close_session(session),
    )


def test_another_owner_waits_for_the_expiry(catalog, clock):
    catalog.create_policy("p", SCHEMA)
    first = catalog.open_session("p", "a", 60)
    clock.now += 59
    with pytest.raises(
        UserError,
        match=("'p' is being trained by 'a' for 1 s more: wait, or close that session"),
    ):
        catalog.open_session("p", "b")
    first = catalog.renew_session(first, 60)
    clock.now += 59
    with pytest.raises(UserError, match="being trained by 'a'"):
        catalog.open_session("p", "b")
    clock.now += 1
    second = catalog.open_session("p", "b")
    for write in writes(catalog, first):
        with pytest.raises(
            UserError, match="session 1 of policy 'p' by 'a' was fenced off by session 2 of 'b'"
        ):
            write()
    assert catalog.export("p", packed(1), 1, session=second).number == 1
    assert catalog.audit("p")[-2].details["fenced"] == "a"
