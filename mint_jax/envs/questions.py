"""Questions with answers from a data file, in the form of GSM8K."""

import re

from mint_jax.data.sources import numbered_rows
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def questions(
    path: str,
    held_out: int | str = 64,
    instruction: str = "",
    question: str = "question",
    answer: str = "answer",
) -> ListEnvironment:
    """Builds an environment from a file of questions.

    Args:
        path: a file that ``data.sources`` reads.
        held_out: number of held-out rows, taken from the start, or the path of a second file.
        instruction: appended to each question.
        question, answer: names of the columns; ``question`` may be a list of chat messages.

    Raises:
        UserError: a file or a column is missing.
    """

    def examples(path: str) -> list[Example]:
        return [example(row, where) for where, row in numbered_rows(path)]

    def example(row: dict, where: str) -> Example:
        for column in (question, answer):
            if row.get(column) is None:
                raise UserError(
                    f"{where} has no column {column!r}; it has {', '.join(row)}: set env.question"
                    " and env.answer"
                )
        messages = row[question]
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": f"{messages}\n{instruction}".strip()}]
        final = str(row[answer]).rsplit("####", 1)[-1].strip()  # GSM8K's mark
        return Example(tuple(messages), re.sub(r"(?<=\d),(?=\d)", "", final))

    rows = examples(path)
    if isinstance(held_out, str):
        return ListEnvironment(rows, examples(held_out), _score)
    return ListEnvironment(rows[held_out:], rows[:held_out], _score)


def _score(completion: str, example: Example) -> float:
    """Returns 1 if the last number is the answer, or the text is an answer without a number."""
    if not _NUMBER.fullmatch(example.answer):
        return float(completion.strip() == example.answer)
    return float(_last_number(completion) == _last_number(example.answer))


def _last_number(text: str) -> str | None:
    """Returns the last number of a text, without commas or trailing zeros."""
    if not (found := _NUMBER.findall(text)):
        return None
    return re.sub(r"(\.\d*?)0+$", r"\1", found[-1].replace(",", "")).removesuffix(".")
