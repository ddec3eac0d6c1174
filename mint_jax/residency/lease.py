"""Leases of slots by requests."""

from collections.abc import Callable

from mint_jax.lora.tree import Slot


class AdapterLease:
    """A lease of a revision's slot, which keeps the revision there until ``release``. A context
    manager; releasing twice has no effect.

    Attributes:
        digest: digest of the revision.
        slot: its slot.
        modules: number of modules that it binds to, one per projection, layer and expert.
    """

    def __init__(self, digest: str, slot: Slot, modules: int, on_release: Callable[[str], None]):
        self.digest, self.slot, self.modules = digest, slot, modules
        self._on_release: Callable[[str], None] | None = on_release

    def release(self) -> None:
        """Ends the lease."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release(self.digest)

    def __enter__(self) -> "AdapterLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
