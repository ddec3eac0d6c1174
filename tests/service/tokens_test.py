"""Tokens end with their time and with their key, and survive a restart."""

import base64
import json

import pytest

from mint_jax.errors import UserError
from mint_jax.service.keys import Keys, add, revoke
from mint_jax.service.tokens import FILE, LIFE_S, Tokens
from tests.residency.clock import Clock


def test_a_token_is_its_key_until_it_expires_or_the_key_is_revoked(tmp_path):
    clock, monotonic = Clock(), Clock()
    key, _ = add(tmp_path, "alice", ["train"])
    keys = Keys(tmp_path, clock=clock, monotonic=monotonic)
    token = keys.tokens.make(key.id)
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims == {"sub": key.id, "iat": 1000, "exp": 1000 + LIFE_S}, "the SDK reads these"
    clock.now += LIFE_S - 1
    assert keys.find(token) == Keys(tmp_path, clock=clock).find(token) == key
    clock.now += 1
    assert keys.find(token) is None
    other = keys.tokens.make(key.id)
    revoke(tmp_path, key.id)
    monotonic.now += 2
    assert keys.find(other) is None


def test_forged_tokens_are_invalid(tmp_path, rng):
    tokens, others = Tokens(tmp_path), Tokens()
    token = tokens.make("abc")
    header, claims, signature = token.split(".")
    forged = base64.urlsafe_b64encode(b'{"sub":"other","exp":9999999999}').rstrip(b"=").decode()
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    place = int(rng.integers(len(token) - 1))  # the last character has unused bits
    changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
    unsigned = [f"{header}.{claims}.", f"{none}.{claims}.", f"{header}.{forged}.{signature}"]
    for wrong in (others.make("abc"), *unsigned, "..", changed, "ä" + token, ".." + "x" * 10_000):
        assert tokens.key_of(wrong) is None, wrong
    assert tokens.key_of(token) == "abc"


def test_the_secret_is_readable_by_the_servers_user_only(tmp_path):
    Tokens(tmp_path)
    path = tmp_path / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Tokens(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="expected 32"):
        Tokens(tmp_path)
    with pytest.raises(UserError, match="cannot be read or made"):
        Tokens(tmp_path / "nowhere")
