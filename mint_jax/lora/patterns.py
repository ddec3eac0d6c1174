"""Rank and scale of each module or parameter in PEFT: ``r`` and ``lora_alpha`` with patterns."""

import re
from collections.abc import Mapping
from typing import Any

DEFAULT_RANK, DEFAULT_ALPHA = 8, 8  # defaults of ``peft.LoraConfig`` for omitted fields


class Patterns:
    """Ranks and scales of one ``adapter_config.json``, with PEFT's defaults."""

    def __init__(self, config: Mapping[str, Any]):
        self.rank_default: int = DEFAULT_RANK if config.get("r") is None else config["r"]
        self.alpha_default: float = (
            DEFAULT_ALPHA if config.get("lora_alpha") is None else config["lora_alpha"]
        )
        self.rslora = bool(config.get("use_rslora", False))
        self._ranks: Mapping[str, int] = config.get("rank_pattern") or {}
        self._alphas: Mapping[str, float] = config.get("alpha_pattern") or {}

    @staticmethod
    def _lookup(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
        for pattern, value in patterns.items():  # PEFT matches a whole suffix of the name
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return default

    def rank(self, name: str) -> int:
        return self._lookup(self._ranks, name, self.rank_default)

    def scale(self, name: str, rank: int) -> float:
        alpha = self._lookup(self._alphas, name, self.alpha_default)
        return float(alpha) / (rank**0.5 if self.rslora else rank)
