"""Training checkpoints: exact, the last few kept, atomic under kill -9, honest about what is
committed and about a full disk.
"""

import gc
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mint_jax.checkpoint import Checkpoints
from mint_jax.errors import UserError
from tests.disks import LIMITS, run_limited

SERVER = multiprocessing.get_context("forkserver")  # imports once, forks for every writer
SERVER.set_forkserver_preload(
    ["mint_jax.launch", "mint_jax.checkpoint", "mint_jax.catalog.lifecycle", "pytest"]
)


def tree(rng, n=30) -> dict:
    bits = rng.integers(0, 2**32, (3, n), dtype=np.uint32)
    return {
        "8": {
            "a": jnp.asarray(bits.view(np.float32)),
            "b": jnp.asarray(rng.normal(size=(n, 2)), jnp.bfloat16),
        },
        "16": {
            "steps": jnp.asarray(rng.integers(0, 99, n), jnp.int32),
            "key": jnp.asarray(bits[0]),
            "on": jnp.asarray(bits[1] % 2 == 0),
        },
        "scalar": jnp.float32(rng.normal()),
    }


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()  # bit for bit, NaN too


@pytest.fixture
def checkpoints(tmp_path):
    """``checkpoints(**options)`` opens the test's folder; all are closed at the end."""
    opened = []

    def make(**options) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_arrays_are_restored_into_another_sharding(rng, checkpoints, mesh, mesh8):
    x = rng.normal(size=(8, 16)).astype(np.float32)
    split = NamedSharding(mesh8, PartitionSpec(("data", "fsdp"), "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    saved = checkpoints()
    for step, (source, target) in enumerate([(split, whole), (whole, split)], 1):
        saved.save(step, {"x": jax.device_put(x, source)}, {})
        _, found, _ = saved.restore(
            {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)}, step
        )
        np.testing.assert_array_equal(found["x"], x)
        assert found["x"].sharding.is_equivalent_to(target, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["8"].update(a=jnp.zeros((3, 31))),
        lambda t: t["8"].pop("a"),
        lambda t: t.update(new=jnp.zeros(2)),
    ],
    ids=["shape", "less", "more"],
)
def test_a_checkpoint_of_another_shape_is_refused(rng, checkpoints, change):
    arrays, saved = tree(rng), checkpoints()
    saved.save(4, arrays, {})
    saved.wait()
    change(arrays)
    with pytest.raises(
        UserError,
        match=r"checkpoint 4 in .* does not fit this config .*: resume with the config saved",
    ):
        saved.restore(arrays)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES = {
    "cut": cut,
    "flipped": flip,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damaged_file_is_named_and_nothing_is_restored(how, rng, tmp_path, checkpoints):
    arrays, folder, saved = tree(rng), tmp_path / "checkpoints", checkpoints()
    for step in (6, 7):
        saved.save(step, arrays, {"at": step}, {"more": arrays["8"]})
    saved.wait()
    sound = shutil.copytree(folder / "step_7", tmp_path / "sound")
    files = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file())
    assert {
        "digests.json",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "arrays/_METADATA",
    } <= set(map(str, files))
    calls = (lambda c: c.restore(arrays), lambda c: c.restore_item(7, "more", arrays["8"]))
    for number, file in enumerate(files):
        DAMAGES[how](folder / "step_7" / file)
        again = checkpoints()
        assert again.latest() == 7, "an older one is never taken unasked"
        # a mark; what it says is not read
        if str(file) == "commit_success.txt" and how in ("cut", "flipped"):
            assert_same(again.restore(arrays)[1], arrays)
        else:
            with pytest.raises(UserError) as error:
                calls[number % len(calls)](again)
            message = str(error.value)
            assert message.startswith(f"checkpoint 7 is damaged: {folder / 'step_7' / file} ")
            assert f"remove {folder / 'step_7'} and start again" in message
            assert "config" not in message
        shutil.rmtree(folder / "step_7")
        shutil.copytree(sound, folder / "step_7")
    assert_same(checkpoints().restore(arrays)[1], arrays)  # a copy put back is as good
    shutil.rmtree(folder / "step_7")
    step, found, extra = checkpoints().restore(arrays)
    assert (step, extra) == (6, {"at": 6})
    assert_same(found, arrays)
    DAMAGES[how](folder / "step_6" / "arrays" / "_METADATA")
    with pytest.raises(
        UserError, match=f"remove {folder} to start over; no older checkpoint is whole"
    ):
        checkpoints().restore(arrays)


