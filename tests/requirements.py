"""Requirements that a user or operator would recognise, one line each, with their source.

The suite fails for a requirement without a test, and for a test of an unknown requirement (unit/test_repository.py).
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
    Requirement("subject.durable", "protocol 1", "The command stream is created only if none exists. All replicas share one durable consumer; the executor restores its settings."),
    Requirement("command.body", "protocol 2", "A body that is not a JSON object or is too large gives `bad_request`; so does a missing or forbidden field, which the message names. Unknown fields are ignored."),
    Requirement("command.any", "protocol 10", "Any subject, headers, body and database state give one result or one dead letter, and affect no other call."),
    Requirement("switches", "design", "An operator can disable a tool, a project or all tools on all replicas without a restart; the calls concerned fail with the operator's reason and cost nothing."),
    Requirement("usage", "design", "`usage` sums up calls, tokens, requests, cache hits, errors and latency of one project from its result cards."),
    Requirement("identity.headers", "protocol 2", "The caller's identity comes from subject and headers, and from the call card if they lack it; never from the body. The error names every malformed header."),
    Requirement("identity.unanswerable", "protocol 2", "A command whose result cannot reach any turn is dead-lettered on its first delivery."),
    Requirement("card.read", "protocol 3", "A call card gives a typed error if it is missing, deleted, of another project, type, class or call, or without readable arguments."),
    Requirement("card.result", "protocol 3", "A result card has exactly the fields that the kernel's readers accept, and jsonb can always store it."),
    Requirement("tool.definition", "protocol 4", "The definition is the project's own and is loaded for each call; an unusable definition gives `tool_misconfigured`, which names the option."),
    Requirement("definition.bounds", "design", "A definition that exceeds a limit of size gives `tool_misconfigured`; any other costs a call little memory and time."),
    Requirement("arguments.prepared", "protocol 5", "Arguments are prepared in the protocol's order: defaults, schema, fixed values, environment variables, templates."),
    Requirement("arguments.checked", "tool-design 2", "Arguments that violate the schema or its limits are refused; the error lists every problem."),
    Requirement("arguments.any", "jina-api 6.3", "Any arguments give either a request with allowed headers and body keys only, or an error that names every wrong argument."),
    Requirement("options.jina", "protocol 5", "`options.jina`, or its legacy form `options.openapi`, determines host, form and key of the request."),
    Requirement("options.envs", "protocol 5", "Only variables that the operator allows are used, only as the key or as permitted body members, and never in a URL."),
    Requirement("options.result_format", "tool-design 3", "A result is text, or one object if the definition says so."),
    Requirement("limits.window", "design", "All replicas together send at most the limit of a key in any 60 s, whatever crashes, is lost or interleaves."),
    Requirement("limits.shared", "design", "The replicas that want permits get equal shares; a 429 that one replica gets pauses all."),
    Requirement("limits.waiting", "design", "A call waits for a permit without a slot, in fair order by project and agent; it fails as soon as no permit can come in time."),
    Requirement("keys.blocked", "jina-api 4", "A key that two calls find invalid or exhausted is blocked for all replicas: its calls fail at once with the same error. Other refusals do not block a key."),
    Requirement("keys.tried_again", "design", "One call every few minutes tries a blocked key again; another value in its file unblocks it at once."),
    Requirement("keys.pools", "design", "The keys of a pool share its load by their limits; a blocked or paused key is skipped."),
    Requirement("budgets.exact", "design", "No interleaving of replicas exceeds a budget in requests, loses a use, or refuses a call while more than 2 % is left. A budget in tokens is exceeded at most by what running requests cost beyond their estimates."),
    Requirement("budgets.reservations", "design", "A killed replica's reservations are free after 60 s, and the cost of its committed results is counted; while NATS is unavailable, calls are checked against the last known use."),
    Requirement("budgets.calls", "design", "A call that exceeds a budget fails with `budget_exceeded` and the budget's numbers before anything is sent; a cached response costs nothing, and the result card says what is left."),
    Requirement("session.scoped", "protocol 5", "A session belongs to one project and agent; all replicas derive the same identity, and no output reveals it."),
    Requirement("tenant.scoped", "protocol 3", "No call sees another project's rows, results, sessions or artifacts, even with the same ids."),
    Requirement("answer.example", "protocol 9", "The recorded example calls of the kernel give the recorded rows, card and doorbell."),
    Requirement("answer.atomic", "protocol 6", "Card, inbox row and edge are written together or not at all."),
    Requirement("answer.precheck", "protocol 6", "A report that the kernel would refuse is refused before anything is billed."),
    Requirement("answer.trace", "protocol 6", "The report is a child span in the waiting turn's trace; a different trace in the command becomes a link."),
    Requirement("answer.earlier", "protocol 6", "An earlier result of the call is reported again, or its doorbell is repeated; a result of another author is not touched."),
    Requirement("answer.doorbell", "protocol 6", "The doorbell goes to the agent's worker in the roster and is retried during an outage; its failure undoes nothing."),
    Requirement("answer.time", "protocol 7", "A call that reaches its time limit gets the result `timeout`; no request is sent that cannot end in time."),
    Requirement("answer.errors", "protocol 8", "A failure is a typed error whose message says what to do instead."),
    Requirement("answer.parked", "design", "A paid result that cannot be committed is stored for its call and committed later without another upstream request."),
    Requirement("v1r3.command", "protocol 2", "A v1r3 command may carry the caller's identity in its body, which v1r4 forbids; the call card completes it, and subject and headers give the rest."),
    Requirement("v1r3.report", "protocol 6", "A v1r3 report has the inbox and edge columns of that version, the step of the call card, and the depth of the request edge, which is filled in if it is missing."),
    Requirement("v1r3.doorbell", "protocol 6", "A v1r3 doorbell names the agent in its body and has the headers of the command, with the trace of the report."),
    Requirement("dialects.recognised", "design", "A database of another protocol version than the configured one is recognised at the start, and its version is named."),
    Requirement("dialects.behaviour", "design", "A process that serves kernels of both versions handles the calls of both alike, from command to doorbell."),
    Requirement("dialects.commands", "design", "Every command of the command line selects the kernel of either protocol version by one option; `check` and `nats permissions` cover all kernels in the settings."),
    Requirement("dialects.isolated", "design", "Kernels of one process share no lease, session, cached response or memory share, even with equal ids; an unavailable kernel does not stop the other."),
    Requirement("content.search", "tool-design 3", "A search gives numbered results with title, url, date and snippet; no results is a success."),
    Requirement("content.reader", "tool-design 3", "A page gives title, url, published time, warnings and body."),
    Requirement("content.retained", "tool-design 3", "Nothing that matters in a response is lost on the way to the model; the text for the model does not exceed its limits."),
    Requirement("content.untrusted", "tool-design 3", "Web text is framed as untrusted, each item in its own frame, with a mark that no page can know."),
    Requirement("content.cursor", "tool-design 3", "A long text is truncated at a sensible place, such as a paragraph's end; a cursor, valid for its project and agent only, continues it at no cost."),
    Requirement("content.find", "tool-design 3", "The stored text of a long result can be searched at no cost, by a phrase or a question; each match has a cursor to read on from there."),
    Requirement("usage.exact", "design", "Results report their cost; each upstream request is counted in exactly one result."),
    Requirement("upstream.request", "jina-api 0-2", "Requests have the documented form, and timeouts that fit the call's remaining time."),
    Requirement("upstream.errors", "jina-api 4", "Every error status, unexpected shape or excessive size of the upstream gives a typed error."),
    Requirement("upstream.recordings", "jina-api 0-4", "Every recorded exchange gives a result or a typed error."),
    Requirement("upstream.retry", "jina-api 4", "A request is retried only if its failure permits that, and within the deadline; Retry-After is honoured."),
    Requirement("batch", "tool-design 3", "Batch items are requested in parallel under one deadline; each failure is reported per item, duplicates are requested once."),
    Requirement("url.checked", "jina-api 7", "A page address is repaired if its intent is clear; one that is invalid or internal is refused before it is billed."),
    Requirement("cache", "design", "A result from a cached response costs nothing and says so. Owners never share a cached response; identical calls in flight of one owner share a request."),
    Requirement("policy.tools", "tool-design 4", "A call outside the effective tool set, or that a hook denies, gets `tool_not_available` and never reaches the network."),
    Requirement("catalogue", "tool-design 1", "Every built-in tool has one name and schema, from which the form for each model provider is derived."),
    Requirement("definition.lint", "tool-design 2", "The linter refuses a wrong definition and lists every problem with path, line and remedy."),
    Requirement("definition.exports", "tool-design 1", "Exports hide arguments that are fixed or come from the environment, and show defaults; a call that fits an export is accepted."),
    Requirement("definition.apply", "protocol 4", "A definition gives the same row whether it is applied through the kernel's API or its database, and however often."),
    Requirement("egress.hosts", "design", "The service sends https requests on port 443 to two hosts only, with allow-listed headers, and follows no redirects."),
    Requirement("egress.tls", "design", "Certificates of the upstream are verified; SSL_CERT_FILE adds a CA."),
    Requirement("egress.proxy", "design", "Only the proxy of the settings is used; it carries a TLS tunnel that it cannot read."),
    Requirement("egress.public", "design", "With `egress.public_addresses_only` nothing is sent to an address that is not public."),
    Requirement("egress.response", "design", "Headers of a response are limited, nothing is decompressed, and unsolicited bytes reach no call."),
    Requirement("secrets.output", "protocol 10", "No key shows in a log, card, row, trace, terminal or crash, in any encoding, even if the upstream echoes it."),
    Requirement("secrets.files", "design", "A key may come from the file that NAME_FILE names."),
    Requirement("data.places", "design", "Queries and results of a call are stored only in its cards and in dead letters, and can be deleted there."),
    Requirement("terminal.text", "design", "Text from outside can neither control a terminal nor forge a line of the log."),
    Requirement("hostile.neighbour", "design", "Whatever one project sends, stores or requests, no call of another project is lost or blocked."),
    Requirement("memory.limit", "design", "Memory stays below the limit that the chart computes, however many large responses arrive; calls wait for memory."),
    Requirement("loop.answers", "design", "No response blocks the event loop for more than 50 ms at a time."),
    Requirement("fuzz.corpora", "design", "No input found by fuzzing causes an unexpected error or takes a second."),
    Requirement("run.concurrency", "design", "Calls run concurrently up to the limit, without waiting for a batch to fill."),
    Requirement("intake", "design", "Slots are shared fairly by project, then by agent: a backlog delays only its own project."),
    Requirement("intake.lease", "design", "A command that no replica has run needs no lease; one that was run needs one."),
    Requirement("intake.full", "design", "A backlog larger than max_ack_pending does not stop the delivery of commands behind it."),
    Requirement("fair.weights", "design", "Projects share slots and held commands by weight, charged with their upstream requests; an idle share goes to others."),
    Requirement("fair.projects", "design", "Projects share database connections, upstream connections and TLS handshakes fairly: none waits behind another's queue."),
    Requirement("run.replicas", "design", "Replicas on one durable share the load, and each call gets one result."),
    Requirement("run.heartbeat", "protocol 10", "A call longer than AckWait is not redelivered while it runs."),
    Requirement("run.stop", "protocol 10", "SIGTERM finishes running calls within a limited time and exits with 0."),
    Requirement("run.side_tasks", "design", "If a background task ends, the process ends, also during a drain."),
    Requirement("cancel.once", "design", "A call that is cancelled at any moment is acknowledged with one result or handed back with none."),
    Requirement("lease.owner", "design", "A redelivered command has one owner; a command with too many lost runs gets a failed result and a dead letter."),
    Requirement("chaos.nothing_lost", "design", "Under crashes, restarts, stalls and upstream failures no call is lost or doubled, and every doorbell is published."),
    Requirement("outage", "design", "PostgreSQL and NATS may be unavailable at the start or at any time: no command is fetched meanwhile, no upstream request repeated, and the log names the cause."),
    Requirement("breaker", "design", "While loads or commits fail no command is fetched; the rows of one call do not stop other calls."),
    Requirement("postgres.failures", "design", "An error of PostgreSQL is a defect of one call, an outage, or a mistake that the operator must fix; `/readyz` names the latter with its remedy."),
    Requirement("postgres.connection", "design", "The executor connects to PostgreSQL as the connection string says, also over TLS; an idle pool shrinks to one connection."),
    Requirement("privilege.grants", "protocol 6", "The printed grants suffice for every call path; everything else is refused."),
    Requirement("privilege.subjects", "design", "The printed NATS permissions suffice for every call path; a denied subject is named."),
    Requirement("nats.login", "design", "The executor connects to NATS with user, nkey or credentials file, also from a leaf node; if TLS is required, over TLS or not at all."),
    Requirement("nats.watched", "design", "A silent NATS server, or a durable that was changed, paused or deleted, is detected within seconds, and restored or reported."),
    Requirement("nats.storage", "design", "The executor's buckets and streams are created at the start with the replicas of the command stream, created again if deleted, and reported if full."),
    Requirement("deadletters", "design", "A dead letter contains its command, does not prevent others from being stored, and can be listed, shown and replayed."),
    Requirement("handover", "protocol 10", "The executor takes over another executor's durable; commands that the latter gave up are listed and can be replayed."),
    Requirement("health", "design", "/livez, /readyz and /metrics report the latest state of every dependency, under any number of other requests."),
    Requirement("reload", "design", "SIGHUP reloads the policy and mounted keys; invalid values change nothing."),
    Requirement("settings.sources", "design", "Defaults, the kernel's `config.toml`, the executor's file, environment and flags override each other in this order."),
    Requirement("settings.errors", "design", "For an invalid or ambiguous setting a command names the setting, not its value, and exits with code 2."),
    Requirement("settings.reference", "design", "Sample, reference, help and model of the settings agree."),
    Requirement("cli.ends", "design", "A closed output, Ctrl-C and an unavailable service end a command without a traceback, with the documented exit code."),
    Requirement("cli.dev", "design", "`dev` keeps the servers running, prints calls as they pass, and stops without leaving anything behind."),
    Requirement("cli.call", "design", "`call` publishes one call as the kernel does and prints the result, or why there is none."),
    Requirement("local.stack", "design", "The embedded stack leaves no process and no file behind, even after a crash; its double refuses unknown requests."),
    Requirement("local.demo", "design", "The demo shows one call of each tool and exits with 0 only if all results are as expected."),
    Requirement("performance", "design", "Per call, CPU time (relative to a minimal program), messages, statements and rows read stay within their limits."),
    Requirement("cli.check", "design", "`check` reports whether `serve` can use settings, PostgreSQL, NATS, durable, keys, stored definitions and the upstream, and changes nothing."),
    Requirement("chart.values", "design", "Every feature of the chart renders manifests that Kubernetes accepts; values are validated and described in one file."),
    Requirement("chart.restricted", "design", "Every pod of the chart satisfies the restricted pod security standard with a read-only root."),
    Requirement("chart.names", "design", "Selectors and names of objects do not change between versions of the chart."),
    Requirement("chart.refused", "design", "Values that cannot work, misspelt settings and secrets in plain values are refused with a message."),
    Requirement("metrics", "design", "Metrics are defined once for Prometheus and OTLP, have bounded labels, and say where the time and the tokens of calls go."),
    Requirement("logs.call", "design", "Every log line of a call has its ids and trace id; the last one has its cost and times."),
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
    Requirement("result.order", "protocol 7", "Results of one turn are committed one after the other, over all replicas, each once the worker has read the one before; a row that is never read holds the others for at most a second."),
    Requirement("run.turn_deadline", "protocol 7", "A result of another call of the same step may bring the turn's deadline forward; a longer call then ends before it."),
    Requirement("start.reasons", "design", "If the start must wait, the log names what is missing, where, and the remedy, once and then every minute; /readyz says the same."),
    Requirement("cli.help", "design", "Help fits a terminal of 50 columns, -h asks for it anywhere, and shells complete commands and flags."),
    Requirement("docs.run", "design", "Every command and snippet of the documents is run by a test, or listed with the reason why not."),
    Requirement("testing.runner", "design", "`openapi_tool.testing` runs a definition as `serve` does, without servers: results as the model reads them, requests as they would be sent."),
    Requirement("testing.example", "design", "The example project with its own tools passes its tests, and its tests fail for a broken definition."),
    Requirement("runner.alone", "design", "A tool call needs no turn, card or inbox: owner, definition, arguments and deadline suffice."),
)
# fmt: on
