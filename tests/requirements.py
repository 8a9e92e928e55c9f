"""Requirements that a user or operator would recognise, one line each, with their source.

A requirement without a test and a test of an unknown requirement both fail the suite (test_requirements.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Requirement:
    """Requirement with its source: a section of protocol, tool-design or jina-api, or `design` of this project."""

    id: str
    source: str
    text: str


def requirement(*ids: str) -> Callable[[Test], Test]:
    """Mark a test with the requirements that it shows. It has no effect at run time; `scripts.docs` parses the source."""
    del ids
    return lambda test: test


# fmt: off
REQUIREMENTS = (
    Requirement("subject.durable", "protocol 1", "The command stream is created only if none exists; all replicas share one durable consumer, whose settings are restored."),
    Requirement("command.body", "protocol 2", "A body that is not a JSON object, is too large, or has a missing or forbidden field gives `bad_request` naming the field; unknown fields are ignored."),
    Requirement("command.any", "protocol 10", "Any subject, headers, body and database state give one result or one dead letter, and affect no other call."),
    Requirement("switches", "design", "An operator disables a tool, a project or all tools on all replicas without a restart; its calls fail with the reason and cost nothing."),
    Requirement("usage", "design", "`usage` sums up calls, tokens, requests, cache hits, errors and latency of one project from its result cards."),
    Requirement("identity.headers", "protocol 2", "Identity comes from subject and headers, and from the call card if they lack it; never from the body. Every malformed header is named."),
    Requirement("identity.unanswerable", "protocol 2", "A command whose result cannot reach any turn is dead-lettered on its first delivery."),
    Requirement("card.read", "protocol 3", "A call card that is missing, deleted, of another project, type, class or call, or without readable arguments gives a typed error."),
    Requirement("card.result", "protocol 3", "A result card has exactly the fields that the kernel's readers accept, and jsonb can always store it."),
    Requirement("tool.definition", "protocol 4", "The definition is the project's own, loaded for each call; an unusable one gives `tool_misconfigured`, naming the option."),
    Requirement("definition.bounds", "design", "A definition beyond the limits gives `tool_misconfigured`; one within them costs a call little memory and time."),
    Requirement("arguments.prepared", "protocol 5", "Arguments are prepared in the protocol's order: defaults, schema, fixed values, environment variables, templates."),
    Requirement("arguments.checked", "tool-design 2", "Arguments that do not fit the schema or its limits are refused with every problem at once."),
    Requirement("arguments.any", "jina-api 6.3", "Any arguments give a request of allowed headers and body keys only, or an error that names every wrong one."),
    Requirement("options.jina", "protocol 5", "`options.jina`, or its legacy form `options.openapi`, decides host, form and key of the request."),
    Requirement("options.envs", "protocol 5", "Only variables that the operator allows are used, as the key or as permitted body members, and never in a URL."),
    Requirement("options.result_format", "tool-design 3", "A result is text, or one object if the definition says so."),
    Requirement("limits.window", "design", "All replicas together send at most the limit of a key in any 60 s, whatever crashes, is lost or interleaves."),
    Requirement("limits.shared", "design", "The replicas that want permits get equal shares; a 429 that one sees holds back all."),
    Requirement("limits.waiting", "design", "A call waits for a permit without a slot, in turn by project and agent; it fails as soon as it is certain that none comes in time."),
    Requirement("keys.blocked", "jina-api 4", "A key that two calls find invalid or exhausted is blocked for all replicas: its calls fail at once with the same error; other refusals are a call's own fault."),
    Requirement("keys.tried_again", "design", "A blocked key is tried again by one call every few minutes, and as soon as its file has another value."),
    Requirement("keys.pools", "design", "The keys of a pool share its load by their limits; one that is blocked or paused is passed over."),
    Requirement("budgets.exact", "design", "No interleaving of replicas exceeds a budget in requests, loses a use, or refuses a call while more than 2 % is left; one in tokens is exceeded at most by what running requests cost beyond their estimates."),
    Requirement("budgets.reservations", "design", "What a killed replica had reserved is free after 60 s, and what its stored results cost is counted; while NATS is unavailable, calls are checked against the last known use."),
    Requirement("budgets.calls", "design", "A call over a budget fails with `budget_exceeded` and its numbers before anything is sent; a cached response costs nothing, and the card says what is left."),
    Requirement("session.scoped", "protocol 5", "A session belongs to one project and agent; all replicas derive the same identity, and no output reveals it."),
    Requirement("tenant.scoped", "protocol 3", "No call sees another project's rows, results, sessions or artifacts, even with the same ids."),
    Requirement("answer.example", "protocol 9", "The recorded example calls give the same rows, card and doorbell."),
    Requirement("answer.atomic", "protocol 6", "Card, inbox row and edge are written together or not at all."),
    Requirement("answer.precheck", "protocol 6", "A report that the kernel would refuse is refused before anything is billed."),
    Requirement("answer.trace", "protocol 6", "The report is a child span in the waiting turn's trace; a foreign trace becomes a link."),
    Requirement("answer.earlier", "protocol 6", "An earlier result is reported again or its doorbell repeated; a result of another author is not touched."),
    Requirement("answer.doorbell", "protocol 6", "The doorbell reaches the worker in the roster, is retried through an outage, and its failure undoes nothing."),
    Requirement("answer.time", "protocol 7", "After the worker's time limit the result is `timeout`; no request is sent that cannot end in time."),
    Requirement("answer.errors", "protocol 8", "A failure is a typed error whose message says what to do instead."),
    Requirement("answer.parked", "design", "A paid result that cannot be committed is stored for its call and committed later without another upstream request."),
    Requirement("v1r3.command", "protocol 2", "A v1r3 command carries its identity in the body, which the call card completes; subject and headers give the rest, and the body may hold identity fields, which v1r4 forbids."),
    Requirement("v1r3.report", "protocol 6", "A v1r3 report has the inbox and edge columns of that version, the step of the call card, and the depth of the request edge, which is filled in where it is missing."),
    Requirement("v1r3.doorbell", "protocol 6", "A v1r3 doorbell names the agent in its body and carries the headers of the command with the report's trace."),
    Requirement("dialects.recognised", "design", "A database of another protocol version than the configured one is recognised at the start and named."),
    Requirement("dialects.behaviour", "design", "A process that serves kernels of both versions answers the calls of each alike, from command to doorbell."),
    Requirement("dialects.commands", "design", "Every command of the command line takes the kernel of either protocol version by one option; `check` and `nats permissions` cover all that the settings name."),
    Requirement("dialects.isolated", "design", "Kernels of one process share no lease, session, cached response or memory share, even with equal ids; one that is unavailable does not stop the other."),
    Requirement("content.search", "tool-design 3", "A search gives numbered results with title, url, date and snippet; no results is a success."),
    Requirement("content.reader", "tool-design 3", "A page gives title, url, published time, warnings and body."),
    Requirement("content.kept", "tool-design 3", "Nothing that matters in a response is lost, and the text for the model keeps its limits."),
    Requirement("content.untrusted", "tool-design 3", "Web text is framed as untrusted, each item in its own frame, with a mark that no page can know."),
    Requirement("content.cursor", "tool-design 3", "A long text is truncated at a sensible place; a cursor, valid for its project and agent only, continues it at no cost."),
    Requirement("content.find", "tool-design 3", "The stored text of a long result is searched at no cost, by a phrase or a question; a cursor continues it from each place."),
    Requirement("usage.exact", "design", "Results report their cost; each upstream request is counted in exactly one."),
    Requirement("upstream.request", "jina-api 0-2", "Requests have the documented form, and timeouts that fit the call's remaining time."),
    Requirement("upstream.errors", "jina-api 4", "Every error status, unexpected shape or excessive size of the upstream gives a typed error."),
    Requirement("upstream.recordings", "jina-api 0-4", "Every recorded exchange gives a result or a typed error."),
    Requirement("upstream.retry", "jina-api 4", "A request is retried exactly if its failure permits, within the deadline; Retry-After is honoured."),
    Requirement("batch", "tool-design 3", "Batch items are requested in parallel under one deadline; each failure is reported per item, duplicates are requested once."),
    Requirement("url.checked", "jina-api 7", "A page address is repaired if its intent is clear; one that is invalid or internal is refused before it is billed."),
    Requirement("cache", "design", "A cached response costs nothing and says so; owners never share one, and identical calls in flight share a request."),
    Requirement("policy.tools", "tool-design 4", "A call outside the effective tool set, or that a hook denies, gets `tool_not_available` and never reaches the network."),
    Requirement("catalogue", "tool-design 1", "Every built-in tool has one name and schema, whatever form a model provider needs."),
    Requirement("definition.lint", "tool-design 2", "The linter refuses a wrong definition with every problem at once, with path, line and remedy."),
    Requirement("definition.exports", "tool-design 1", "Exports hide fixed and environment arguments and show defaults; a call made from an export is accepted."),
    Requirement("definition.apply", "protocol 4", "A definition gives the same row through the kernel's API and through its database, however often it is applied."),
    Requirement("egress.hosts", "design", "The service sends https requests on port 443 to two hosts only, with allow-listed headers, and follows no redirects."),
    Requirement("egress.tls", "design", "Certificates of the upstream are verified; SSL_CERT_FILE adds a CA."),
    Requirement("egress.proxy", "design", "Only the proxy of the settings is used; it carries a TLS tunnel that it cannot read."),
    Requirement("egress.public", "design", "With `egress.public_addresses_only` nothing is sent to an address that is not public."),
    Requirement("egress.response", "design", "Headers of a response are limited, nothing is decompressed, and unsolicited bytes reach no call."),
    Requirement("secrets.output", "protocol 10", "No key shows in a log, card, row, trace, terminal or crash, in any encoding, even if the upstream echoes it."),
    Requirement("secrets.files", "design", "A key may come from the file that NAME_FILE names."),
    Requirement("data.places", "design", "Queries and results of a call are stored only in its cards and in dead letters, and can be deleted there."),
    Requirement("terminal.text", "design", "Foreign text can neither control a terminal nor forge a line of the log."),
    Requirement("hostile.neighbour", "design", "Whatever one project sends, stores or requests, no call of another project is lost or held up."),
    Requirement("memory.limit", "design", "Memory stays below the limit that the chart computes, however many large responses arrive; calls wait for memory."),
    Requirement("loop.answers", "design", "No response blocks the event loop for more than 50 ms."),
    Requirement("fuzz.corpora", "design", "No input found by fuzzing causes an unexpected error or takes a second."),
    Requirement("run.concurrency", "design", "Calls run concurrently up to the limit, without waiting for a batch to fill."),
    Requirement("intake", "design", "Slots are shared fairly by project, then by agent: a backlog delays only its own project."),
    Requirement("intake.lease", "design", "A command that no replica has run needs no lease; one that was run needs one."),
    Requirement("intake.full", "design", "A backlog larger than max_ack_pending does not stop the delivery of commands behind it."),
    Requirement("fair.weights", "design", "Projects share slots and held commands by weight, charged with their upstream requests; an idle share goes to others."),
    Requirement("fair.projects", "design", "Connections to database and upstream and TLS handshakes are shared fairly by project: none waits behind another's queue."),
    Requirement("run.replicas", "design", "Replicas on one durable share the load, and each call gets one result."),
    Requirement("run.heartbeat", "protocol 10", "A call longer than AckWait is not redelivered while it runs."),
    Requirement("run.stop", "protocol 10", "SIGTERM finishes running calls within a limited time and exits with 0."),
    Requirement("run.side_tasks", "design", "If a background task ends, the process ends, also during a drain."),
    Requirement("cancel.once", "design", "A call that is cancelled at any moment is acknowledged with one result or handed back with none."),
    Requirement("lease.owner", "design", "A redelivered command has one owner; one that lost too many executors gets a failed result and a dead letter."),
    Requirement("chaos.nothing_lost", "design", "Under crashes, restarts, stalls and upstream failures no call is lost or doubled, and every doorbell is published."),
    Requirement("outage", "design", "PostgreSQL and NATS may be unavailable at the start or at any time: no command is fetched meanwhile, no upstream request repeated, and the log names the cause."),
    Requirement("breaker", "design", "While loads or commits fail no command is fetched; the rows of one call do not stop other calls."),
    Requirement("postgres.failures", "design", "An error of PostgreSQL is one call's defect, an outage, or the operator's to fix; readiness names the last with its remedy."),
    Requirement("postgres.connection", "design", "PostgreSQL is connected as the connection string says, also over TLS; an idle pool shrinks to one connection."),
    Requirement("privilege.grants", "protocol 6", "The printed grants suffice for every call path; everything else is refused."),
    Requirement("privilege.subjects", "design", "The printed NATS permissions suffice for every call path; a denied subject is named."),
    Requirement("nats.login", "design", "NATS is connected with user, nkey or credentials file, also from a leaf node; if TLS is required, over TLS or not at all."),
    Requirement("nats.watched", "design", "A silent NATS server, or a durable that was changed, paused or deleted, is detected within seconds, and restored or reported."),
    Requirement("nats.storage", "design", "The executor's buckets and streams are created at the start with the replicas of the command stream, created again if deleted, and reported if full."),
    Requirement("deadletters", "design", "A dead letter contains its command, does not prevent others from being stored, and can be listed, shown and replayed."),
    Requirement("handover", "protocol 10", "Another executor's durable is taken over; commands that it gave up on are listed and can be replayed."),
    Requirement("health", "design", "/livez, /readyz and /metrics report the latest state of every dependency, under any number of other requests."),
    Requirement("reload", "design", "SIGHUP reloads the policy and mounted keys; invalid ones change nothing."),
    Requirement("settings.sources", "design", "Defaults, the kernel's `config.toml`, the executor's file, environment and flags override each other in this order."),
    Requirement("settings.errors", "design", "An invalid or ambiguous setting is named with exit code 2, and its value is not shown."),
    Requirement("settings.reference", "design", "Sample, reference, help and model of the settings agree."),
    Requirement("cli.ends", "design", "A closed output, Ctrl-C and an unavailable service end a command without a traceback, with the documented exit code."),
    Requirement("cli.dev", "design", "`dev` keeps the servers running, prints calls as they pass, and stops without leaving anything behind."),
    Requirement("cli.call", "design", "`call` places one call as the kernel does and prints the result, or why there is none."),
    Requirement("local.stack", "design", "The embedded stack leaves no process and no file behind, even after a crash; its double refuses unknown requests."),
    Requirement("local.demo", "design", "The demo shows one call of each tool and exits with 0 only if all results are as expected."),
    Requirement("performance", "design", "Per call, CPU time (relative to a minimal program), messages, statements and rows read stay within their limits."),
    Requirement("cli.check", "design", "`check` reports whether `serve` can use settings, PostgreSQL, NATS, durable, keys, stored definitions and the upstream, and changes nothing."),
    Requirement("chart.values", "design", "Every feature of the chart renders manifests that Kubernetes accepts; values are validated and described in one file."),
    Requirement("chart.restricted", "design", "Every pod of the chart satisfies the restricted pod security standard with a read-only root."),
    Requirement("chart.names", "design", "Selectors and names of objects do not change between versions of the chart."),
    Requirement("chart.refused", "design", "Values that cannot work, misspelt settings and secrets in plain values are refused with a message."),
    Requirement("metrics", "design", "Metrics are defined once for Prometheus and OTLP, have bounded labels, and say where the time and the tokens of calls go."),
    Requirement("logs.call", "design", "Every log line of a call has its ids and trace id; the one that ends it has its cost and times."),
    Requirement("cli.inspect", "design", "`inspect` shows the timeline of one call from stream, tables and bucket, and says why a call has no result."),
    Requirement("cli.limits", "design", "`limits` shows limits, use, waiting calls by project and refused keys of all replicas, once or until a signal."),
    Requirement("cli.top", "design", "`top` shows rate, latency, load, lag, errors and problems of all replicas, with no payload and no secret."),
    Requirement("page", "design", "The health server's page, off by default, shows what `top` shows of this replica, runs no script but its own, and takes values as text only."),
    Requirement("traces", "design", "A sampled call's spans follow the conventions, and their export delays no call; an unsampled call makes none."),
    Requirement("chart.metrics", "design", "Alerts and dashboard use metrics that exist, and say what to do."),
    Requirement("chart.runs", "design", "The rendered Deployment runs with least privilege; calls get results throughout a rolling update."),
    Requirement("image.steps", "design", "The build steps of the image give an entry point that runs as any user on a read-only root, without installers and the embedded stack."),
    Requirement("supply.locked", "design", "Packages in the image are pinned with hashes, under known licences, and listed in an SBOM."),
    Requirement("result.delay", "protocol 12", "A result is committed after the worker has suspended the turn, without occupying a slot meanwhile."),
    Requirement("run.turn_deadline", "protocol 7", "A result of another call of the same step may bring the turn's deadline forward; a longer call then ends before it."),
    Requirement("start.reasons", "design", "A start that waits names what is missing, where, and the remedy, once and then every minute; /readyz says the same."),
    Requirement("cli.help", "design", "Help fits a terminal of 50 columns, -h asks for it anywhere, and shells complete commands and flags."),
    Requirement("docs.run", "design", "Every command and snippet of the documents is run by a test, or listed with the reason why not."),
    Requirement("testing.runner", "design", "`openapi_tool.testing` runs a definition as `serve` does, without servers: results as the model reads them, requests as they would be sent."),
    Requirement("testing.example", "design", "The example project of one's own tools passes its tests, and they notice a broken definition."),
    Requirement("runner.alone", "design", "A tool call needs no turn, card or inbox: owner, definition, arguments and deadline suffice."),
)
# fmt: on
