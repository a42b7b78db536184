"""Every sentence of advice: the situation that it is for, and why following it keeps every promise.

`test_advice.py` compares the table with the sentences that `advising.py` reads from the code, so that none is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOOKS: Final = "It changes nothing: it says where to look, or what is not known."
PROTECTS: Final = "It refuses or keeps more than before."
RESTORES: Final = "It brings back what the settings and the code say already."
ROOM: Final = "It gives time or space."
OPERATOR: Final = "A person decides after finding out; the sentence says when, or the command asks and refuses."
POLICY: Final = (
    "It changes what decides about a request: `FOLLOWED` follows it, with the oracle of README's table of effects."
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence. `{}` stands for what is filled in."""

    why: str
    situation: str
    sentence: str


TABLE: Final = (
    Advice(
        PROTECTS,
        "a Celery worker acknowledges before the body runs",
        "Set acks_late=True and reject_on_worker_lost=True.",
    ),
    Advice(
        PROTECTS,
        "a killed pool process loses a message that may be taken over",
        "Set reject_on_worker_lost=True: another worker can take these tasks over.",
    ),
    Advice(
        PROTECTS,
        "each process of a pool keeps its records to itself",
        "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL. In development, start the worker with --pool "
        "solo or --pool threads.",
    ),
    Advice(
        ROOM,
        "Redis delivers a message again that still runs",
        'Set broker_transport_options = {"visibility_timeout": …} above the time limits. The copies cost messages, and '
        "not correctness.",
    ),
    Advice(
        ROOM,
        "a worker reserves messages for longer than Redis waits",
        "Set {}.",
    ),
    Advice(
        PROTECTS,
        "RabbitMQ confirms no message",
        'Set broker_transport_options = {"confirm_publish": True}.',
    ),
    Advice(
        RESTORES,
        "a decorator hides the body of a task",
        "Let that decorator use functools.wraps.",
    ),
    Advice(
        RESTORES,
        "the policy of a task cannot hold",
        "Change it at @idempotent_task(…).",
    ),
    Advice(
        RESTORES,
        "the URL leads to another store",
        "Point IDEMPOTENCY_STORE to the right Redis; or set IDEMPOTENCY_STORE_ID and IDEMPOTENCY_TENANT_SHARDS as they "
        "were when this one was initialised. There is nothing to acknowledge.",
    ),
    Advice(
        OPERATOR,
        "Redis lost data",
        "{}; then: {}. {}",
    ),
    Advice(
        OPERATOR,
        "Redis lost data, and new keys wait",
        "{}; then: {}. {}{}",
    ),
    Advice(
        OPERATOR,
        "Redis is empty, and the cause is unknown",
        "If it held keys before, it was emptied: {}. {} Only if this Redis is new: `flask idempotency redis init`.",
    ),
    Advice(
        OPERATOR,
        "Redis lost data, and new keys run again",
        "Find out what was lost, then acknowledge it: {}.",
    ),
    Advice(
        RESTORES,
        "a store of your own lacks a capability",
        "Add that to your store. Those of this package (IDEMPOTENCY_STORE) have it, and know none of the keys of yours.",
    ),
    Advice(
        RESTORES,
        "the store does not answer",
        "Check IDEMPOTENCY_STORE, and that its server runs and lets this host in: keyed requests get 503 until then.",
    ),
    Advice(
        POLICY,
        "a server kills a worker while its view may run",
        "Give workers longer than max_runtime (gunicorn's --timeout), or lower IDEMPOTENCY_MAX_RUNTIME to what a view "
        "really takes, below that timeout.",
    ),
    Advice(
        RESTORES,
        "no janitor finishes what stopped between two steps",
        "Let a janitor of this release run it: restart it, register its tasks, or have cron run `flask idempotency "
        "finish`.",
    ),
    Advice(
        RESTORES,
        "a task does not keep up",
        "Run `flask idempotency {}` once by hand. If that does not help, run it more often (IDEMPOTENCY_{}_INTERVAL){}.",
    ),
    Advice(
        LOOKS,
        "another sentence says it",
        "Do what this says, and run `flask idempotency doctor` again.",
    ),
    Advice(
        RESTORES,
        "two clocks are apart",
        "Keep all clocks in step with NTP (`timedatectl status` on both machines).",
    ),
    Advice(
        LOOKS,
        "it is unknown when a server kills a worker",
        "Pass --worker-timeout, or set IDEMPOTENCY_WORKER_TIMEOUT, to gunicorn's --timeout or uWSGI's harakiri; to 0 if "
        "nothing kills them.",
    ),
    Advice(
        POLICY,
        "one pause ends a lease",
        "Set IDEMPOTENCY_LEASE to 30, or remove it.",
    ),
    Advice(
        OPERATOR,
        "the store cannot see a restart of Redis",
        "Let its user run INFO (ACL SETUSER … +info), then acknowledge the change with `flask idempotency redis ack`. If "
        "a service forbids INFO in scripts, start new applications with a database: another store would know none of "
        "these keys.",
    ),
    Advice(
        PROTECTS,
        "any Redis would do",
        "Set IDEMPOTENCY_STORE_ID to {}.",
    ),
    Advice(
        PROTECTS,
        "new keys run before the workers of lost claims are back",
        "Set IDEMPOTENCY_DATA_LOSS_GRACE to {} or more.",
    ),
    Advice(
        RESTORES,
        "the ring lacks a key",
        "Put those keys back into IDEMPOTENCY_KEY_RING, after the newest, and run `flask idempotency keys status`.",
    ),
    Advice(
        RESTORES,
        "the ring has another key under an id of the store",
        "Put the ring into IDEMPOTENCY_KEY_RING that sealed them: compare it with that of other hosts, and with the one "
        "before the last change. Then run `flask idempotency keys status`.",
    ),
    Advice(
        OPERATOR,
        "plain responses where encryption is required",
        "Find out who stored them. If your application did before you switched encryption on: wait until they expire, or "
        "set IDEMPOTENCY_ENCRYPTION to on, run `flask idempotency seal`, and set it to required again. If you do not "
        "know: seal nothing, let them expire, and see who can write to the store.",
    ),
    Advice(
        RESTORES,
        "a rotation of the ring has not finished",
        "Run `flask idempotency rotate`, and again after five minutes.",
    ),
    Advice(
        RESTORES,
        "no janitor runs",
        "Start a janitor (`celery -A flask_idempotency.janitor worker -B`; with a SQL store set IDEMPOTENCY_BROKER_URL "
        "first), or have cron run `flask idempotency reap` and `flask idempotency expire`.",
    ),
    Advice(
        RESTORES,
        "one task does not run",
        "See why in the janitor's log, and run `flask idempotency {}` by hand or by cron. If it should run less often, "
        "set IDEMPOTENCY_{}_INTERVAL to that.",
    ),
    Advice(
        OPERATOR,
        "keys with an unknown outcome",
        "List the keys with `flask idempotency list --state quarantined`, find out what happened, and resolve each with "
        "`flask idempotency resolve`.",
    ),
    Advice(
        RESTORES,
        "leases expired, and no janitor looked",
        "Run `flask idempotency reap`, and make sure that a janitor does so from now on.",
    ),
    Advice(
        RESTORES,
        "requests wait between two steps",
        "List the keys with `flask idempotency list --state paused`, and let the clients send these requests again. The "
        "janitor quarantines each as `never-resumed` after its `resume_within`.",
    ),
    Advice(
        OPERATOR,
        "workers vanished, and a retry may take over",
        "List the keys with `flask idempotency list --state lease-expired`, and run `flask idempotency release` for those"
        " that no client retries.",
    ),
    Advice(
        LOOKS,
        "the store did not answer",
        "Run `flask idempotency doctor` again when the store answers.",
    ),
    Advice(
        LOOKS,
        "a clock jumped",
        "{} If leases have ended: `flask idempotency list --state quarantined`.",
    ),
    Advice(
        LOOKS,
        "it is unknown when a proxy gives up",
        "Pass --proxy-timeout, or set IDEMPOTENCY_PROXY_TIMEOUT, to nginx's proxy_read_timeout or its like; to 0 if "
        "nothing gives up.",
    ),
    Advice(
        PROTECTS,
        "lost keys run again",
        "Set IDEMPOTENCY_AFTER_LOSS to refuse, or remove it, before this application moves money.",
    ),
    Advice(
        RESTORES,
        "the key service does not answer",
        "Make sure that this host reaches what IDEMPOTENCY_KEY_RING names.",
    ),
    Advice(
        RESTORES,
        "the newest key does not open what it wraps",
        "Look at IDEMPOTENCY_KEY_RING and at `flask idempotency keys status`; put a key that works first.",
    ),
    Advice(
        OPERATOR,
        "plain responses from before encryption",
        "Wait until they expire. Or run `flask idempotency seal`, if your application stored them before you switched "
        "encryption on and no other party could write to the store.",
    ),
    Advice(
        LOOKS,
        "a check lacks a package",
        "Install the Python module {} where this runs.",
    ),
    Advice(
        LOOKS,
        "a check failed",
        "Report it: a check of `flask idempotency doctor` must not.",
    ),
    Advice(
        POLICY,
        "a proxy gives up on a duplicate that waits",
        "Lower IDEMPOTENCY_WAIT below the proxy's timeout, or raise that (nginx's proxy_read_timeout).",
    ),
    Advice(
        POLICY,
        "the names of keys have changed",
        "Undo the change, or {}, until then.{}",
    ),
    Advice(
        LOOKS,
        "the names of keys may be those of another application",
        " If that is another application in the same store, you need not act",
    ),
    Advice(
        POLICY,
        "two applications of one name share a store",
        "; set IDEMPOTENCY_NAMESPACE of each to what it has now, and give each Flask application another name.",
    ),
    Advice(
        PROTECTS,
        "some requests came without a key",
        "{}{} Let these clients send a key, and then set required=True.",
    ),
    Advice(
        POLICY,
        "duplicates come while a slow first request runs",
        "{}: {}",
    ),
    Advice(
        LOOKS,
        "keys ended in quarantine",
        "{}{} (an exception, a 5xx or a worker that vanished), and {} met such a key. ",
    ),
    Advice(
        LOOKS,
        "keys ended in quarantine",
        '{}Under effects="{}" an operator or a resolver settles each.',
    ),
    Advice(
        LOOKS,
        "steps were left in doubt",
        "{}Steps left in doubt: {}. ",
    ),
    Advice(
        POLICY,
        "steps were left in doubt",
        "{}A plain step is in doubt until an operator or a resolver settles it: `flask idempotency show` names it. Give "
        "it a resolver, name errors that are harmless, or give its effect a downstream key.",
    ),
    Advice(
        POLICY,
        "keys of a plain or marked view ended in quarantine",
        "{} What the view does is not counted: declare {}",
    ),
    Advice(
        POLICY,
        "keys of a plain view ended in quarantine",
        '{}; "marked" if it can name its point of no return.',
    ),
    Advice(
        POLICY,
        "requests differ under one key",
        "had the key of another request: another payload, path or query. The counts do not tell which. Ask these clients "
        "whether they use {}a field that changes with each retry (ignore_fields).",
    ),
    Advice(
        POLICY,
        "responses were too large to keep",
        "could not be kept: over max_body ({} bytes), broken off, or with a header that no response may have. Retries get"
        " `response-not-kept` instead of it.",
    ),
    Advice(
        POLICY,
        "a view sets a cookie",
        "set a cookie or changed the session, which no replay carries. Set what a retry needs too in an after_request "
        "hook: hooks run on replays.",
    ),
    Advice(
        LOOKS,
        "enforcing would refuse requests",
        "had a malformed key, a truncated or too large body, or a caller without a name. Enforcing refuses them with 400,"
        " 403, 413 or 500: the log names callers without a name.",
    ),
    Advice(
        LOOKS,
        "observing met the quota",
        "came when as many keys of their tenant were remembered as may be, and were not recorded, so these counts are too"
        " low.",
    ),
    Advice(
        LOOKS,
        "observing failed",
        "could not be observed, so these counts are too low. The log names the kind of each failure once.",
    ),
    Advice(
        PROTECTS,
        "every request carried a key",
        "{} So requiring one refuses none of these.",
    ),
    Advice(
        PROTECTS,
        "a required key is missing",
        "{}{} They get 400 and run nothing. Let these clients send a key.",
    ),
    Advice(
        PROTECTS,
        "no request carried a key",
        "{}{} Until clients send keys, nothing is protected.",
    ),
    Advice(
        POLICY,
        "duplicates come while a quick first request runs",
        "{}: within `wait` ({} s) they get its response.",
    ),
    Advice(
        LOOKS,
        "few requests came",
        "Only {} came: wait for more before you decide anything.",
    ),
    Advice(
        PROTECTS,
        "one process keeps the records to itself",
        "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money.",
    ),
    Advice(
        POLICY,
        "Redis is nearly full",
        "Raise maxmemory, or add memory; or lower IDEMPOTENCY_KEEP and set IDEMPOTENCY_REMEMBER to what it was: responses"
        " go, and their keys stay refused. If it is full, requests with new keys get 503.",
    ),
    Advice(
        RESTORES,
        "other programs use the database of the store",
        "Give the other program a Redis of its own, or at least another database (another number at the end of its URL). "
        "Do not move these records: another database knows no key, and retries would run again.",
    ),
    Advice(
        LOOKS,
        "Redis hides its settings",
        "Allow its user to read it, with ACL SETUSER … +info +config|get +scan, or check it by hand: see "
        "docs/guides/redis.md.",
    ),
    Advice(
        PROTECTS,
        "Redis evicts keys",
        "Set maxmemory-policy to noeviction. Give a cache that needs another policy a Redis of its own.",
    ),
    Advice(
        PROTECTS,
        "Redis keeps its records in memory alone",
        "Set appendonly to yes, first with CONFIG SET, then in its configuration file.",
    ),
    Advice(
        RESTORES,
        "Redis cannot write to its disk",
        "Read its log. Check that its disk has space, and that Redis may write there.",
    ),
    Advice(
        RESTORES,
        "fewer replicas than claims wait for",
        "Restart the missing replicas. With a smaller IDEMPOTENCY_REPLICAS, a fail-over may lose records.",
    ),
    Advice(
        RESTORES,
        "replicas are behind",
        "Check the logs of these replicas, and the network to them.",
    ),
    Advice(
        PROTECTS,
        "claims wait for fewer replicas than there are",
        "Set IDEMPOTENCY_REPLICAS to {}, if such a loss costs more than slower requests.",
    ),
    Advice(
        PROTECTS,
        "writes count while no replica receives them",
        " At least set min-replicas-to-write to 1 or more, and min-replicas-max-lag to a few seconds.",
    ),
    Advice(
        PROTECTS,
        "Redis writes to its disk once a second",
        "Set appendfsync to always, if such a loss costs more than slower writes.",
    ),
    Advice(
        PROTECTS,
        "the operating system decides when Redis writes",
        "Set appendfsync to always, or to everysec.",
    ),
    Advice(
        RESTORES,
        "the URL leads to a replica",
        "Set IDEMPOTENCY_STORE to the primary, or to a client that follows it.",
    ),
    Advice(
        RESTORES,
        "storage parameters are missing",
        "Run `flask idempotency db upgrade` once, which sets it.",
    ),
    Advice(
        POLICY,
        "MariaDB refuses statements as large as responses",
        "Set max_allowed_packet to twice IDEMPOTENCY_MAX_BODY or more, or lower that setting.",
    ),
    Advice(PROTECTS, "a Galera cluster has two nodes or an even number", "Run three nodes or five, or add garbd."),
    Advice(
        PROTECTS,
        "the application's own connections to Galera may see less than the store's",
        "Set wsrep_sync_wait to {} where connections are made, or let them lead to one node.",
    ),
    Advice(ROOM, "inserts on Galera may deadlock", "Set innodb_autoinc_lock_mode to 2 on each node."),
    Advice(PROTECTS, "nodes of Galera may disagree about rows", "Give each of these tables a primary key."),
    Advice(
        LOOKS,
        "the tables are missing",
        "Do what `schema` says.",
    ),
    Advice(
        RESTORES,
        "an index is unfinished",
        "Run {}.",
    ),
    Advice(
        LOOKS,
        "a sequence cannot be read",
        "Let the database role read pg_sequence, and do what `schema` says.",
    ),
    Advice(
        RESTORES,
        "PostgreSQL counts no dead rows",
        "Do what `schema` says, and set track_counts to on.",
    ),
    Advice(
        RESTORES,
        "autovacuum does not keep up",
        "Find transactions in pg_stat_activity that have been open for long, and let autovacuum run more often: ALTER "
        "TABLE idempotency_records SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0).",
    ),
    Advice(
        PROTECTS,
        "SQLite has another journal",
        "Run `PRAGMA journal_mode=WAL` on it once, and set no other where connections are made.",
    ),
    Advice(
        PROTECTS,
        "SQLite does not wait for its disk",
        "Set it to FULL where connections are made.",
    ),
    Advice(
        RESTORES,
        "expired records stay",
        "Run the janitor, or `flask idempotency expire` regularly. Set IDEMPOTENCY_EXPIRE_RATE above the rate of new "
        "keys.",
    ),
    Advice(
        LOOKS,
        "a row could not be written",
        "Do what `schema` and `durability` say, and check again.",
    ),
    Advice(
        RESTORES,
        "the replay cache does not answer",
        "Check IDEMPOTENCY_REDIS_URL, and that its server runs and lets this host in.",
    ),
    Advice(
        RESTORES,
        "Alembic may drop the tables",
        "Make sure that `alembic check` names none of them. If it does: in env.py pass "
        "include_object=flask_idempotency.sql.include_object to context.configure(…), or declare the tables with "
        "flask_idempotency.sql.include_in(metadata).",
    ),
    Advice(
        LOOKS,
        "Flask-Migrate may drop the tables",
        "Read the next migration before you run it. {}",
    ),
    Advice(
        POLICY,
        "the secret is weak",
        "Set IDEMPOTENCY_SECRET to [a new random value, the one in use], and drop the second after the longest `keep` or "
        "`remember`.",
    ),
    Advice(
        POLICY,
        "a rotation of the secret has not finished",
        "Drop the last one from IDEMPOTENCY_SECRET when the longest `keep` or `remember` has passed since every process "
        "knows the first.",
    ),
    Advice(
        RESTORES,
        "a policy cannot hold",
        "Change the policy there: @idempotent(…), idempotency.configure(…), or the IDEMPOTENCY_* setting it names.",
    ),
    Advice(
        PROTECTS,
        "an endpoint is only observed",
        "Read `flask idempotency report`, and set mode to enforce where its counts are as you expect.",
    ),
    Advice(
        OPERATOR,
        "messages can never be sent",
        "Run `flask idempotency outbox list --dead`, repair what it names, and run `outbox retry`. `outbox discard` is "
        "for what must not be sent any more: the message is lost.",
    ),
    Advice(
        RESTORES,
        "messages are late",
        "Check that `flask idempotency relay` runs, and run more of them if it does not keep up.",
    ),
    Advice(
        RESTORES,
        "a receiver fails",
        "Run `flask idempotency outbox list`, and repair the receiver. They are sent within 10 minutes then, or at once "
        "after `flask idempotency outbox retry --topic`.",
    ),
    Advice(
        LOOKS,
        "links of problems lead nowhere",
        "Set IDEMPOTENCY_DOCS_URL to https://… that ends with a slash, or remove it.",
    ),
    Advice(
        RESTORES,
        "Flask-Migrate drops the tables",
        "Pass include_object=flask_idempotency.sql.include_object to Migrate(…), or to context.configure(…) in env.py; or"
        " declare the tables with flask_idempotency.sql.include_in(metadata).",
    ),
    Advice(
        POLICY,
        "a former identity that no key needs",
        "Remove it: no key that the store knows of needs it.",
    ),
    Advice(
        POLICY,
        "a former identity that keys still need",
        "Remove it after {}.",
    ),
    Advice(
        PROTECTS,
        "no view voids keys",
        'Set IDEMPOTENCY_STATUS_URL, or register key_status with methods=["GET", "DELETE"].',
    ),
    Advice(
        RESTORES,
        "no request finds an annotation",
        "Annotate the function that the route gets; of a view that is an object, the object or its __call__. Remove the "
        "annotation from a function that is no view.",
    ),
    Advice(
        RESTORES,
        "a blueprint is not registered",
        "Register those blueprints, unless they are left out here on purpose.",
    ),
    Advice(
        ROOM,
        "no temporary file takes a body",
        "Set TMPDIR to a folder that the workers can write to, with room for the uploads that come at the same time; in a"
        " container, mount one (`--tmpfs /tmp`). Then run `flask idempotency doctor` there again.",
    ),
    Advice(
        RESTORES,
        "resolvers of messages that a janitor does not know",
        "Import the modules that make these inboxes and tasks where the janitor runs: it frees none of their keys.",
    ),
    Advice(
        RESTORES,
        "a resolver of no endpoint",
        "Name an endpoint in @idempotency.resolver(…) as `url_for` would: blueprint and view, with a dot between.",
    ),
    Advice(
        POLICY,
        "only an operator can find out what happened",
        "Register @idempotency.resolver(…) that finds out what happened, or be ready for `flask idempotency resolve`; or "
        'declare effects="deduplicated" or "transactional", of the view or of its plain steps, where that is true.',
    ),
    Advice(
        POLICY,
        "the secret comes from SECRET_KEY",
        "Set IDEMPOTENCY_SECRET to [a value of its own, flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop "
        "the second after the longest `keep` or `remember`.",
    ),
    Advice(
        OPERATOR,
        "the connection to a store is not encrypted",
        "{}; or, if something else protects the connection, set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True.",
    ),
    Advice(
        POLICY,
        "replays lack a header",
        "Keep what a client acts on: {} in @idempotent(…), or IDEMPOTENCY_KEEP_HEADERS. Set what belongs to one exchange "
        "in an after_request hook, which runs on replays too.",
    ),
)
