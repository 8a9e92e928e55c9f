"""What this executor promises, each promise with its source and its tests.

A promise without a test and a test for an unknown promise both fail the suite (test_promises.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Promise:
    """`source` is a section of the protocol, of the tool design, of the API facts, or our own `design`."""

    id: str
    source: str
    text: str


def requirement(*ids: str) -> Callable[[Test], Test]:
    """Say which promises a test keeps; read by test_promises.py from the source."""
    del ids
    return lambda test: test


# fmt: off
PROMISES = (
    Promise("subject.grammar", "protocol 1", "A command's subject has at least eight tokens and its suffix may hold dots."),
    Promise("subject.stream", "protocol 1", "A command stream is made only where none captures our subjects, in the kernel's shape."),
    Promise("subject.durable", "protocol 1", "The durable is shared by all replicas and held to our settings explicitly."),
    Promise("command.body", "protocol 2", "The body's required fields are checked, unknown ones ignored."),
    Promise("command.forbidden", "protocol 2", "Inline data and control fields in the body are violations that are answered."),
    Promise("identity.headers", "protocol 2", "Identity comes from headers and subject only, and every malformed header is named."),
    Promise("identity.recovery", "protocol 2", "What headers lack is taken from the tool.call card, never from the body."),
    Promise("identity.unanswerable", "protocol 2", "A command without agent, turn or tool call id is dead-lettered at once."),
    Promise("identity.spelling", "protocol 2", "Headers are read in any case and written in the kernel's exact spelling."),
    Promise("card.read", "protocol 3", "A call card that is missing, of another type, class, project or call is a typed failure."),
    Promise("card.raw", "protocol 3", "Arguments that were no JSON object are refused with a message that says so."),
    Promise("card.result", "protocol 3", "A result card holds exactly the fields that readers accept, with the lineage copied verbatim."),
    Promise("card.storable", "protocol 10", "No upstream text can make jsonb refuse the result card."),
    Promise("tool.after_execution", "protocol 4", "The definition's after_execution wins over the command's."),
    Promise("options.order", "protocol 5", "Arguments are prepared in the protocol's order."),
    Promise("options.defaults", "protocol 5", "A default applies only where the model gave nothing; null counts as given."),
    Promise("options.fixed", "protocol 5", "A fixed argument always overwrites, whatever name the model finds for it."),
    Promise("options.envs", "protocol 5", "An envs argument is read from the environment and travels in a body, never in a URL."),
    Promise("options.api_key", "protocol 5", "An envs argument api_key is the bearer key and falls back to auth_env."),
    Promise("options.allowed_env", "protocol 5", "A definition may name only variables that the operator allows."),
    Promise("options.service_envs", "protocol 5", "The service's own envs win over the definition's."),
    Promise("options.templates", "protocol 5", "Templates hold only known ids, are rendered in one pass, and never in the model's values."),
    Promise("options.worker_left", "protocol 5", "What the worker has already applied gives the same arguments."),
    Promise("options.identity", "protocol 5", "Identity arguments never go upstream."),
    Promise("options.jina", "protocol 5", "options.jina and its legacy spelling decide host, form and key, and nothing but the two hosts."),
    Promise("options.schema", "tool-design 2", "All problems of a call's arguments are named in one answer."),
    Promise("options.result_format", "tool-design 3", "A result is the text itself, or one object where the definition says so."),
    Promise("answer.example", "protocol 9", "The recorded example calls are answered with the same rows, card and doorbell."),
    Promise("answer.atomic", "protocol 6", "Card, inbox row and edge are written together or not at all."),
    Promise("answer.precheck", "protocol 6", "A report that would be refused is refused before anything is billed."),
    Promise("answer.trace", "protocol 6", "The report is a child span in the waiting turn's trace; a foreign trace becomes a link."),
    Promise("answer.earlier", "protocol 6", "An earlier result short-circuits: ours is rung or reported again, another's is left alone."),
    Promise("answer.doorbell", "protocol 6", "The doorbell goes to the roster's worker with the kernel's headers; failing, it undoes nothing."),
    Promise("answer.database_clock", "protocol 6", "next_retry_at is the database's clock."),
    Promise("answer.time", "protocol 7", "Past the worker's patience the answer is a timeout, and nothing is begun that cannot end in time."),
    Promise("answer.errors", "protocol 8", "A failure is a typed error whose message says what to do instead."),
    Promise("content.search", "tool-design 3", "A search is numbered results with title, url, date and snippet; none found is a success."),
    Promise("content.reader", "tool-design 3", "A page is title, url, published time, warnings and body."),
    Promise("content.untrusted", "tool-design 3", "Web text is framed as untrusted and look-alikes of the frame are defused."),
    Promise("upstream.request", "jina-api 0-2", "Requests are POSTs with a JSON body and Accept application/json exactly; GET definitions keep their form."),
    Promise("upstream.parameters", "jina-api 6.3", "Only known parameters are sent, the model sets only its own, refused ones are refused."),
    Promise("upstream.errors", "jina-api 4", "Every refusal of the upstream is a typed error with a sentence for the model."),
    Promise("upstream.shapes", "jina-api 3", "HTML, invalid JSON, wrong shapes and errors inside a 200 are typed errors."),
    Promise("upstream.size", "protocol 10", "An answer over the size limit is response_too_large."),
    Promise("wire.body_no_json", "protocol 2", "A body that is not JSON is answered with bad_request under the subject's suffix."),
    Promise("wire.body_no_object", "protocol 2", "A body that is not a JSON object is answered with bad_request under the subject's suffix."),
    Promise("wire.body_too_large", "protocol 2", "A body over 64 KiB is not parsed and answered with bad_request."),
    Promise("wire.body_field", "protocol 2", "A missing required field is answered with bad_request naming it."),
    Promise("wire.body_unknown_field", "protocol 2", "Unknown business fields of the body are ignored."),
    Promise("wire.after_execution", "protocol 2", "An after_execution that is neither suspend nor terminate is answered with bad_request, suspend being the base."),
    Promise("wire.inline_data", "protocol 2", "Each inline data field is answered with bad_request naming it."),
    Promise("wire.control_field", "protocol 2", "Each control field in the body is answered with bad_request naming it."),
    Promise("wire.heartbeat_name", "protocol 3", "No result carries a function name that workers take for heartbeats."),
    Promise("wire.header_agent", "protocol 2", "A missing CG-Agent-Id is a violation, answered to the author of the call card."),
    Promise("wire.header_call", "protocol 2", "A missing CG-Tool-Call-Id is a violation, answered under the call card's id."),
    Promise("wire.header_turn", "protocol 2", "A missing CG-Turn-Id is taken from the call card."),
    Promise("wire.header_epoch", "protocol 2", "A malformed CG-Turn-Epoch is a violation; a missing one is the target row's."),
    Promise("wire.header_depth", "protocol 2", "A malformed CG-Recursion-Depth is a violation; the depth that counts is the target row's."),
    Promise("wire.header_tenant", "protocol 2", "Project and channel headers must equal the subject's tokens where present."),
    Promise("wire.header_case", "protocol 2", "Headers are read in any case and written in the kernel's spelling."),
    Promise("wire.traceparent", "protocol 2", "A malformed traceparent is a violation, answered in the turn's own trace."),
    Promise("wire.trace_foreign", "protocol 6", "A foreign or missing trace leaves report and doorbell in the turn's own trace."),
    Promise("wire.tracestate", "protocol 6", "The tracestate passes through to row and doorbell."),
    Promise("wire.nobody", "protocol 2", "A command that nobody could be answered for is terminated and dead-lettered on its first delivery."),
    Promise("wire.turn_stale", "protocol 6", "A report to a turn that no row knows is refused: dead letter, acknowledged, no card."),
    Promise("wire.epoch_stale", "protocol 6", "A report to another epoch of the turn is refused."),
    Promise("wire.agent_foreign", "protocol 6", "A report for an agent that did not make the call is refused."),
    Promise("wire.edge_missing", "protocol 6", "A report without its request edge is refused."),
    Promise("wire.depth_mismatch", "protocol 6", "A report whose depth is not the request edge's is refused."),
    Promise("wire.depth_limit", "protocol 6", "A report at depth 20 is refused, at depth 19 accepted."),
    Promise("wire.roster_missing", "protocol 6", "An agent missing from the roster gets its result; the impossible doorbell is logged."),
    Promise("wire.doorbell_impossible", "protocol 6", "A doorbell that cannot be rung undoes nothing."),
    Promise("wire.card_unknown", "protocol 3", "A call card that does not exist or is deleted is answered with not_found."),
    Promise("wire.card_foreign", "protocol 3", "A call card of another project does not exist."),
    Promise("wire.card_type", "protocol 3", "A card that is no tool.call is answered with bad_request."),
    Promise("wire.card_class", "protocol 3", "A card that does not hold ToolCallContent is answered with bad_request."),
    Promise("wire.card_call", "protocol 3", "The card of another call is answered with bad_request, and lends no lineage."),
    Promise("wire.arguments_raw", "protocol 3", "Arguments of the form _raw are answered with bad_request saying so."),
    Promise("wire.arguments_object", "protocol 3", "Arguments that are no object are answered with bad_request."),
    Promise("wire.arguments_limits", "protocol 5", "Arguments beyond the limits of size, depth and number are refused before anything walks through them."),
    Promise("wire.arguments_schema", "protocol 5", "Arguments that do not fit the definition's parameters are answered with every problem at once."),
    Promise("wire.tool_unknown", "protocol 4", "An unknown tool is answered with not_found."),
    Promise("wire.tool_foreign", "protocol 4", "A tool of another project does not exist."),
    Promise("wire.definition", "protocol 5", "A definition that is not usable is answered with tool_misconfigured naming where."),
    Promise("wire.target_checked", "jina-api 1.2", "A page address that the reader would refuse is refused before it is billed."),
    Promise("wire.earlier_reported", "protocol 6", "Our earlier result that is reported is rung for again and acknowledged."),
    Promise("wire.earlier_unreported", "protocol 6", "Our earlier result that is not reported is reported, rung for and acknowledged."),
    Promise("wire.earlier_foreign", "protocol 6", "Another author's earlier result is left alone: nothing committed, acknowledged."),
    Promise("wire.earlier_at_commit", "protocol 6", "The same decision is taken again when the commit meets another result."),
    Promise("wire.report_rolls_back", "protocol 6", "A report that is refused at the commit takes its card back."),
    Promise("options.cg_control", "protocol 5", "__cg_control never comes from the upstream or from the model."),
    Promise("session.scoped", "protocol 5", "A session's identity is a keyed hash of project, agent and alias: unequal owners never meet, replicas agree."),
    Promise("session.alias", "protocol 5", "session_id from arguments, defaults or fixed is an alias, the weightiest counts."),
    Promise("session.hidden", "protocol 5", "Neither alias nor identity of a session goes upstream, into a row, or into a log at INFO."),
    Promise("session.shared_key", "protocol 5", "Without a configured key, the first replica makes one and all share it through NATS."),
    Promise("bus.login", "design", "NATS is reached by user and password, token, nkey seed or credentials file."),
    Promise("bus.tls", "design", "NATS is reached over TLS with a private CA and a client certificate, held to the server's name."),
    Promise("wire.any_command", "protocol 10", "Any headers, any body and any state of the database give one answer or one dead letter, and no exception."),
    Promise("wire.body_no_identity", "protocol 2", "No field of the body ever becomes identity, whatever headers are missing."),
    Promise("cli.dev", "design", "`dev` keeps a stack with an executor running, shows calls as they pass, and stops without a trace; --keep keeps the data."),
    Promise("cli.call", "design", "`call` places one call as the kernel does and prints the answer, or why there is none."),
    Promise("cli.call.foreign", "design", "`call` writes nothing to a database that `dev` did not make unless told so."),
    Promise("postgres.tls", "design", "TLS to PostgreSQL with a CA and a client certificate, as the connection string says; what cannot work is named at start."),
    Promise("deadletters.cli", "design", "Dead letters are listed, shown and sent again; nothing is sent without --yes."),
    Promise("handover", "protocol 10", "Another executor's durable is taken over, and what it gave up on is listed and can be sent again."),
    Promise("retry.table", "jina-api 4", "A request is asked again exactly where its failure says so, and at most so often."),
    Promise("retry.after", "jina-api 4", "Retry-After is honoured in both forms, and a wait past the deadline is not begun."),
    Promise("lease.owner", "design", "A redelivered command has one owner, whose lease expires when it is no longer renewed."),
    Promise("lease.lost", "design", "Runs that never ended are counted, those that were handed back are not."),
    Promise("attempts.exhausted", "design", "A command that lost too many executors gets a failed result and a dead letter."),
    Promise("call.twice", "protocol 6", "Two commands of one call give one result."),
    Promise("outage.postgres", "design", "Without the database nothing is fetched; afterwards everything is answered, asked once."),
    Promise("outage.nats", "design", "NATS may restart while a call runs: it is answered, asked once."),
    Promise("outage.backends", "design", "Database connections that are ended lose nothing and ask nothing again."),
    Promise("outage.result_waits", "design", "A result that is ready waits for the database instead of being asked for again."),
    Promise("outage.doorbell", "design", "A doorbell that NATS did not take is rung on the next delivery."),
    Promise("health.server", "design", "/livez, /readyz and /metrics say how every part was last found."),
    Promise("memory.budget", "design", "Answers that are read wait for room in one budget, first come, first served."),
    Promise("egress.hosts", "design", "Only https on 443 of the two hosts leaves, with allow-listed headers, without redirects or proxies."),
    Promise("egress.tls", "design", "Certificates are verified; SSL_CERT_FILE adds a CA."),
    Promise("egress.local", "design", "Only the embedded stack can point connects at loopback."),
    Promise("secrets.output", "protocol 10", "No key shows in a log, card or inbox row, even if the upstream echoes it."),
    Promise("run.concurrency", "design", "Calls run side by side up to the limit, room is taken before a message is fetched."),
    Promise("run.single", "protocol 10", "A single call never waits for a batch to fill."),
    Promise("run.replicas", "design", "Two replicas on one durable share the load and answer each call once."),
    Promise("run.heartbeat", "protocol 10", "A call longer than AckWait is not delivered again while it runs."),
    Promise("run.stop", "protocol 10", "SIGTERM finishes running calls and exits with 0."),
    Promise("settings.sources", "design", "Defaults, file, environment and flags override each other in this order."),
    Promise("settings.errors", "design", "A wrong configuration is named in full, without values, with exit code 2."),
    Promise("settings.kernel_file", "design", "The kernel's own config.toml is a source below ours; its other keys are left alone."),
    Promise("settings.banner", "design", "At the start the effective configuration is shown, credentials masked, keys by name."),
    Promise("settings.reference", "design", "Sample, reference, help and models of the settings agree."),
    Promise("local.stack", "design", "The embedded stack stops without leaving a process or a file, even after a crash."),
    Promise("local.double", "design", "The double checks host, key, Accept and body, and never answers an unknown request with a page."),
    Promise("local.demo", "design", "The demo shows one call of each tool and exits with 0 only if both succeeded."),
)
# fmt: on
