"""The command line: what every command prints, as a table and as JSON, its exit status, and what it
says of mistakes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.rollouts import Rollouts, pack_rollouts
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.canaries_test import GUARD, rewards

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A catalog with a policy of three revisions, ``serving`` moved twice, and one with another
    tenant's.
    """
    with Catalog.open(tmp_path / "catalog", actor="tester") as catalog:
        for i in range(3):
            catalog.export("chat", packed(i), 10 * i, create=True, origin="a run")
        catalog.promote("chat", 1, why="first")
        catalog.promote("chat", 2, by="ann", why="better")
        catalog.export("acme/bot", packed(7), 1, create=True)
    return tmp_path / "catalog"


@pytest.fixture
def run(folder, capsys):
    """``run("ls", ...)`` -> status, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([f"--catalog={folder}", *map(str, argv)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def output_of(run):
    """``output_of("ls", ...)`` -> the JSON document of a command that succeeds."""

    def call(*argv: str):
        code, out, err = run(*argv, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def refused(run, *argv) -> str:
    """What stderr says of a mistake: one line, status 2, nothing on stdout."""
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_ls_lists_policies_and_revisions_page_by_page(run, output_of):
    page = output_of("ls", "--limit=1")
    rest = output_of("ls", "--limit=1", f"--after={page['next']}")
    [bot], [chat] = page["policies"], rest["policies"]
    assert (bot["policy"], chat["policy"]) == ("acme/bot", "chat")
    assert (chat["revisions"], chat["schema"]["rank"]) == (3, 1)
    assert chat["aliases"] == ["latest@3", "serving@2"]
    assert output_of("ls", "--limit=1", f"--after={rest['next']}") == {"policies": [], "next": None}
    for option, names in (
        ("--tenant=acme", ["acme/bot"]),
        ("--match=ha", ["chat"]),
        ("--match=%", []),  # no pattern
        ("--match=acme", []),  # a tenant is not in its policies' names
    ):
        assert [one["policy"] for one in output_of("ls", option)["policies"]] == names
    page = output_of("ls", "chat", "--limit=2")
    assert [(one["number"], one["step"]) for one in page["revisions"]] == [(1, 0), (2, 10)]
    [last] = output_of("ls", "chat", f"--after={page['next']}")["revisions"]
    assert last["number"] == 3
    assert "serving@2" in run("ls")[1]
    assert "--after is 'x'" in refused(run, "ls", "chat", "--after=x")
    assert "leave --tenant" in refused(run, "ls", "chat", "--tenant=acme")


def test_moves_states_and_retention(run, output_of):
    def moved(*argv: str) -> int:
        return output_of(*argv)["alias"]["number"]

    assert moved("promote", "chat@3", "--by=bob", "--why=try it") == 3
    assert moved("rollback", "chat", "--by=bob", "--why=worse") == 2
    assert moved("rollback", "chat", "--to=1") == 1
    assert moved("promote", "chat@2", "--alias=candidate") == 2
    assert moved("promote", "chat@candidate") == 2
    moves = output_of("audit", "chat@serving")["entries"]
    assert [(one["actor"], one["why"]) for one in moves[2:4]] == [
        ("bob", "try it"),
        ("bob", "worse"),
    ]
    assert output_of("audit", "chat@serving", "--limit=1")["next"] == str(moves[0]["id"])
    assert output_of("audit", f"--after={moves[0]['id']}", "--limit=1")["entries"] == [moves[1]]
    assert "never had an alias 'nightly'" in refused(run, "audit", "chat@nightly")
    for name in ("chat@1", "acme/bot"):
        output_of("retire", name)
    output_of("pin", "chat@2")
    assert output_of("show", "chat@1")["revision"]["state"] == "retired"
    assert output_of("show", "chat@2")["revision"]["pinned"]
    assert [one["policy"] for one in output_of("ls", "--state=retired")["policies"]] == ["acme/bot"]
    for name in ("chat@1", "acme/bot"):
        output_of("restore", name)
    output_of("unpin", "chat@2")
    assert output_of("show", "chat@1")["revision"]["state"] == "live"
    assert not output_of("show", "chat@2")["revision"]["pinned"]
    assert "named by candidate" in refused(run, "retire", "chat@2")
    assert "names no revision" in refused(run, "pin", "chat")
    assert "ends with '@'" in refused(run, "retire", "chat@")
    assert output_of("keep-last", "chat", "1") == {"policy": "chat", "keep_last": 1}
    assert "would be removed" in run("gc", "--dry-run")[1]
    assert output_of("gc", "--dry-run", "--grace=0")["revisions"] == ["chat@1"]
    assert output_of("keep-last", "chat", "all")["keep_last"] is None
    assert output_of("gc", "--grace=0")["revisions"] == []
    output_of("keep-last", "chat", "1")
    done = output_of("gc", "--grace=0")
    assert (done["revisions"], done["payload_bytes"]) == (["chat@1"], len(packed(0)))


def test_show_a_policy_and_a_revision(run, output_of, folder):
    shown = output_of("show", "chat")
    assert shown["policy"]["state"] == "active"
    assert {one["name"]: one["number"] for one in shown["aliases"]} == {"latest": 3, "serving": 2}
    assert [one["number"] for one in output_of("show", "chat", "--limit=2")["revisions"]] == [2, 3]
    one = output_of("show", "chat@serving")
    assert one["revision"]["number"] == 2
    assert [alias["name"] for alias in one["aliases"]] == ["serving"]
    digest = one["revision"]["digest"]
    assert output_of("show", digest[:12]) == output_of("show", "chat@2") == one
    assert digest in run("show", "chat@2")[1]
    with Catalog.open(folder) as catalog:
        catalog.open_session("chat", "trainer-7", 3600)
        score = {"metrics": {"reward": 0.5, "n": 3}, "isolated": 0.5, "shared": 0.5, "seed": 3}
        about = {"renderer": "plain", "scorer": "exact", "dataset": "ab" * 32}
        catalog.record_evaluation("chat@2", **about, **score)
    assert output_of("show", "chat")["policy"]["session_owner"] == "trainer-7"
    (found,) = output_of("show", "chat@2")["evaluations"]
    assert (found["number"], found["metrics"], found["seed"]) == (2, {"reward": 0.5, "n": 3}, 3)
    assert output_of("show", "chat")["evaluations"] == [found]
    assert "n=3, reward=0.5" in run("show", "chat")[1]


def test_rollouts_are_listed_newest_first_and_read_back(run, output_of, folder):
    assert output_of("rollouts", "list", "chat") == {"rollouts": []}
    assert "no rollouts: list them" in refused(run, "rollouts", "show", "chat")
    digest = output_of("show", "chat@1")["revision"]["digest"]
    with Catalog.open(folder) as catalog:
        for step in (1, 2):
            made = Rollouts(
                "chat", step, [[5, 6]], [[[7, step]]], [[[-0.5, -1.0]]], [[[digest] * 2]],
                np.array([[step / 4]]),
            )  # fmt: skip
            catalog.rollout("chat", step, pack_rollouts(made), tokens=2, mean_reward=step / 4)
    found = output_of("rollouts", "list", "chat")["rollouts"]
    assert [(one["step"], one["tokens"], one["mean_reward"]) for one in found] == [
        (2, 2, 0.5),
        (1, 2, 0.25),
    ]
    assert len(output_of("rollouts", "list", "chat", "--limit=1")["rollouts"]) == 1
    sample = {"prompt": [5, 6], "tokens": [7, 1], "logprobs": [-0.5, -1.0]}
    sample |= {"revisions": [digest] * 2, "reward": 0.25}
    shown = output_of("rollouts", "show", "chat", "--step=1")
    assert shown == {"policy": "chat", "step": 1, "samples": [sample]}
    assert output_of("rollouts", "show", "chat")["step"] == 2
    assert "no rollouts of step 9" in refused(run, "rollouts", "show", "chat", "--step=9")
    assert "'nobody' is not in the catalog" in refused(run, "rollouts", "list", "nobody")


def test_tags_and_the_removal_of_a_policy(run, output_of):
    tagged = output_of("tag", "chat", "team=a", "use=tests", "--why=order")
    assert tagged == {"name": "chat", "tags": {"team": "a", "use": "tests"}}
    assert output_of("tag", "chat@2", "best=yes")["tags"] == {"best": "yes"}
    assert output_of("tag", "chat", "--remove=use")["tags"] == {"team": "a"}
    assert "team=a" in run("ls")[1]
    assert [one["policy"] for one in output_of("ls", "--tag=team=a")["policies"]] == ["chat"]
    assert output_of("ls", "--tag=team=a", "--tag=use=tests")["policies"] == []
    assert output_of("show", "chat")["tags"] == {"team": "a"}
    assert output_of("show", "chat@serving")["tags"] == {"best": "yes"}
    assert "write KEY=VALUE" in refused(run, "tag", "chat")
    message = refused(run, "tag", "chat", "team=b", "--remove=team")
    assert "'team' is to be set and removed" in message
    with pytest.raises(SystemExit):
        run("tag", "chat", "team")
    assert "retire it first" in refused(run, "delete", "chat")
    assert run("retire", "chat")[0] == 0
    assert output_of("delete", "chat", "--why=done") == {"policy": "chat", "is": "deleted"}
    assert [one["policy"] for one in output_of("ls")["policies"]] == ["acme/bot"]
    deleted = output_of("ls", "--state=deleted")["policies"]
    assert [one["name"].split("@")[0] for one in deleted] == ["chat"]


def test_the_command_line_opens_shows_and_ends_canaries(run, output_of, folder):
    opened = output_of("promote", "chat@3", "--canary=0.05", f"--guard={GUARD}")
    assert (opened["state"], opened["share"], opened["e_needed"]) == ("open", 0.05, 20)
    with Catalog.open(folder) as catalog:
        catalog.observe(opened["id"], "a", list(rewards(10, 0.0, 1.0)))
    shown = output_of("canary", "chat@serving")["canaries"]
    assert [(one["candidate_answers"], one["parent_reward"]) for one in shown] == [(2, 1.0)]
    assert "serving" in run("canary", "chat")[1]
    assert output_of("canary", "chat", "--end")["state"] == "ended"
    message = "--canary and --guard need each other: give both, or neither"
    assert message in refused(run, "promote", "chat@3", "--canary=0.05")


def test_verify_names_what_is_damaged(run, folder):
    code, out, _ = run("verify", "--json")
    assert code == 0
    assert json.loads(out) == {"payloads": 4, "bytes": 4 * len(packed(0)), "findings": []}
    with Catalog.open(folder) as catalog:
        found = catalog.resolve("chat@2")
    (pack_file,) = [
        path for path in (folder / "payloads").rglob("*.pack") if found.place.pack in path.name
    ]
    data = bytearray(pack_file.read_bytes())
    data[found.place.offset + found.place.length - 1] ^= 1
    pack_file.chmod(0o600)
    pack_file.write_bytes(data)
    code, out, _ = run("verify", "--json")
    assert code == 1
    (finding,) = json.loads(out)["findings"]
    assert (finding["kind"], finding["digest"]) == ("payload", found.digest)
    assert finding["revisions"] == ["chat@2"]
    code, out, err = run("verify")
    assert code == 1
    assert "chat@2" in out
    assert "4 of 4" in err
    assert run("verify", "chat@2")[0] == 1
    assert run("verify", "chat@1")[0] == 0
    assert "damaged" in refused(run, "export", "chat@2", f"--packed={folder / 'x'}")


def test_export_packed_is_the_bytes_and_replaces_nothing(output_of, run, tmp_path):
    target = tmp_path / "out" / "one.safetensors"
    assert output_of("export", "chat@2", f"--packed={target}")["number"] == 2
    assert target.read_bytes() == packed(1)
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name]
    assert "exists" in refused(run, "export", "chat@1", f"--packed={target}")
    assert target.read_bytes() == packed(1)
    assert "--base" in refused(run, "export", "chat", tmp_path / "peft")
    assert "either" in refused(run, "export", "chat")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "chat@9"], "no revision"),
        (["promote", "chat"], "no revision is given"),
        (["promote", "chat@99"], "no revision 99"),
        (["rollback", "chat", "--alias=latestt"], "latestt"),
        (["show", "feedfeedfeed"], "no digest begins so"),
        (["ls", "x" * 100_000], "100000 characters"),
        (["show", "../../etc"], "tenant '..' begins with '.'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, argv, message):
    assert message in refused(run, *argv)


def test_a_catalog_that_is_not_there_is_not_made(tmp_path, capsys):
    for place in (tmp_path / "nowhere", f"sqlite:///{tmp_path}/nowhere.db"):
        assert main([f"--catalog={place}", f"--payloads={tmp_path}/payloads", "ls"]) == 2
        assert "there is no catalog" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["--catalog=nonsense://x", f"--payloads={tmp_path}/p", "ls"]) == 2
    with pytest.raises(SystemExit):
        main(["ls"])
    assert "--catalog is missing" in capsys.readouterr().err


def test_text_of_strangers_is_neither_control_characters_nor_markup(run, output_of, folder):
    why = "\x1b[2Jgone\u202e"
    output_of("promote", "chat@1", f"--why={why}")
    out = run("audit", "chat@serving")[1]
    assert not re.search("[\x1b\u202e]", out)
    assert "\\x1b[2Jgone\\u202e" in out
    assert output_of("audit", "chat@serving")["entries"][-1]["why"] == why
    assert "\x1b" not in refused(run, "show", "a\x1b[31m")
    with Catalog.open(folder) as catalog:
        catalog.create_policy("[bold]x[/bold]", SCHEMA)
    assert "[bold]x[/bold]" in run("ls")[1]


def test_as_a_program_it_needs_no_jax_to_look(folder):
    with Catalog.open(folder) as catalog:
        catalog.create_policy("höflich", SCHEMA)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}

    def run(*command: str) -> subprocess.CompletedProcess:
        python = [sys.executable, "-X", "importtime", "-m", "mint_jax.catalog", *command]
        return subprocess.run(
            [*python, f"--catalog={folder}"], env=env, capture_output=True, text=True, timeout=300
        )

    done = run("ls")
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout
    assert "h\\xf6flich" in done.stdout  # where the terminal has no such letter
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
    assert "mint_jax.catalog.lifecycle" in imported
    assert not imported & {"jax", "flax", "tensorstore", "torch", "orbax"}
    done = run("show", "nobody")
    assert done.returncode == 2
    said = "error: policy 'nobody' is not in the catalog: list the policies, or create it"
    assert said in done.stderr.splitlines()
