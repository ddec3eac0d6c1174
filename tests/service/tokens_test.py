"""Tokens: they end with their time and with their key, and outlive a restart."""

import base64
import json

import pytest

from mint_jax.errors import UserError
from mint_jax.service import tokens as tokens_lib
from mint_jax.service.keys import Keys, add, revoke
from mint_jax.service.tokens import FILE, LIFE_S, Tokens
from tests.service.keys_test import Clock


def test_a_token_is_its_key_until_its_time_is_over(tmp_path):
    clock = Clock()
    key, _ = add(tmp_path, "alice", ["train"])
    keys = Keys(tmp_path, clock=clock)
    token = keys.tokens.make(key.id)
    assert keys.find(token) == key
    assert Keys(tmp_path, clock=clock).find(token) == key, "as after a restart"
    clock.now += LIFE_S - 1
    assert keys.find(token) == key
    clock.now += 1
    assert keys.find(token) is None
    told = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert told == {"sub": key.id, "iat": 1000, "exp": 1000 + LIFE_S}, "as the SDK reads it"


def test_a_revoked_key_has_no_tokens(tmp_path):
    key, _ = add(tmp_path, "alice", ["train"])
    other, _ = add(tmp_path, "bob", ["train"])
    looked = Clock()
    keys = Keys(tmp_path, monotonic=looked)
    mine, its = keys.tokens.make(key.id), keys.tokens.make(other.id)
    revoke(tmp_path, key.id)
    looked.now += 2
    assert (keys.find(mine), keys.find(its)) == (None, other)
    assert keys.find(keys.tokens.make("0" * 12)) is None


def test_what_was_not_signed_here_is_no_token(tmp_path, rng):
    tokens, others = Tokens(tmp_path), Tokens()
    token = tokens.make("abc")
    header, told, signature = token.split(".")
    forged = base64.urlsafe_b64encode(b'{"sub":"other","exp":9999999999}').rstrip(b"=").decode()
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    place = int(rng.integers(len(token) - 1))  # the last character has unused bits
    changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
    for wrong in (
        others.make("abc"),
        f"{header}.{forged}.{signature}",
        f"{none}.{told}.",
        f"{header}.{told}.",
        "..",
        changed,
        "ä" + token,
    ):
        assert tokens.key_of(wrong) is None, wrong
    assert tokens.key_of("." * 2 + "x" * 10_000) is None
    assert tokens.key_of(token) == "abc"


def test_what_signs_is_for_the_servers_user_alone(tmp_path):
    Tokens(tmp_path)
    path = tmp_path / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == [FILE]
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Tokens(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="expected 32"):
        Tokens(tmp_path)
    with pytest.raises(UserError, match="cannot be read or made"):
        tokens_lib.Tokens(tmp_path / "nowhere")