def numbers(step: int, count: int = 300_000) -> np.ndarray:
    return np.random.default_rng(step).normal(size=count).astype(np.float32)


def save_until_killed(folder, connection):
    """Goes on from the latest step, 1.2 MB a step, and says each step that is committed."""
    saved = Checkpoints(folder, keep=2, on_commit=connection.send)
    for step in range((saved.latest() or 0) + 1, 10_000):
        saved.save(step, {"x": jnp.asarray(numbers(step))}, {"step": step})


@pytest.mark.long
def test_a_killed_run_resumes_from_its_last_commit_or_later(rng, tmp_path):
    """12 runs, each resuming the one before, are killed at random moments while they save."""
    last = 0
    for _ in range(12):
        receiver, sender = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=save_until_killed, args=(tmp_path / "checkpoints", sender))
        process.start()
        sender.close()
        try:
            said = receiver.recv()
            assert said > last
            last = said
            time.sleep(rng.uniform(0, 0.12))
            process.kill()
            while True:
                last = receiver.recv()
        except EOFError:
            process.join()
        assert process.exitcode == -9
        saved = Checkpoints(tmp_path / "checkpoints")
        step, found, extra = saved.restore({"x": jax.ShapeDtypeStruct((300_000,), jnp.float32)})
        saved.close()
        assert step >= last
        assert extra == {"step": step}
        np.testing.assert_array_equal(found["x"], numbers(step))
        last = step
    assert last >= 12


class Late:
    """Ends as a write of TensorStore does whose save has failed: often none is so late."""

    def __del__(self):
        raise RuntimeError("Event loop is closed")


def fill_the_disk(directory: str):
    """Saves a small, a large and a small step; prints what came of it."""
    said, report = [], []
    saved = Checkpoints(directory, keep=2, on_commit=said.append)
    for step, n in ((1, 1000), (2, 2_000_000), (3, 1000)):
        # each fails in a task of its own
        many = {f"y{i}": jnp.ones(50_000) for i in range(20)} if step == 2 else {}
        try:
            saved.save(step, {"x": jnp.asarray(numbers(step, n)), **many}, {"n": n})
            saved.wait()
        except Exception as error:
            report.append([step, type(error).__name__, str(error), saved.latest()])
    saved.close()
    gc.collect()  # a task that failed unheard is told of when it is freed
    Late()
    again = Checkpoints(directory)
    step, found, extra = again.restore({"x": jnp.zeros(1000)})
    np.testing.assert_array_equal(found["x"], numbers(step, 1000))
    out = {"said": said, "report": report, "restored": [step, extra]}
    print(json.dumps(out | {"entries": sorted(os.listdir(directory))}))


REMEDIES = (
    "free disk space or set --workdir to a larger disk",
    "check that the folder is writable",
)


@pytest.mark.parametrize(("limit", "remedy"), zip(LIMITS, REMEDIES), ids=LIMITS)
def test_a_full_disk_is_an_error_that_names_the_last_valid_step(tmp_path, limit, remedy):
    """8 MB where there is room for 2."""
    result = json.loads(run_limited(limit, 2, "tests.checkpoint_test", tmp_path).splitlines()[-1])
    [(step, kind, message, latest)] = result["report"]
    assert (step, kind, latest) == (2, "UserError", 1)
    assert remedy in message
    assert "step 1 is the last valid checkpoint" in message
    assert result["said"] == [1, 3]
    assert result["restored"] == [3, {"n": 1000}]
    assert result["entries"] == ["step_1", "step_3"]
