"""Rewards of a judge over HTTP: its requests are those of OpenAI's client, and what it does not
answer costs a row or is refused before a job starts.
"""

import contextlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from openai.types.chat import ChatCompletion

from mint_jax.envs import env as env_lib
from mint_jax.envs import judge, scoring
from mint_jax.envs.env import Unscored
from mint_jax.errors import UserError
from tests.configs import ROOT, load

ROWS = [{"question": f"{i} + 1?", "answer": f"{i},{i} #### {i + 1}"} for i in range(8)]


def says(text, finish_reason="stop") -> tuple[int, str]:
    """A chat completion as OpenAI's package writes it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    about = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return 200, ChatCompletion.model_validate({**about, "choices": [choice]}).model_dump_json()


@pytest.fixture
def api(monkeypatch):
    """``api.answers`` are given in turn, the last one again and again. ``api.heads`` and
    ``api.bodies`` are those of the requests.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "secret-7")
    monkeypatch.setattr(judge, "BACKOFF_S", 0.001)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with server.lock:
                found = {name.lower(): value for name, value in self.headers.items()}
                server.heads.append(found | {"path": self.path})
                server.bodies.append(json.loads(body))
                answers = server.answers
                status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            server.barrier.wait()
            self.send_response(status)
            for name, value in server.extra.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.heads, server.bodies = [says("Score: 7")], [], []
        server.barrier, server.extra, server.lock = threading.Barrier(1), {}, threading.Lock()
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def options(api, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return {"path": str(tmp_path / "rows.jsonl"), "url": api.url, "model": "m", "held_out": 2}


def test_a_request_is_that_of_the_official_client(api):
    fields = {"temperature": 0.5, "max_completion_tokens": 9, "seed": 3}
    found = judge.Judge(api.url, "big", "Q {question}\nA {answer}\nR {reference} {x}", body=fields)
    assert found.score("2 {answer}", "{reference} ü", "4") == 7.0
    text = "Q 2 {answer}\nA {reference} ü\nR 4 {x}"
    messages = [{"role": "user", "content": text}]
    client = openai.OpenAI(base_url=api.url, api_key="secret-7")
    client.chat.completions.create(model="big", messages=messages, **fields)
    ours, theirs = api.heads
    assert api.bodies[0] == api.bodies[1]
    for name in ("path", "content-type", "authorization"):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("answer", "pattern", "score"),
    [
        (says("Score: 3? No.\n**Score:** 8.5/10"), None, 8.5),
        (says('{"why": "…", "score": 4}'), None, 4.0),
        (says("grade = 2"), r"grade = (\S+)", 2.0),
        (says("grade = NaN"), r"grade = (\S+)", "'grade = NaN' has no score from 0 to 10 where"),
        (says("Score: 11"), None, "'Score: 11' has no score"),
        (says("It is good."), None, "'It is good.' has no score .* pattern .*score"),
        (says(None), None, "'None' has no score"),
        (says("Score: 1", "length"), None, "its answer was cut off: raise"),
        ((200, "<html>"), None, "no chat completion .JSONDecodeError"),
        ((200, '{"choices": []}'), None, "no chat completion .ValueError"),
        ((404, "no model"), None, "'m' at http.*/v1/chat/completions gave .*HTTP 404: b'no model'"),
    ],
)
def test_scores_and_answers_without_one(api, answer, pattern, score):
    api.answers = [answer]
    one = judge.Judge(api.url, "m", **({} if pattern is None else {"pattern": pattern}))
    is_number = isinstance(score, float)
    with contextlib.nullcontext() if is_number else pytest.raises(Unscored, match=score):
        assert one.score("q", "a") == score
    assert len(api.bodies) == 1, "asked again"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_judge_is_asked_again_and_then_given_up(api, status):
    api.answers = [(status, "busy")] * 3 + [says("Score: 6")]
    assert judge.Judge(api.url, "m").score("q", "a") == 6.0
    api.answers, api.extra = [(status, "busy")], {"Retry-After": "0"}
    with pytest.raises(Unscored, match=f"HTTP {status}: b'busy'"):
        judge.Judge(api.url, "m").score("q", "a")
    assert len(api.bodies) == 4 + judge.ATTEMPTS


def test_the_key_follows_no_redirect(api):
    api.answers, api.extra = [(307, "")], {"Location": f"{api.url}/other"}
    with pytest.raises(Unscored, match="HTTP 307") as caught:
        judge.Judge(api.url, "m").score("q", "a")
    assert len(api.heads) == 1
    assert "secret" not in f"{caught.value} {judge.Judge(api.url, 'm')}"


def test_an_environment_from_settings_judges_several_answers_at_once(api, options, capfd):
    env = env_lib.make("judge", **options, concurrency=4, instruction="Think.")
    assert [len(env.train), len(env.held_out)] == [6, 2]
    api.barrier, api.answers = threading.Barrier(4, timeout=30), [says("none"), says("Score: 1")]
    rows = [(f" {i} ", example) for i, example in enumerate(env.train[:4])]
    [found] = scoring.each(lambda row: scoring.score("ada", env, *row), [rows], env)
    assert sorted(map(str, found)) == ["1.0"] * 3 + ["nan"]
    said = capfd.readouterr().err
    assert "a reward was given up, the judge's answer 'none' has no score" in said
    sent = {body["messages"][0]["content"] for body in api.bodies}
    given = {"question": "3 + 1?\nThink.", "answer": "1", "reference": "3,3 #### 4"}
    assert judge.TEMPLATE.format(**given) in sent


def test_a_judge_is_asked_before_a_job_starts(api, tmp_path, monkeypatch):
    """The config of the page, with another address."""
    page = (ROOT / "docs" / "own_task.md").read_text()
    for name in ("judged_config.py", "questions.jsonl"):
        [text] = re.findall(rf'^```.* title="{name}"\n(.*?)^```', page, re.M | re.S)
        (tmp_path / name).write_text(text.replace("http://127.0.0.1:8000/v1", api.url))
    monkeypatch.chdir(tmp_path)
    settings = load(str(tmp_path / "judged_config.py")).policies["essay"].env
    settings.preflight("env")
    assert [body["max_tokens"] for body in api.bodies] == [300]
    assert settings.make().train[0].answer == "Chlorophyll reflects green light."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings.extra["url"] = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=r"'judge' cannot score .*gave no answer, .*refused"):
        settings.preflight("env")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url is '127.0.0.1:8000'; expected http"),
        ({"template": "{question}"}, "template is '{question}'; expected text with {answer}"),
        ({"pattern": "Score: [0-9"}, r"pattern is 'Score: \[0-9'; expected a .* with one group"),
        ({"pattern": "Score: 7"}, "expected a regular expression with one group"),
        ({"key_variable": "NO_SUCH"}, "key_variable is 'NO_SUCH'; expected .*; set it, or ''"),
        ({"modell": 1}, "setting of a judge is 'modell'; choose one of: url, model"),
        ({"concurrency": 0}, "concurrency of .* is 0 .*; expected the number of calls"),
        ({"answer": "gold"}, "has no column 'gold'"),
    ],
)
def test_wrong_settings_are_refused(options, changes, message):
    with pytest.raises(UserError, match=message):
        env_lib.make("judge", **options | changes)
    env = env_lib.make("judge", **options, key_variable="", answer="")
    assert env.train[0].answer == ""
