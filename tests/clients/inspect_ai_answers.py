"""inspect-ai over a server by its ``openai-api`` provider: a task whose targets are our own greedy
answers, all but one, which is wrong.
"""

import json
import shutil
from pathlib import Path

from foreign import Foreign
from run import need

import mint_jax as mint

QUESTIONS = (
    "What is two and two?",
    "Name a colour.",
    "Say something.\n\nSay it twice.",
    "日本はどこですか。",
)
TOKENS = 10


def check(client: Foreign) -> str:
    """All answers are ours, with the log-probabilities that were asked for, and the harness finds
    one of them wrong.
    """
    wanted = _run(client)
    [path] = (client.folder / "out").glob("*.json")
    log = json.loads(path.read_text())
    need(log["status"] == "success", f"it ended with {log['status']}: {log.get('error')}")
    answers = [
        sample["output"]["choices"][0]
        for sample in sorted(log["samples"], key=lambda sample: int(sample["id"]))
    ]
    texts = [answer["message"]["content"] for answer in answers]
    need(texts == wanted, f"answers {texts}, and our own are {wanted}")
    places = [place for answer in answers for place in answer["logprobs"]["content"]]
    need(
        all(len(place["top_logprobs"]) == 2 and place["logprob"] <= 1e-3 for place in places),
        f"log-probabilities {places}",
    )
    right = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    need(right == 1 - 1 / len(QUESTIONS), f"the accuracy is {right}")
    return (
        f"{len(texts)} answers are ours, {len(places)} places with 2 likeliest each, accuracy"
        f" {right}"
    )


def _run(client: Foreign) -> list[str]:
    """Writes the data and calls the harness; our own answers."""
    folder, chats = (
        client.folder,
        [[{"role": "user", "content": question}] for question in QUESTIONS],
    )
    texts = [
        done[0].text or "" for done in mint.load(client.base).completions(chats, max_tokens=TOKENS)
    ]
    rows = [
        {"input": question, "target": text, "id": i}
        for i, (question, text) in enumerate(zip(QUESTIONS, texts, strict=True))
    ]
    rows[-1]["target"] = rows[-1]["target"] + " not this"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [
        "--model",
        f"openai-api/mint/{client.base}",
        "-T",
        f"data={folder / 'data.jsonl'}",
        "--temperature",
        "0",
        "--logprobs",
    ]
    told += ["--max-tokens", str(TOKENS), "--top-logprobs", "2", "--max-retries", "0"]
    told += ["--log-format", "json", "--log-dir", str(folder / "out"), "--display", "plain"]
    task = shutil.copy(Path(__file__).with_name("inspect_ai_task.py"), folder)
    client.call(
        "inspect_ai",
        "eval",
        Path(task).name,
        *told,
        MINT_API_KEY="any",
        MINT_BASE_URL=f"{client.url}/v1",
    )
    return texts
