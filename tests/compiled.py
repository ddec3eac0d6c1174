"""How programs of the tests are compiled: quickly, or as for users.

Most of the time of the tests is compiling. Here and in the processes that they start it is done
without LLVM's optimisations and by XLA's older emitters of loops, a quarter of the time that users'
code takes (an update, scores and samples of a tiny dense base: 13.9 s, without the optimisations
7.8 s, and so 3.4 s). XLA's passes, and so what is computed, stay the same; the last bits need not.
``MINT_TEST_CODE=users`` compiles as for users: ``make test-long`` and ``make test-slow`` set it,
and the latter runs what is marked ``bits`` once more.
"""

import importlib.util
import mmap
import os
from pathlib import Path


def quickly() -> str:
    """Sets what JAX reads; returns a flag for XLA if this one has it: one that it does not know
    ends the process.
    """
    if os.environ.get("MINT_TEST_CODE") == "users":
        return ""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None
    flag = "xla_cpu_use_fusion_emitters"
    with (Path(str(jaxlib.origin)).parent / "libjax_common.so").open("rb") as file:
        code = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # As a word of its own: jaxlib 0.12 has dropped the flag and keeps its name in a description
        # of messages.
        return f" --{flag}=false" if code.find(b"\0" + flag.encode() + b"\0") >= 0 else ""
