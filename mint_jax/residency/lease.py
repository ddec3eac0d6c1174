"""A lease: one request's hold on a slot."""

from collections.abc import Callable

from mint_jax.lora.tree import Slot


class Lease:
    """A revision's slot, its own until ``release``. A context manager; releasing twice is releasing
    once.

    Attributes:
        digest: the revision.
        slot: where it is.
        modules: how many modules of the base it binds to, one per projection, layer and expert.
    """

    def __init__(self, digest: str, slot: Slot, modules: int, give_back: Callable[[str], None]):
        self.digest, self.slot, self.modules = digest, slot, modules
        self._give_back: Callable[[str], None] | None = give_back

    def release(self) -> None:
        """Ends the lease."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.digest)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
