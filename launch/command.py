"""Command lines of the launchers: options, then ``--`` and those of ``mint_jax.launch``. Needs the
standard library alone.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn


class Failed(Exception):
    """Error that ends the program, with a message and a status: 2 for a mistake in the options."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """Parser whose help is a module's docstring, and whose errors are ``Failed``."""

    def __init__(self, description: str | None):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise Failed(message)

    def parse(
        self, argv: list[str], needed: Mapping[str, str], job: str
    ) -> tuple[argparse.Namespace, dict[str, str], list[str]]:
        """Returns the options, config and workdir of the job, and all of its options.

        Args:
            needed: options that must be given -> example.
            job: example of the job's own options.

        Raises:
            Failed: an option is unknown or missing.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        args, after = self.parse_args(argv[:end]), argv[end + 1 :]
        for name, example in needed.items():
            if getattr(args, name) is None:
                raise Failed(f"--{name} is missing: give --{name}={example}")
        given = dict(one[2:].split("=", 1) for one in after if one.startswith("--") and "=" in one)
        for name in ("config", "workdir"):
            if name not in given:
                raise Failed(f"no {name} behind --: give -- {job}")
        return args, given, after


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a launcher; Ctrl-C and SIGTERM end it in good order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
