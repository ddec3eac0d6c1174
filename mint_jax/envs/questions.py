"""Questions with answers from a data file, in the form of GSM8K."""

import re
from collections.abc import Callable

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

    def final(text: str) -> str:
        text = text.rsplit("####", 1)[-1].strip()  # GSM8K's mark
        return re.sub(r"(?<=\d),(?=\d)", "", text)

    return ListEnvironment(*split(path, held_out, instruction, question, answer, final), _score)


def split(
    path: str,
    held_out: int | str,
    instruction: str,
    question: str,
    answer: str,
    final: Callable[[str], str],
) -> tuple[list[Example], list[Example]]:
    """Returns the train and the held-out examples of a file, as ``questions`` does.

    Args:
        answer: column of the answer; empty: the answer is empty.
        final: function of a row's answer.
    """

    def examples(path: str) -> list[Example]:
        return [example(row, where) for where, row in numbered_rows(path)]

    def example(row: dict, where: str) -> Example:
        for column in filter(None, (question, answer)):
            if row.get(column) is None:
                raise UserError(
                    f"{where} has no column {column!r}; it has {', '.join(row)}: set env.question"
                    " and env.answer"
                )
        messages = row[question]
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": f"{messages}\n{instruction}".strip()}]
        return Example(tuple(messages), final(str(row.get(answer, ""))))

    rows = examples(path)
    if isinstance(held_out, str):
        return rows, examples(held_out)
    return rows[held_out:], rows[:held_out]


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
