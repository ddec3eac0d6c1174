import os
import time


class _Group:
    def __init__(self, bundles: list[dict[str, float]]):
        self._bundles = bundles

    def wait(self, timeout_seconds: float) -> bool:
        if len(self._bundles) <= int(os.environ["RAY_NODES"]):
            return True
        time.sleep(timeout_seconds)
        return False


def placement_group(bundles: list[dict[str, float]], *, strategy: str) -> _Group:
    assert strategy == "STRICT_SPREAD"
    return _Group(bundles)


def remove_placement_group(group: _Group) -> None:
    pass
