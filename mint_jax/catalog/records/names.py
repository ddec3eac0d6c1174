"""Names of policies, tenants, aliases and revisions: keys of the database, never parts of a path.

A revision is named ``policy@alias``, ``policy@12`` (its number), ``policy`` (its ``latest``), each
also as ``tenant/policy…``, or by its digest or a prefix of it. So a policy's name is not 8 or more
hex digits, and an alias is not a number.
"""

import dataclasses
import re
import unicodedata

from mint_jax.errors import UserError

DEFAULT_TENANT = "default"
LATEST = "latest"
LONGEST = 200
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class RevisionName:
    """A parsed name: a ``digest`` prefix, of any tenant if ``tenant`` is None; or policy and
    ``number`` or ``alias``.
    """

    tenant: str | None
    policy: str | None
    alias: str | None = None
    number: int | None = None
    digest: str | None = None


def clean(what: str, text: str) -> str:
    """Returns ``text`` in unicode's composed form (NFC), so that one visible name is one key.
    Raises ``UserError``: empty, longer than 200 characters, or with characters not allowed in a
    name.
    """
    if not isinstance(text, str):
        raise UserError(f"{what} is {type(text).__name__}; a name is text")
    # composing shortens a text, at most to a quarter
    if len(text) <= 4 * LONGEST:
        text = unicodedata.normalize("NFC", text)
    if not 0 < len(text) <= LONGEST:
        reason = f"has {len(text)} characters; names have 1 to {LONGEST}"
    elif bad := [char for char in text if char in "/@" or not is_visible(char)]:
        reason = f"contains {bad[0]!r}: names have no '/', '@', control or invisible characters"
    elif text[0] == "." or text != text.strip():
        reason = "begins with '.' or has blanks at an end: choose another name"
    else:
        return text
    raise UserError(f"{what} {_short(text)} {reason}")


def is_visible(char: str) -> bool:
    """True for a character that is neither a control character nor a line separator."""
    category = unicodedata.category(char)
    return category[0] != "C" and category not in ("Zl", "Zp")


def clean_policy(text: str) -> str:
    """``clean`` for a policy's own name, without tenant."""
    text = clean("policy name", text)
    if _DIGEST.fullmatch(text):
        raise UserError(
            f"policy name {text!r} would read as a revision's digest (8 or more hex digits): add"
            " another character"
        )
    return text


def clean_alias(text: str) -> str:
    """``clean`` for an alias."""
    text = clean("alias", text)
    if text.isdecimal():
        raise UserError(f"alias {text!r} would read as a revision's number: add a letter")
    return text


def parse_policy(text: str, tenant: str | None = None) -> tuple[str, str]:
    """Splits ``policy`` or ``tenant/policy`` into tenant and name; refuses other tenants' names if
    ``tenant`` is given.
    """
    if not isinstance(text, str):
        raise UserError(f"policy name is {type(text).__name__}; a name is text")
    head, slash, tail = text.partition("/")
    if slash:
        head = clean("tenant", head)
        if tenant is not None and head != tenant:
            raise UserError(f"policy {_short(text)} belongs to another tenant than {tenant!r}")
        return head, clean_policy(tail)
    return clean("tenant", DEFAULT_TENANT if tenant is None else tenant), clean_policy(text)


def parse_revision(text: str, tenant: str | None = None) -> RevisionName:
    """Parses any of the forms above. Raises ``UserError``: malformed, or a name of another tenant
    than ``tenant``.
    """
    if not isinstance(text, str):
        raise UserError(f"revision name is {type(text).__name__}; a name is text")
    if _DIGEST.fullmatch(text):
        return RevisionName(tenant, None, digest=text)
    policy, at, which = text.partition("@")
    owner, name = parse_policy(policy, tenant)
    if not at:
        return RevisionName(owner, name, alias=LATEST)
    if _NUMBER.fullmatch(which):
        return RevisionName(owner, name, number=int(which))
    return RevisionName(owner, name, alias=clean_alias(which))


def digest_range(prefix: str) -> tuple[bytes, bytes]:
    """Returns the lowest and the highest digest with this prefix of hex digits."""
    return bytes.fromhex(prefix.ljust(64, "0")), bytes.fromhex(prefix.ljust(64, "f"))


def note(what: str, text: str, longest: int = 4000) -> str:
    """Returns free text such as a reason or an owner, if the database can store it."""
    if not isinstance(text, str) or len(text) > longest or re.search("[\0\ud800-\udfff]", text):
        raise UserError(
            f"{what} {_short(str(text))} must be text of at most {longest} characters without NUL"
        )
    return text


def whole(what: str, value: int, least: int = 0, most: int = 2**62) -> int:
    """Returns an integer in a range."""
    integral = hasattr(value, "__index__") and not isinstance(value, bool)
    if not integral or not least <= int(value) <= most:
        raise UserError(f"{what} is {str(value)[:60]}; expected an integer from {least} to {most}")
    return int(value)


def duration(what: str, seconds: float) -> float:
    """Returns a positive number of seconds, below 1e9."""
    if not 0 < seconds < 1e9:
        raise UserError(f"{what} is {seconds} seconds; expected a positive number below 1e9")
    return float(seconds)


def full_name(tenant: str, name: str) -> str:
    """Returns ``name`` for the default tenant, ``tenant/name`` for others."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def is_digest(text: str) -> bool:
    """True for a digest or a prefix of one."""
    return _DIGEST.fullmatch(text) is not None


def is_number(text: str) -> bool:
    """True for a revision's number."""
    return _NUMBER.fullmatch(text) is not None
