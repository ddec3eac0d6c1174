"""Keys: shown once, kept as hashes, revoked without a restart."""

import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mint_jax.errors import UserError
from mint_jax.service.keys import FILE, PREFIX, Keys, ReloadedFile, add, main, read, revoke


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_key_is_found_by_its_last_characters_whatever_stands_before(tmp_path):
    key, secret = add(tmp_path, "alice", ["sample", "train", "sample"], note="hers")
    keys = Keys(tmp_path)
    assert secret.startswith(PREFIX)
    assert len(secret) == len(PREFIX) + 43
    assert keys.find(secret) == key
    assert key.scopes == ("sample", "train")
    bare = secret.removeprefix(PREFIX)
    for prefix in ("", "tml-", "sk-", "tml-mint-other-"):
        assert keys.find(prefix + bare) == key
    for wrong in (
        "",
        "tml-mint-",
        bare[:-1],
        bare + "A",
        bare[:-1] + ("A" if bare[-1] != "A" else "B"),
        bare + "\n",
        "x, " + bare,
        "ä" + bare,
        "x" * 86 + bare,
        bare[:-1] + "ä",
        " " * 43,
    ):
        assert keys.find(wrong) is None


def test_the_file_has_no_key_and_is_its_owners_alone(tmp_path):
    _, secret = add(tmp_path, "alice", ["read"])
    text = (tmp_path / FILE).read_text()
    assert secret[-43:] not in text
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert len(json.loads(text)) == 1


def test_keys_come_and_go_while_a_server_runs(tmp_path):
    clock = Clock()
    first, secret = add(tmp_path, "alice", ["read"])
    keys = Keys(tmp_path, monotonic=clock)
    second, other = add(tmp_path, "bob", ["read"])
    revoke(tmp_path, first.id)
    assert keys.find(secret) == first  # looked at less than a second ago
    clock.now += 1.0
    assert keys.find(secret) is None
    assert keys.find(other) == second
    with pytest.raises(UserError, match=f"no key '{first.id}'"):
        revoke(tmp_path, first.id)


def test_the_file_is_looked_at_once_a_second(tmp_path, monkeypatch):
    clock = Clock()
    _, secret = add(tmp_path, "alice", ["read"])
    keys = Keys(tmp_path, monotonic=clock)
    looked = []
    monkeypatch.setattr(ReloadedFile, "_check", lambda self: looked.append(clock.now))
    for _ in range(50):
        keys.find(secret)
    assert looked == []
    clock.now += 1.0
    keys.find(secret)
    assert looked == [clock.now]


def test_an_expired_key_is_none(tmp_path):
    _, secret = add(tmp_path, "alice", ["read"], days=2)
    now = time.time()
    assert Keys(tmp_path, clock=lambda: now + 86400).find(secret) is not None
    assert Keys(tmp_path, clock=lambda: now + 2 * 86400 + 1).find(secret) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of keys"),
        ("{", "not a list of keys"),
        ("[1]", "not a list of keys"),
        ('[{"id": "a"}]', "not a list of keys"),
        ("[" * 100_000, "not a list of keys"),
        ("\udcff", "not a list of keys"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path, text, message):
    (tmp_path / FILE).write_text(text, errors="surrogateescape")
    (tmp_path / FILE).chmod(0o600)
    with pytest.raises(UserError, match=message) as raised:
        Keys(tmp_path)
    assert str(tmp_path / FILE) in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scopes": ["everything"]},
        {"scopes": []},
        {"scopes": 3},
        {"hash": "00"},
        {"tenant": "a b"},
        {"tenant": "../a"},
        {"expires": "tomorrow"},
        {"expires": "2027-01-01T00:00:00"},
        {"created": ""},
        {"more": 1},
    ],
)
def test_an_entry_that_is_wrong_is_told(tmp_path, change):
    add(tmp_path, "alice", ["read"])
    entry = json.loads((tmp_path / FILE).read_text())[0]
    (tmp_path / FILE).write_text(json.dumps([{**entry, **change}]))
    with pytest.raises(UserError, match="repair it"):
        Keys(tmp_path)


def test_no_key_is_good_while_the_file_cannot_be_used(tmp_path):
    clock = Clock()
    _, secret = add(tmp_path, "alice", ["read"])
    keys = Keys(tmp_path, monotonic=clock)
    good = (tmp_path / FILE).read_text()
    for breaking, message in [
        (lambda: (tmp_path / FILE).write_text("{"), "not a list"),
        (lambda: (tmp_path / FILE).unlink(), "make a key with"),
        (lambda: (tmp_path / FILE).mkdir(), "cannot be read"),
    ]:
        breaking()
        clock.now += 1.0
        for _ in range(2):  # also between two looks
            with pytest.raises(UserError, match=message):
                keys.find(secret)
    (tmp_path / FILE).rmdir()
    (tmp_path / FILE).write_text(good)
    (tmp_path / FILE).chmod(0o620)
    clock.now += 1.0
    with pytest.raises(UserError, match="chmod 600"):
        keys.find(secret)
    (tmp_path / FILE).chmod(0o600)
    clock.now += 1.0
    assert keys.find(secret) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"scopes": []}, "no scope"),
        ({"scopes": ["Train"]}, "choose one of: read, sample, train, admin"),
        ({"days": 0}, "days is 0"),
        ({"days": float("nan")}, "days is nan"),
        ({"prefix": "a b"}, "prefix"),
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
    add_ = ["add", "--tenant", "alice", "--prefix", "sk-", "--note", "x", "--folder"]
    assert main([*add_, str(tmp_path), "--scopes", "sample, train"]) == 0
    secret, told = capsys.readouterr()
    secret = secret.rstrip("\n")
    assert secret.startswith("sk-")
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
