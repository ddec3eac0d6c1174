"""Export of a revision: a PEFT directory, an Orbax checkpoint, or a packed file."""

import argparse
from pathlib import Path

import numpy as np

from mint_jax.catalog.cli.output import Result, facts, size
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.errors import UserError
from mint_jax.files import write_file


def run(args: argparse.Namespace, catalog: Catalog) -> Result:
    """Writes a revision to files."""
    if (args.directory is None) == (args.packed is None):
        raise UserError("give either a new directory, or --packed FILE")
    found = catalog.resolve(args.name)
    data = catalog.load(found.digest)
    answer = {"policy": found.policy, "number": found.number, "digest": found.digest}
    if args.packed is not None:
        _write_new(Path(args.packed), data.data)
        text = f"wrote {args.packed}, {size(data.size)}, {found.digest}"
        return Result(answer | {"packed": args.packed}, [text])
    shown = [
        ("directory", args.directory),
        ("revision", f"{found.policy}@{found.number}"),
        ("digest", found.digest),
    ]
    if args.format == "orbax":
        from mint_jax.catalog import orbax_files  # imports Orbax, which takes seconds

        orbax_files.write(args.directory, data, answer)
        parts = [facts("wrote an Orbax checkpoint", shown)]
        return Result(answer | {"directory": args.directory}, parts)
    base_name, note = _write_peft(args, found, data)
    shown += [("base named in it", base_name), ("note", note)]
    answer |= {"directory": args.directory, "base_name": base_name}
    return Result(answer, [facts("wrote", shown)])


def _write_peft(
    args: argparse.Namespace, found: Resolved, data: np.ndarray
) -> tuple[str, str | None]:
    """Writes a PEFT directory; returns the base's name in it, and a note for the user."""
    if args.base is None:
        raise UserError(
            "a PEFT directory needs the base's names: give --base, or choose --format=orbax or"
            " --packed FILE"
        )
    from mint_jax.lora import peft, tree
    from mint_jax.models import hf
    from mint_jax.models.base import PACKAGED, public_name
    from mint_jax.models.outline import outline

    base = outline(args.base, args.fingerprint)
    adapter, schema = unpack(data)
    if schema.base != base.fingerprint:
        raise UserError(
            f"{found.policy}@{found.number} was trained on base {schema.base[:12]}, {args.base!r}"
            f" is {base.fingerprint[:12]}: give its own base"
        )
    tree.check_fits(adapter, schema.config, base.specs, args.name, finite=False)
    name, is_moe = args.base_name or public_name(args.base), hf.is_moe_type(base.cfg)
    try:
        peft.write_peft(args.directory, adapter, schema.config, base.tables[0], name, is_moe)
    except OSError as error:
        raise _unwritable(args.directory, error) from None
    if args.base_name or args.base.lower() not in PACKAGED:
        return name, None
    return name, (
        "the hub has the full weights of this base; here it is a 4-bit GGUF file, so outputs there"
        " differ a little"
    )


def _write_new(target: Path, data: memoryview) -> None:
    if target.exists():
        raise UserError(f"output {target} exists: choose a new file, or remove it")
    try:
        write_file(target, bytes(data), replace=False)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: str | Path, error: OSError) -> UserError:
    return UserError(
        f"output {target} cannot be written ({error.strerror or error}): choose another place"
    )
