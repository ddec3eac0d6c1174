"""How an Orbax checkpoint of a revision is recognised among other folders; without Orbax, which takes seconds to import."""

ADAPTER, REVISION = "adapter", "revision"
_MARK = "_CHECKPOINT_METADATA"  # Orbax's own file in every checkpoint


def is_revision(names: set[str]) -> bool:
    """Whether a folder with these entries is a checkpoint as ``orbax_files.write`` makes it."""
    return {_MARK, ADAPTER, REVISION} <= names
