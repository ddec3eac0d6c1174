"""Grouped matmuls of tokamax (``ragged_dot``) and torch (``grouped_mm``), where they are installed.

Each multiplies base and adapters of one expert projection pair; rows are sorted by group.

Axes: M rows, D in, F out, R rank, E experts, G groups (expert, adapter).
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# of torch's grouped_mm on a GPU: of 1,024 torch 2.11 says "Can't process more than 1024 groups"
MOST_GROUPS = 1023
# ``x [M, D], w [G, D, F], sizes [G] -> [M, F]``
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def tokamax_dot() -> Product:
    """Tokamax' own choice of implementation.

    Raises:
        NotImplementedError: it is not installed.
    """
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed: pip install tokamax")
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():
        # it would parse this process's command line, whose options it does not know
        flags.FLAGS.mark_as_parsed()
    return lambda x, w, sizes: tokamax.ragged_dot(x, w, sizes)


class TorchGrouped:
    """Base and adapters as products of torch's ``grouped_mm``, with autograd's gradients of rows
    and factors.

    Args:
        x, w, a, b, g: ``[M, D]``, ``[E, D, F]``, ``[G, R, D]``, ``[G, R, F]`` and the results'
            gradients ``[M, F]`` of each projection.
        sizes_E, sizes_G: rows of each expert, and of each group.

    Raises:
        NotImplementedError: torch is not installed, or has no device of this process's kind.
    """

    def __init__(
        self,
        x: Any,
        w: Sequence[Any],
        a: Sequence[Any],
        b: Sequence[Any],
        g: Sequence[Any],
        sizes_E: Any,
        sizes_G: Any,
    ):
        if importlib.util.find_spec("torch") is None:
            raise NotImplementedError("torch is not installed: pip install torch==2.13.0")
        import torch

        here = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
        if here is None or (here == "cuda" and not torch.cuda.is_available()):
            raise NotImplementedError(
                f"torch {torch.__version__} has no device here, where JAX computes on"
                f" {jax.default_backend()}"
            )
        if here == "cuda" and len(sizes_G) > MOST_GROUPS:
            raise NotImplementedError(
                f"{len(sizes_G)} groups; torch's grouped_mm takes {MOST_GROUPS} on a GPU"
            )
        self.cuda = here == "cuda"

        def moved(v: Any) -> Any:
            return torch.from_numpy(np.array(v, np.float32)).to(here, getattr(torch, str(v.dtype)))

        self.x, self.w, self.a, self.b, self.g = (
            moved(x),
            *([moved(v) for v in of] for of in (w, a, b, g)),
        )
        self.ends_E, self.ends_G = (
            torch.from_numpy(np.cumsum(sizes).astype(np.int32)).to(here)
            for sizes in (sizes_E, sizes_G)
        )
        self.trained = [self.x, *self.a, *self.b]

    def forward(self) -> list[Any]:
        """``[M, F]`` of each projection."""
        import torch

        with torch.no_grad():
            return self._done(self._made())

    def both(self) -> tuple[list[Any], Any]:
        """And the gradients of rows and factors."""
        import torch

        for one in self.trained:
            one.requires_grad_(True)
        made = self._made()
        return self._done((made, torch.autograd.grad(made, self.trained, self.g)))

    def _made(self) -> list[Any]:
        from torch.nn.functional import grouped_mm

        def one(w: Any, a: Any, b: Any) -> Any:
            inner = grouped_mm(self.x, a.transpose(1, 2), offs=self.ends_G)
            return grouped_mm(self.x, w, offs=self.ends_E) + grouped_mm(inner, b, offs=self.ends_G)

        return [one(*of) for of in zip(self.w, self.a, self.b)]

    def _done(self, made: Any) -> Any:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return made
