"""Run by Alembic: applies the migrations on the connection, and in the transaction, that
``database.py`` hands over.
"""

from alembic import context

from mint_jax.catalog.records import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.metadata,
    version_table=tables.VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
