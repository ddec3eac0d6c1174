"""The engine that a request names, and the lists that all engines answer together."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# In every id that an engine makes, see ``ServerDatabase.new_id`` and ``Pin``. What comes before it
# does not matter: in protobuf it is the text's length, any byte.
_ID = re.compile(rb"(e[0-9]{1,4})\.[0-9a-f]{24}")
# fields that name an engine, the strongest first: a checkpoint is copied where it is, and anything
# else of a session or a model is where that is
_FIELDS = ("source_path", "model_id", "session_id", "sampling_session_id", "request_id")
_FIELDS += ("request_ids", "target", "previous_response_id", "model_path", "path", "tinker_path")
_FIELDS += ("id",)  # of the answer that gets a reward
SMALL = 1 << 16  # bytes of a body that is parsed; ids come first in larger ones


def named(path: str, body: bytes, is_json: bool) -> str | None:
    """Returns the engine that made the ids in a request's path or body; None if there are none."""
    if (found := _ID.search(path.encode())) is not None:
        return found[1].decode()
    if is_json and len(body) <= SMALL:
        try:
            fields = json.loads(body or b"{}")
        except ValueError:
            return None
        if not isinstance(fields, dict):
            return None
        given = (fields.get(name) for name in _FIELDS)
        body = b"\n".join(json.dumps(one).encode() for one in given if one)
    found = _ID.search(body)
    return None if found is None else found[1].decode()


Answers = Sequence[Mapping[str, Any]]  # of all engines, to one request for a list


def _merged(
    field: str, order: str = "", names: Sequence[str] = ()
) -> Callable[[Answers, int, int], dict[str, Any]]:
    """Returns the merge of pages, the largest row by ``order`` first; with ``names`` of rows that
    count, of which those with equal ``names`` are added.
    """

    def merge(answers: Answers, limit: int, offset: int) -> dict[str, Any]:
        rows = [row for answer in answers for row in answer[field]]
        if names:
            sums: dict[tuple, dict[str, Any]] = {}
            for row in rows:
                one = sums.setdefault(tuple(row.get(name) for name in names), {})
                for name, value in row.items():
                    one[name] = value if name in names else one.get(name, 0) + value
            rows = list(sums.values())
        if order:
            rows.sort(key=lambda row: row[order], reverse=True)
        merged: dict[str, Any] = {field: rows[offset : offset + limit]}
        if "cursor" in answers[0]:
            total = sum(answer["cursor"]["total_count"] for answer in answers)
            merged["cursor"] = {"offset": offset, "limit": limit, "total_count": total}
        if "has_more" in answers[0]:
            more = any(answer.get("has_more") for answer in answers)
            merged["has_more"] = more or len(rows) > offset + limit
        return merged

    return merge


def _usage(answers: Answers, limit: int, offset: int) -> dict[str, Any]:
    rows = [row for answer in answers for row in answer["data"]]
    sessions = {id: notes for answer in answers for id, notes in answer["sessions"].items()}
    return {"data": sorted(rows, key=lambda row: row["bucket_start"]), "sessions": sessions}


# lists of which every engine has a part, by path; an engine is asked for its first rows
LISTS: dict[str, Callable[[Answers, int, int], dict[str, Any]]] = {
    "/api/v1/training_runs": _merged("training_runs", "last_request_time"),
    "/api/v1/checkpoints": _merged("checkpoints", "time"),
    "/api/v1/sessions": _merged("sessions"),
    "/api/v1/billing/usage/events": _usage,
    "/api/v1/billing/usage/checkpoints/current": _merged("data", "size_bytes", ["project_id"]),
    "/admin/costs": _merged("costs", "seconds", ["policy", "tenant"]),
}
PAGED = {path for path in LISTS if "billing" not in path}
