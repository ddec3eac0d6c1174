"""Keys: shown once, kept as hashes, revoked without a restart."""

import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mint_jax.errors import UserError
from mint_jax.service.keys import FILE, PREFIX, Keys, add, main, read, revoke
from tests.residency.clock import Clock


def test_a_key_is_found_by_its_last_characters_until_it_expires(tmp_path):
    key, secret = add(tmp_path, "alice", ["sample", "train", "sample"], days=2)
    keys, bare = Keys(tmp_path), secret.removeprefix(PREFIX)
    assert (key.scopes, len(bare)) == (("sample", "train"), 43)
    for prefix in ("", "tml-", "sk-", PREFIX):
        assert keys.find(prefix + bare) == key
    for wrong in ("", PREFIX, bare[1:], bare + "A", bare + "\n", "x, " + bare, "x" * 86 + bare):
        assert keys.find(wrong) is None
    assert secret[-43:] not in (tmp_path / FILE).read_text()
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    now = time.time()
    assert Keys(tmp_path, clock=lambda: now + 86400).find(secret) == key
    assert Keys(tmp_path, clock=lambda: now + 2 * 86400 + 1).find(secret) is None


def test_keys_come_and_go_while_a_server_runs(tmp_path):
    clock = Clock()
    first, secret = add(tmp_path, "alice", ["read"])
    keys = Keys(tmp_path, monotonic=clock)
    second, other = add(tmp_path, "bob", ["read"])
    revoke(tmp_path, first.id)
    assert keys.find(secret) == first  # the file was read less than a second ago
    clock.now += 1.0
    assert keys.find(secret) is None
    assert keys.find(other) == second
    with pytest.raises(UserError, match=f"no key '{first.id}'"):
        revoke(tmp_path, first.id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("{"), "no list of keys"),
        (
            lambda path: path.write_text(path.read_text().replace('"read"', '"all"')),
            "no list of keys",
        ),
        (lambda path: path.unlink(), "make a key with"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read"),
        (lambda path: path.chmod(0o620), "chmod 600"),
    ],
)
def test_no_key_is_valid_while_the_file_is_damaged(tmp_path, change, message):
    clock, path = Clock(), tmp_path / FILE
    _, secret = add(tmp_path, "alice", ["read"])
    keys, good = Keys(tmp_path, monotonic=clock), path.read_text()
    change(path)
    clock.now += 1.0
    for _ in range(2):  # also between two checks of the file
        with pytest.raises(UserError, match=message):
            keys.find(secret)
    if path.is_dir():
        path.rmdir()
    path.write_text(good)
    path.chmod(0o600)
    clock.now += 1.0
    assert keys.find(secret) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tenant": "a\nb"}, "tenant"),
        ({"scopes": []}, "no scope"),
        ({"scopes": ["Train"]}, "choose one of: read, sample, train, admin"),
        ({"days": float("nan")}, "days is nan"),
    ],
)
def test_a_bad_key_is_not_made(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        add(tmp_path, **{"tenant": "a", "scopes": ["read"], **values})
    assert not (tmp_path / FILE).exists()


def test_changes_made_at_once_are_all_kept(tmp_path):
    def adds(tenant):
        for _ in range(5):
            add(tmp_path, tenant, ["read"])

    # each change opens the folder anew, so that threads exclude each other as processes do
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(adds, ["a", "b", "c"]))
    assert sorted(key.tenant for key in read(tmp_path)) == sorted([*"abc"] * 5)


def test_the_commands(tmp_path, capsys):
    add_ = ["add", "--tenant", "alice", "--folder"]
    assert main([*add_, str(tmp_path), "--scopes", "sample, train"]) == 0
    secret, told = capsys.readouterr()
    secret = secret.rstrip("\n")
    assert secret not in told
    key = Keys(tmp_path).find(secret)
    assert key is not None
    assert main(["list", "--folder", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert f"{key.id}\talice\tsample,train\t" in listed
    assert secret[-43:] not in listed
    assert key.hash not in listed
    assert main(["revoke", "--folder", str(tmp_path), key.id]) == 0
    assert read(tmp_path) == []
    capsys.readouterr()
    assert main(["revoke", "--folder", str(tmp_path), key.id]) == 2
    assert "no key" in capsys.readouterr().err
    assert main(["list", "--folder", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
