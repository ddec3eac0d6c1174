"""Tables of a server's database; strict, so that SQLite's integrity check finds wrong types."""

SCHEMA = """
CREATE TABLE probe (data BLOB) STRICT;

-- ``requests.place`` and ``ended`` are the places of the body and of the result in ``payloads``.
-- ``kept`` is 0 for a result to deliver, 1 once delivered, 2 once released after that, 3 once
-- settled; settled rows have no payloads and stay while a lower number is not settled.
CREATE TABLE payloads (
    place INTEGER PRIMARY KEY AUTOINCREMENT, seal TEXT NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE requests (
    place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, model TEXT NOT NULL,
    seq_id INTEGER NOT NULL, call TEXT NOT NULL, ended INTEGER, category TEXT,
    kept INTEGER NOT NULL DEFAULT 0, UNIQUE (model, seq_id)) STRICT;
CREATE TABLE progress (
    model TEXT PRIMARY KEY, first_unsettled INTEGER NOT NULL, place INTEGER NOT NULL) STRICT;

CREATE TABLE sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, details TEXT NOT NULL, created REAL NOT NULL,
    ended REAL) STRICT;
CREATE INDEX sessions_of_tenant ON sessions (tenant);
CREATE TABLE models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, details TEXT NOT NULL,
    created REAL NOT NULL, ended REAL) STRICT;
CREATE INDEX models_of_session ON models (session);
CREATE INDEX models_of_tenant ON models (tenant);
CREATE TABLE points (
    model TEXT NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, loss REAL, grad_norm REAL,
    PRIMARY KEY (model, number)) STRICT;
CREATE TABLE samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, path TEXT, digest TEXT,
    created REAL NOT NULL) STRICT;
CREATE INDEX samplers_of_session ON samplers (session);
CREATE INDEX samplers_of_digest ON samplers (digest);
CREATE TABLE checkpoints (
    model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, tenant TEXT NOT NULL,
    digest TEXT NOT NULL, nbytes INTEGER NOT NULL, request TEXT NOT NULL, details TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, public INTEGER NOT NULL,
    PRIMARY KEY (model, kind, name)) STRICT;
CREATE INDEX checkpoints_of_tenant ON checkpoints (tenant);
CREATE INDEX checkpoints_of_digest ON checkpoints (digest);
-- payloads that a removed row named; they are deleted once no row names them
CREATE TABLE reclaim (
    digest TEXT NOT NULL, policy TEXT NOT NULL, kind TEXT NOT NULL,
    PRIMARY KEY (digest, policy)) STRICT;
CREATE TRIGGER removed_checkpoint AFTER DELETE ON checkpoints BEGIN
    INSERT OR IGNORE INTO reclaim VALUES (old.digest,
        coalesce(json_extract(old.details, '$.policy'), old.tenant || '/' || old.model), old.kind);
END;
CREATE TRIGGER removed_sampler AFTER DELETE ON samplers WHEN old.digest IS NOT NULL BEGIN
    INSERT OR IGNORE INTO reclaim VALUES (old.digest, '', 'sampler_weights');
END;
-- answers that a canary drew, with the probability of the arm that was drawn; rewards are judged in
-- the order of their places
CREATE TABLE identity (id TEXT NOT NULL) STRICT;
INSERT INTO identity VALUES (lower(hex(randomblob(16))));
CREATE TABLE draws (
    tenant TEXT NOT NULL, id TEXT NOT NULL, canary INTEGER NOT NULL, candidate INTEGER NOT NULL,
    propensity REAL NOT NULL, created REAL NOT NULL, PRIMARY KEY (tenant, id)) STRICT;
CREATE INDEX draws_of_canary ON draws (canary);
CREATE INDEX draws_created ON draws (created);
CREATE TABLE rewards (
    place INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    reward REAL NOT NULL, UNIQUE (tenant, id)) STRICT;
CREATE TRIGGER removed_draw AFTER DELETE ON draws BEGIN
    DELETE FROM rewards WHERE tenant = old.tenant AND id = old.id;
END;
-- answers of the model ``auto``, and what the rewards of all have taught
CREATE TABLE choices (
    tenant TEXT NOT NULL, id TEXT NOT NULL, policy TEXT NOT NULL, propensity REAL NOT NULL,
    features TEXT NOT NULL, created REAL NOT NULL, reward REAL, PRIMARY KEY (tenant, id)) STRICT;
CREATE INDEX choices_created ON choices (created);
CREATE TABLE arms (
    tenant TEXT NOT NULL, policy TEXT NOT NULL, moments TEXT NOT NULL,
    PRIMARY KEY (tenant, policy)) STRICT;
CREATE TABLE starts (number INTEGER PRIMARY KEY) STRICT;
CREATE TABLE costs (
    tenant TEXT NOT NULL, policy TEXT NOT NULL, prefill_s REAL NOT NULL, decode_s REAL NOT NULL,
    train_s REAL NOT NULL, update_s REAL NOT NULL, load_s REAL NOT NULL,
    prefill_tokens INTEGER NOT NULL, decode_tokens INTEGER NOT NULL,
    train_tokens INTEGER NOT NULL, PRIMARY KEY (tenant, policy)) STRICT;
CREATE INDEX costs_of_policy ON costs (policy);
-- tokens by hour since 1970, as Tinker's clients ask for them
CREATE TABLE usage (
    tenant TEXT NOT NULL, hour INTEGER NOT NULL, policy TEXT NOT NULL,
    prefill_tokens INTEGER NOT NULL, decode_tokens INTEGER NOT NULL,
    train_tokens INTEGER NOT NULL, PRIMARY KEY (hour, tenant, policy)) STRICT, WITHOUT ROWID;
"""
