"""Quotas of owned objects: policies in training, and bytes of these and of checkpoints."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from mint_jax.service.book import Book, Model
from mint_jax.service.quotas import OverQuota, Quotas


class Owned:
    """May be called from any thread.

    Args:
        state_bytes: of the training state of a policy, by its rank and the families that it trains.
    """

    def __init__(
        self, book: Book, quotas: Quotas, state_bytes: Callable[[int, Mapping[str, bool]], int]
    ):
        self._book, self._quotas, self._state_bytes = book, quotas, state_bytes
        self._adding = threading.Lock()  # from what there are to one more

    def add_model(self, session: str, place: int, tenant: str, told: Mapping[str, Any]) -> Model:
        """A session's model of this number, which is made unless it is there. One that says no rank
        cannot be trained, and counts not.

        Raises:
            OverQuota: the tenant has as many as it may.
        """
        quota, id = self._quotas.of(tenant), f"{session}:train:{place}"
        with self._adding:
            if "rank" in told and (quota.policies is not None or quota.bytes is not None):
                others = [model for model in self._trained(tenant) if model.id != id]
                if quota.policies is not None and len(others) >= quota.policies:
                    raise OverQuota(
                        f"tenant {tenant} has {len(others)} policies in training, of"
                        f" {quota.policies}: unload one, or finish a session that is no longer"
                        " needed; its checkpoints stay"
                    )
                self._check_room(tenant, self._state_bytes(told["rank"], told["train"]), others)
            return self._book.add_model(session, place, tenant, told)

    def need_room(self, tenant: str, more: int) -> None:
        """
        Raises:
            OverQuota: the bytes exceed the tenant's quota.
        """
        if more > 0 and self._quotas.of(tenant).bytes is not None:
            self._check_room(tenant, more, self._trained(tenant))

    def _trained(self, tenant: str) -> list[Model]:
        return [model for model in self._book.living(tenant) if "rank" in model.details]

    def _check_room(self, tenant: str, more: int, trained: list[Model]) -> None:
        if (most := self._quotas.of(tenant).bytes) is None:
            return
        has = self._book.checkpoint_bytes(tenant) + sum(
            self._state_bytes(one.details["rank"], one.details["train"]) for one in trained
        )
        if has + more > most:
            raise OverQuota(
                f"tenant {tenant} has {has} bytes of checkpoints and training states and asks for"
                f" {more} more, of {most}: delete checkpoints, or unload policies"
            )
