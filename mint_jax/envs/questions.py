"""Questions with answers from a JSONL or parquet file, in the form of GSM8K: ``question`` and
``answer``.
"""

import re

from mint_jax.data.sources import numbered_rows
from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_answer(text: str) -> str:
    """Returns the text after ``####`` (GSM8K's mark), or the whole text, without commas inside
    numbers.
    """
    return re.sub(r"(?<=\d),(?=\d)", "", text.rsplit("####", 1)[-1].strip())


def last_number(text: str) -> str | None:
    """Returns the last number of a text, without commas or trailing zeros."""
    found = _NUMBER.findall(text)
    return (
        re.sub(r"(\.\d*?)0+$", r"\1", found[-1].replace(",", "")).removesuffix(".")
        if found
        else None
    )


def _score(completion: str, example: Example) -> float:
    """Returns 1 if the last number is the answer, or the text is an answer without a number."""
    if not _NUMBER.fullmatch(example.answer):
        return float(completion.strip() == example.answer)
    return float(last_number(completion) == last_number(example.answer))


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

    def example(row: dict, where: str) -> Example:
        for column in (question, answer):
            if row.get(column) is None:
                raise UserError(
                    f"{where} has no column {column!r}; it has {', '.join(row)}: set env.question"
                    " and env.answer"
                )
        asked = row[question]
        messages = (
            tuple(asked)
            if isinstance(asked, list)
            else ({"role": "user", "content": f"{asked}\n{instruction}".strip()},)
        )
        return Example(messages, final_answer(str(row[answer])))

    rows = [example(row, where) for where, row in numbered_rows(path)]
    if isinstance(held_out, str):
        return ListEnvironment(
            rows, [example(row, where) for where, row in numbered_rows(held_out)], _score
        )
    return ListEnvironment(rows[held_out:], rows[:held_out], _score)
