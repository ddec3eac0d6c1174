"""The rank and the scale that PEFT gives each module or parameter: ``r`` and ``lora_alpha`` with their patterns."""

import re
from collections.abc import Mapping
from typing import Any


class Patterns:
    """Ranks and scales of one ``adapter_config.json``.

    Attributes:
        rank_default: ``r``, or None where the config has none.
        alpha_default: ``lora_alpha``, likewise.
        rslora: the scale is ``alpha / sqrt(rank)`` in place of ``alpha / rank``.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.rank_default: int | None = config.get("r")
        self.alpha_default: float | None = config.get("lora_alpha")
        self.rslora = bool(config.get("use_rslora", False))
        self._ranks: Mapping[str, int] = config.get("rank_pattern") or {}
        self._alphas: Mapping[str, float] = config.get("alpha_pattern") or {}

    @staticmethod
    def _lookup(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
        for pattern, value in patterns.items():  # as PEFT matches them: a whole suffix of the name
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return default

    def rank(self, name: str) -> int | None:
        """The rank of a module or parameter; None where nothing states it."""
        return self._lookup(self._ranks, name, self.rank_default)

    def scale(self, name: str, rank: int) -> float:
        """What the delta of a module or parameter is multiplied by."""
        alpha = self._lookup(self._alphas, name, self.alpha_default)
        return float(rank if alpha is None else alpha) / (rank**0.5 if self.rslora else rank)
