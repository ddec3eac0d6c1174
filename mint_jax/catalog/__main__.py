"""``python -m mint_jax.catalog``: see ``cli``."""

import sys

from mint_jax.catalog.cli.main import main

sys.exit(main())
