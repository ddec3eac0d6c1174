"""Valid ranges of sampling settings. Imports no jax, so that ``launch`` checks a config quickly."""

import numbers
from typing import Any

from mint_jax.errors import UserError

# Minimum, maximum, and True if the minimum itself is excluded. Within these ranges no logit and no
# inverse leaves float32: XLA divides by multiplying with the inverse, and flushes values below
# 1.2e-38 to 0.
RANGES = {
    "temperature": (0, 1e30, False),
    "top_k": (0, 2**31 - 1, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (1e-6, 1e6, False),
    "frequency_penalty": (-1e6, 1e6, False),
    "presence_penalty": (-1e6, 1e6, False),
}


def check_ranges(sampling: Any, prefix: str = "") -> None:
    """Raises ``UserError`` if a setting among the attributes of ``sampling`` is outside ``RANGES``;
    ``prefix`` precedes its name in the error.
    """
    for name, (least, most, above) in RANGES.items():
        value = getattr(sampling, name, most)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (above and value == least):
            says = f"expected {least:g} {'<' if above else '<='} {name} <= {most:g}"
            raise UserError(f"{prefix}{name} is {value!r}; {says}")
