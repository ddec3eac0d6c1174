"""A program's name is said while it compiles, and nothing is said of what is quick."""

import io
import threading

import jax
import jax.numpy as jnp
import pytest

from mint_jax import compiling
from mint_jax.compiling import Program, Programs


@pytest.fixture
def announced():
    """``announced(after)`` -> what is printed while programs compile."""
    listeners = []

    def start(after):
        out = io.StringIO()
        announcer = compiling.Announcer(after, out)
        listeners.append(announcer)
        jax.monitoring.register_scalar_listener(announcer.started)
        jax.monitoring.register_event_duration_secs_listener(announcer.ended)
        return out

    yield start
    for announcer in listeners:
        jax.monitoring.unregister_scalar_listener(announcer.started)
        jax.monitoring.unregister_event_duration_listener(announcer.ended)


def test_the_program_is_named_while_it_compiles(announced, rng):
    out, seen = announced(0.0), []
    constant = float(rng.normal())  # not in any cache

    def slow_program(x):
        for _ in range(60):
            x = jnp.sin(x @ x + constant)
        return x

    jax.jit(slow_program)(jnp.ones((8, 8)))
    seen = out.getvalue().splitlines()
    assert "compiling jit(slow_program) …" in seen
    assert any(line.startswith("compiled jit(slow_program) in 0:") for line in seen)


def test_programs_are_compiled_by_urgency_and_first_what_somebody_waits_for():
    built, entered, go = [], threading.Event(), threading.Event()

    def program(key, urgency):
        def build():
            entered.set()
            assert go.wait(10)
            built.append(key)

        return Program(key, key, build, urgency)

    changed = threading.Semaphore(0)
    programs = Programs(
        [
            program("rare", 2),
            program("a", 1),
            program("b", 1),
            program("first", 0),
            program("c", 1),
        ],
        changed.release,
    )
    programs.start()
    assert entered.wait(10)
    assert not programs.want("rare")
    assert not programs.has("first")
    go.set()
    assert programs.wait(10)
    assert built == ["first", "rare", "a", "b", "c"]
    assert programs.want("a")
    assert (programs.ready, programs.total, programs.now) == (5, 5, "")
    assert all(changed.acquire(blocking=False) for _ in built)
