"""A program's name is said while it compiles, and nothing is said of what is quick."""

import io
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from mint_jax import compiling, host
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


def test_the_line_comes_before_the_end_and_quick_programs_have_none():
    out = io.StringIO()
    announcer = compiling.Announcer(0.05, out)
    announcer.started("/another/event", 0.0, fun_name="other")
    announcer.started(compiling.EVENT, 0.0, fun_name="quick")
    announcer.ended(compiling.EVENT, 0.01, fun_name="quick")
    announcer.started(compiling.EVENT, 0.0, fun_name="long")
    deadline = time.monotonic() + 30
    while not out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert out.getvalue() == "compiling long …\n"  # it has not ended
    announcer.ended("/another/event", 1.0)
    announcer.ended(compiling.EVENT, 75.0, fun_name="long")
    announcer.ended(compiling.EVENT, 75.0, fun_name="long")  # an end without a start
    assert out.getvalue() == "compiling long …\ncompiled long in 1:15\n"


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


def test_a_program_that_cannot_be_compiled_is_told_and_ends_the_rest():
    def fails():
        raise ValueError("no such instruction")

    programs = Programs([Program("a", "a", fails), Program("b", "b", lambda: None)])
    programs.start()
    assert not programs.wait(10)
    assert isinstance(programs.failed, ValueError)
    assert programs.ready == 0


def test_closing_waits_for_no_program():
    go, entered = threading.Event(), threading.Event()

    def build():
        entered.set()
        assert go.wait(10)

    programs = Programs([Program("a", "a", build), Program("b", "b", lambda: None)])
    programs.start()
    assert entered.wait(10)
    programs.close()
    assert host.is_abandoning()
    go.set()
    assert not programs.wait(10)
    assert (programs.has("a"), programs.has("b")) == (True, False)
