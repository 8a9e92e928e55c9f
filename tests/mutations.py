"""Checks that guard money, identity, secrets and loss: the change that disables each, and the test that then fails.

`make mutations` makes each change in a copy of the project and runs its test there. For other code use a mutation
tester by hand (CONTRIBUTING.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: `old`, which occurs once in `file` (below `openapi_tool/`), becomes `new`, and `test` must fail."""

    file: str
    old: str
    new: str
    test: str


MONEY = (
    Mutation(
        "quotas/charged.py",
        "record.charged.plus(record.reserved)",
        "record.charged",
        "tests/gateway/test_commands.py::test_usage_shows_requests_of_a_process_that_died_in_a_column_of_their_own",
    ),
    Mutation(
        "jina/resolved_parameters.py",
        "endpoint.check_url(parameters[name], rules)",
        "parameters[name]",
        "tests/wire/test_refusals.py::test_an_invalid_page_address_is_refused",
    ),
    Mutation(
        "tools/time_limits.py",
        " - max(0.0, age_s)",
        "",
        "tests/end_to_end/test_path.py::test_a_command_that_waited_too_long_is_not_begun",
    ),
    Mutation(
        "kernel/pipeline/existing_results.py",
        "if not earlier.is_of_this_call:",
        "if not earlier:",
        "tests/wire/test_refusals.py::test_an_id_with_the_md5_of_an_answered_one_is_refused_before_anything_is_billed",
    ),
    Mutation(
        "protocol/report.py",
        "records.reported_inbox_id is not None",
        "not records",
        "tests/wire/test_answers.py::test_a_report_without_its_card_is_detected_before_anything_is_billed",
    ),
    Mutation(
        "jina/cache.py",
        "            meter.add(in_flight.meter.take())\n",
        "",
        "tests/races/test_budgets.py::test_every_request_is_in_exactly_one_result_on_each_loop",
    ),
    Mutation(
        "jina/cache.py",
        "raise copy.copy(outcome)",
        "raise outcome",
        "tests/races/test_budgets.py::test_every_request_is_in_exactly_one_result_on_each_loop",
    ),
    Mutation(
        "jina/attempts.py",
        "        reservation.release()\n",
        "        pass\n",
        "tests/races/test_budgets.py::test_a_request_that_gets_no_permit_takes_nothing_of_the_budget",
    ),
    Mutation(
        "jina/attempts.py",
        "        if not self.permit.is_sent:\n",
        "        if False:\n",
        "tests/races/test_budgets.py::test_a_request_that_gets_no_connection_takes_nothing_of_budget_and_limit",
    ),
    Mutation(
        "jina/attempts.py",
        "            self.permit.cancelled()\n",
        "            pass\n",
        "tests/races/test_budgets.py::test_each_attempt_ends_its_permit_once_also_if_it_is_cancelled",
    ),
    Mutation(
        "kernel/pipeline/commit.py",
        "result.was_parked or await self.parked.park(wait.identity, result)",
        "result.was_parked",
        "tests/wire/test_continuation.py::test_a_paid_result_is_not_requested_again",
    ),
    Mutation(
        "kernel/pipeline/commit.py",
        "except (Exception, asyncio.CancelledError) as failure:",
        "except (Unavailable, asyncio.CancelledError) as failure:",
        "tests/wire/test_continuation.py::test_a_result_that_the_database_refuses_is_billed_once",
    ),
    Mutation(
        "jina/retries.py",
        "min(error.max_retries, options.max_retries)",
        "options.max_retries",
        "tests/wire/test_reliability.py::test_upstream_errors_are_retried_as_often_as_configured",
    ),
    Mutation(
        "engine/runner.py",
        "await self._options.authorizer.authorize(definition, call.identity, arguments)",
        "pass",
        "tests/registry/test_exports.py::test_a_denied_call_fails_without_an_upstream_request",
    ),
)
"""Nothing is billed twice, or for a call whose result the kernel refuses."""

IDENTITY = (
    Mutation(
        "protocol/v1r4.py",
        "read_identity(subject, delivery.headers)",
        'read_identity(subject, {"CG-Agent-Id": str(read_body(delivery).fields.get("agent_id", ""))}'
        " | dict(delivery.headers))",
        "tests/unit/test_protocol.py::test_the_body_never_becomes_identity",
    ),
    Mutation(
        "protocol/v1r3.py",
        'agent_id=_id(body, "agent_id")',
        'agent_id=read.id(header.AGENT) or _id(body, "agent_id")',
        "tests/unit/test_protocol.py::test_identity_headers_of_v1r4_are_ignored",
    ),
    Mutation(
        "protocol/v1r3.py",
        "isinstance(value, str) and storable_text(value) == value",
        "isinstance(value, str)",
        "tests/unit/test_protocol.py::test_an_id_that_cannot_be_stored_is_refused_instead_of_changed",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where project_id = $1 and message_type = 'tool_result' and md5(correlation_id) = md5(k.tool_call_id)",
        "where message_type = 'tool_result' and md5(correlation_id) = md5(k.tool_call_id)",
        "tests/kernel/test_store.py::test_nothing_of_another_project_is_read",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where project_id = $1 and message_type = 'tool_result'",
        "where message_type = 'tool_result'",
        "tests/wire/test_secrets.py::test_a_report_of_the_same_call_id_in_another_project_is_ignored",
    ),
    Mutation(
        "kernel/postgres/inspection.py",
        "if len(versions) == 1 and expected not in versions:",
        "if len(versions) > 1:",
        "tests/kernel/test_store.py::test_a_database_of_the_other_version_is_named",
    ),
    Mutation(
        "bootstrap.py",
        "return hmac.digest(key, namespace.encode(), hashlib.sha256)",
        "return key",
        "tests/dialects/test_dialects.py::test_equal_project_call_and_sequence_of_two_kernels_share_nothing",
    ),
    Mutation(
        "engine/runner.py",
        "return Call(identity, memory, slot, quota_namespace=self._options.quota_namespace)",
        "return Call(identity, memory, slot)",
        "tests/end_to_end/test_shared_quotas.py::test_projects_of_equal_ids_share_no_budget",
    ),
    Mutation(
        "kernel/jetstream/leases.py",
        "command.{quote(stream, safe='').replace('~', '%7E').replace('%', '=')}.{sequence}",
        "command.{sequence}",
        "tests/races/test_nats.py::test_commands_of_two_streams_with_the_same_sequence_have_separate_leases",
    ),
    Mutation(
        "kernel/jetstream/command_state.py",
        "ids = (letter.version, claimed.project_id",
        "ids = (options.version, claimed.project_id",
        "tests/dialects/test_dialects.py::test_dead_letters_with_equal_ids_are_distinguished",
    ),
    Mutation(
        "cli/dev_settings.py",
        '_OF_KERNEL = ("protocol", "quotas")',
        '_OF_KERNEL = ("protocol",)',
        "tests/dialects/test_dialects.py::test_the_executor_of_dev_uses_nothing_of_the_settings_but_the_simulated_kernel",
    ),
    Mutation(
        "protocol/records.py",
        "if tool_call_id and card.tool_call_id",
        "if not tool_call_id and card.tool_call_id",
        "tests/unit/test_protocol.py::test_the_card_of_another_call_gives_no_identity",
    ),
    Mutation(
        "protocol/identity.py",
        "reader.must_equal(PROJECT, subject.project_id)",
        "pass",
        "tests/wire/test_refusals.py::test_tenant_headers_that_differ_from_the_subject_are_refused",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "and tenant_id = $1 and deleted_at is null\n    union all",
        "and deleted_at is null\n    union all",
        "tests/wire/test_refusals.py::test_a_call_card_of_another_project_is_not_found",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where project_id = $1 and tool_name in ($7, $8)",
        "where tool_name in ($7, $8)",
        "tests/wire/test_refusals.py::test_a_tool_of_another_project_is_not_found",
    ),
    Mutation(
        "kernel/postgres/v1r4.py",
        "i.agent_id = k.agent_id and i.agent_turn_id",
        "i.agent_turn_id",
        "tests/wire/test_refusals.py::test_an_agent_that_did_not_call_is_dead_lettered",
    ),
    Mutation(
        "kernel/pipeline/existing_results.py",
        "earlier.author_id == self.actor_id and not earlier.is_deleted",
        "not earlier.is_deleted",
        "tests/wire/test_answers.py::test_an_earlier_result_of_another_author_is_left_alone",
    ),
    Mutation(
        "tools/session_identities.py",
        "orjson.dumps(owned, option=orjson.OPT_SORT_KEYS)",
        'f"{project_id}{agent_id}{session_id}".encode("utf-8", "replace")',
        "tests/unit/test_tools.py::test_separator_in_an_id_does_not_make_two_owners_equal",
    ),
    Mutation(
        "tools/session_identities.py",
        "[project_id, agent_id, session_id]",
        "[project_id, session_id]",
        "tests/unit/test_tools.py::test_identities_agree_exactly_where_owner_and_alias_do",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where project_id = $1 and tool_name in",
        "where tool_name in",
        "tests/wire/test_secrets.py::test_a_call_reads_only_rows_of_its_project",
    ),
    Mutation(
        "kernel/postgres/v1r4.py",
        "where i.project_id = $1 and i.message_type = 'command_anchor'",
        "where i.message_type = 'command_anchor'",
        "tests/wire/test_secrets.py::test_a_turn_or_edge_of_another_project_accepts_no_report",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where project_id = $1 and md5(correlation_id) = md5(k.tool_call_id)",
        "where md5(correlation_id) = md5(k.tool_call_id)",
        "tests/wire/test_secrets.py::test_a_turn_or_edge_of_another_project_accepts_no_report",
    ),
    Mutation(
        "kernel/postgres/load.py",
        "where tenant_id = $1 and md5(tool_call_id) = md5(k",
        "where md5(tool_call_id) = md5(k",
        "tests/wire/test_secrets.py::test_a_result_of_the_same_call_id_in_another_project_is_ignored",
    ),
    Mutation(
        "tools/cursors.py",
        "orjson.dumps([owner.project_id, owner.agent_id, payload.hex()])",
        "orjson.dumps([owner.project_id, payload.hex()])",
        "tests/unit/test_content.py::test_cursor_is_valid_for_its_owner_only",
    ),
    Mutation(
        "tools/cursors.py",
        "orjson.dumps([owner.project_id, owner.agent_id, payload.hex()])",
        "orjson.dumps([owner.agent_id, payload.hex()])",
        "tests/unit/test_content.py::test_cursor_is_valid_for_its_owner_only",
    ),
    Mutation(
        "engine/stored_search.py",
        "position = self._cursors.read(call.identity, cursor)",
        "position = self._cursors.read(type(call.identity)(call.identity.project_id, 'agent_0'), cursor)",
        "tests/wire/test_continuation.py::test_case_11_the_results_of_a_search_are_searched_by_the_reading_tool",
    ),
    Mutation(
        "kernel/postgres/lookups.py",
        "where card_id = $3 and tenant_id = $1 and",
        "where card_id = $3 and $1 <> '' and",
        "tests/wire/test_continuation.py::test_a_cursor_of_another_agent_or_of_no_text_is_unknown",
    ),
    Mutation(
        "jina/cache.py",
        "arguments.session_identity,",
        "",
        "tests/wire/test_answers.py::test_another_agent_or_session_does_not_share_the_cache",
    ),
    Mutation(
        "kernel/pipeline/parked_results.py",
        "if not hmac.compare_digest(seal, self._seal(identity, record)):",
        "if not seal:",
        "tests/unit/test_executor.py::test_parked_record_with_a_wrong_seal_is_ignored",
    ),
    Mutation(
        "kernel/pipeline/parked_results.py",
        "owner = [identity.project_id, ",
        "owner = [",
        "tests/unit/test_executor.py::test_parked_result_is_not_found_by_another_project_agent_or_turn",
    ),
    Mutation(
        "kernel/postgres/call_rows.py",
        "where tenant_id = $1 and tool_call_id = $2",
        "where $1::text is not null and tool_call_id = $2",
        "tests/wire/test_inspect.py::test_no_call_of_another_project_is_shown",
    ),
    Mutation(
        "nats_records/replica_statistics.py",
        "if _is_reply_subject(subject):",
        "if subject:",
        "tests/wire/test_inspect.py::test_a_replica_answers_only_below_its_own_subject",
    ),
)
"""Isolation: no caller acts as another project, agent or turn, or reads its data."""

SECRETS = (
    Mutation(
        "tools/secret_variables.py",
        "if variable not in self.allowed:",
        "if not variable:",
        "tests/unit/test_tools.py::test_a_variable_that_is_not_allowed_is_refused_with_the_setting_to_extend",
    ),
    Mutation(
        "tools/arguments.py",
        " and fold(name) not in self.parameters]",
        " and not fold(name)]",
        "tests/wire/test_secrets.py::test_a_definition_may_use_a_key_only_as_key",
    ),
    Mutation(
        "tools/secret_variables.py",
        "        if is_executors_own(variable):\n",
        "        if not variable:\n",
        "tests/unit/test_secrets.py::test_a_variable_of_the_executor_itself_is_never_handed_out",
    ),
    Mutation(
        "tools/declaration.py",
        "isinstance(value, str) and value in BASE_URLS",
        "isinstance(value, str) and value.startswith(tuple(BASE_URLS))",
        "tests/unit/test_tools.py::test_unusable_definition_names_the_place",
    ),
    Mutation(
        "jina/egress.py",
        'url.scheme != "https" or ',
        "",
        "tests/unit/test_http.py::test_no_other_destination_passes_the_egress",
    ),
    Mutation(
        "jina/egress.py",
        ' or headers[names.index(b"host")][1].decode("latin-1") not in ALLOWED_HOSTS',
        "",
        "tests/unit/test_http.py::test_no_other_header_passes_the_egress",
    ),
    Mutation(
        "jina/transport.py",
        "allow_redirects=False",
        "allow_redirects=True",
        "tests/unit/test_http.py::test_the_connection_layer_follows_no_redirect_and_keeps_no_cookie",
    ),
    Mutation(
        "jina/egress.py",
        "context.minimum_version = ssl.TLSVersion.TLSv1_2",
        "context.check_hostname, context.verify_mode = False, ssl.CERT_NONE",
        "tests/unit/test_http.py::test_a_certificate_of_an_unknown_authority_is_refused",
    ),
    Mutation(
        "nats_client/client.py",
        'if not (info.get("tls_required") or info.get("tls_available")):',
        "if not info:",
        "tests/wire/test_bus.py::test_nothing_is_sent_to_a_server_without_tls",
    ),
    Mutation(
        "jina/egress.py",
        'if _CONTROL.search(b"".join([value for _, value in headers])):',
        "if not headers:",
        "tests/unit/test_egress.py::test_no_header_with_a_line_break_leaves",
    ),
    Mutation(
        "jina/connections.py",
        'self._factory = cast("partial[ResponseHandler]", connection)',
        "del connection",
        "tests/unit/test_http.py::test_unsolicited_response_reaches_no_later_request",
    ),
    Mutation(
        "jina/response.py",
        "elif _may_hold_secret(output, redactor):",
        "elif False:",
        "tests/hostile/test_inline_bounds.py::test_what_may_be_a_secret_is_masked_in_a_worker",
    ),
    Mutation(
        "telemetry/redact.py",
        "[_Span(*found.span()) for pattern in patterns for found in pattern.finditer(text)]",
        "[]",
        "tests/unit/test_telemetry.py::test_a_secret_is_masked_in_message_arguments_fields_and_traceback",
    ),
    Mutation(
        "telemetry/otlp_spans.py",
        '"exception.message": self._masked(str(error))',
        '"exception.message": str(error)',
        "tests/unit/test_telemetry.py::test_a_span_shows_no_secret_in_name_attributes_events_and_status",
    ),
    Mutation(
        "kernel/jetstream/dead_letter_records.py",
        "return without_secrets(letter, redactor)",
        "return letter",
        "tests/canary/test_canary.py::test_no_secret_is_in_any_output_and_no_result_confirms_a_guess_whatever_goes_wrong",
    ),
    Mutation(
        "telemetry/redact.py",
        "self._spans(text[: chars + self._reach])",
        "self._spans(text[:chars])",
        "tests/unit/test_content.py::test_cut_field_contains_no_half_of_a_secret",
    ),
    Mutation(
        "jina/request.py",
        "secrets = tuple(resolved.secrets.values())",
        "secrets = ()",
        "tests/unit/test_content.py::test_only_secrets_sent_with_the_call_are_masked_in_its_response",
    ),
    Mutation(
        "jina/client.py",
        "context.call.secrets_sent.update((api_key, *request.secrets))",
        "context.call.secrets_sent.update(request.secrets)",
        "tests/unit/test_secrets.py::test_the_keys_of_all_attempts_and_items_of_a_call_are_masked",
    ),
    Mutation(
        "jina/upstream_connection.py",
        "max(1, len(self._unparsed) - 1)",
        "len(self._unparsed)",
        "tests/unit/test_http.py::test_surplus_data_in_the_same_read_reaches_no_later_request",
    ),
    Mutation(
        "quotas/keys.py",
        "        elif use in self._suspected:",
        "        elif False:",
        "tests/unit/test_limits.py::test_a_key_that_serves_other_calls_between_two_refusals_is_not_blocked",
    ),
    Mutation(
        "telemetry/logs.py",
        "handler.addFilter(ProjectLimit())",
        "pass",
        "tests/unit/test_telemetry.py::test_the_handler_of_the_process_limits_lines",
    ),
    Mutation(
        "telemetry/logs.py",
        "sys.unraisablehook = lambda crash: log_crash(crash.exc_value)",
        "pass",
        "tests/unit/test_secrets.py::test_however_the_process_crashes_its_output_shows_no_secret",
    ),
    Mutation(
        "telemetry/recent_warnings.py",
        "self._redactor.head(text, _MAX_CHARS)",
        "text[:_MAX_CHARS]",
        "tests/unit/test_telemetry.py::test_recent_warnings_are_grouped_by_action_masked_and_truncated",
    ),
    Mutation(
        "telemetry/upstream_waits.py",
        "        if not host.is_waited_for(attempt.began):\n",
        "        if True:\n",
        "tests/unit/test_telemetry.py::test_a_host_is_silent_from_its_first_request_until_it_answers_one",
    ),
    Mutation(
        "reloading.py",
        'RECENT_WARNINGS.solve("reload.failed")',
        "pass",
        "tests/end_to_end/test_outages.py::test_top_shows_a_failed_reload_until_one_succeeds",
    ),
    Mutation(
        "jina/attempts.py",
        "self._refused_keys.record_success(attempt.key_use)",
        "pass",
        "tests/wire/test_answers.py::test_a_key_that_the_upstream_accepts_again_is_listed_as_recovered",
    ),
    Mutation(
        "telemetry/health_server.py",
        "    if snapshots is not None:\n",
        "    if snapshots is None:\n",
        "tests/unit/test_telemetry.py::test_the_page_is_off_by_default",
    ),
    Mutation(
        "telemetry/health_server.py",
        "may_be_browser and not is_internal(name) and name not in allowed",
        "not may_be_browser and name not in allowed",
        "tests/unit/test_telemetry.py::test_only_livez_is_served_under_public_host_names",
    ),
    Mutation(
        "telemetry/status_page.py",
        "made.textContent = text",
        "made.innerHTML = text",
        "tests/unit/test_telemetry.py::test_the_page_has_a_strict_policy_and_its_numbers_no_payload",
    ),
)
"""A key goes to two hosts over verified TLS, and nowhere else."""

LOSS = (
    Mutation(
        "kernel/jetstream/command_runner.py",
        "await self._dead_letters.record(held.delivery, reason, text)",
        "pass",
        "tests/wire/test_refusals.py::test_a_command_whose_result_cannot_reach_a_turn_is_dead_lettered",
    ),
    Mutation(
        "kernel/postgres/v1r4.py",
        "and exists (",
        "or exists (",
        "tests/kernel/test_store.py::test_a_commit_whose_turn_or_edge_was_deleted_writes_no_card",
    ),
    Mutation(
        "kernel/pipeline/existing_results.py",
        "await self.order.write(wait, write, partial(self.kernel.is_turn_busy, report))",
        "pass",
        "tests/wire/test_answers.py::test_our_earlier_unreported_result_is_reported_with_a_doorbell",
    ),
    Mutation(
        "kernel/postgres/commit.py",
        "coalesce(current_setting('openapi_tool.turn_locked', true), '') = 'true'",
        "pg_try_advisory_xact_lock(:lock)",
        "tests/kernel/test_result_order.py::"
        "test_a_result_is_not_written_if_the_lock_became_free_only_after_it_was_tried",
    ),
    Mutation(
        "kernel/postgres/store.py",
        "if thorough or shape != inspected:",
        "if thorough:",
        "tests/kernel/test_inspection.py::"
        "test_damage_of_the_tables_is_found_by_the_next_ping_and_cleared_by_an_inspection_only",
    ),
    Mutation(
        "kernel/postgres/commit.py",
        "    on conflict (tenant_id, md5(tool_call_id)) where tool_call_id is not null and metadata ->> 'type' = "
        "'tool.result'\n",
        "    on conflict\n",
        "tests/kernel/test_inspection.py::test_a_commit_is_refused_without_the_index_that_allows_one_result_per_call",
    ),
    Mutation(
        "kernel/postgres/v1r4.py",
        "and (status in ('pending', 'processing') or",
        "and (status in ('pending') or",
        "tests/kernel/test_result_order.py::test_nothing_is_written_while_another_result_of_the_turn_is_unread",
    ),
    Mutation(
        "kernel/pipeline/result_order.py",
        "min(wait.ends_at, progress_at + MAX_STALL_S)",
        "min(wait.ends_at, progress_at + 60)",
        "tests/unit/test_executor.py::test_a_row_that_is_never_read_delays_all_results_of_its_turn_by_a_second",
    ),
    Mutation(
        "kernel/jetstream/dead_letters.py",
        'if cause == "unavailable" and delivery.number < _DISCARD_FROM_DELIVERY:',
        'if cause == "unavailable":',
        "tests/wire/test_dead_letters.py::test_dead_letter_is_discarded_after_five_deliveries_during_an_outage",
    ),
    Mutation(
        "kernel/jetstream/heartbeats.py",
        "await held.message.in_progress()",
        "pass",
        "tests/wire/test_reliability.py::test_a_long_call_is_sent_once_and_delivered_once",
    ),
    Mutation(
        "kernel/jetstream/command_runner.py",
        "await shielded(self._settle(held, settlement), _SETTLE_TIMEOUT_S)",
        "await self._settle(held, settlement)",
        "tests/races/test_cancellation.py::test_a_call_in_an_outage_cancelled_at_any_await_is_handed_back_once",
    ),
    Mutation(
        "engine/runner.py",
        "    raise_if_cancelled(cause)\n",
        "",
        "tests/races/test_cancellation.py::test_a_call_cancelled_at_any_await_is_acknowledged_or_handed_back",
    ),
    Mutation(
        "kernel/postgres/commit.py",
        "identity.tool_call_id,\n        turn.",
        "report.inbox_id,\n        turn.",
        "tests/wire/test_reliability.py::test_two_commands_of_one_call_give_one_result",
    ),
    Mutation(
        "kernel/jetstream/leases.py",
        "return None if is_held_by_other else self._owned(record)",
        "return self._owned(record)",
        "tests/wire/test_reliability.py::test_a_redelivered_command_has_one_owner_until_its_lease_ends",
    ),
    Mutation(
        "state/nats_kv.py",
        "except KeyWrongLastSequenceError:\n                return None",
        "except KeyWrongLastSequenceError:\n                return revision + 1",
        "tests/wire/test_reliability.py::test_only_one_of_many_concurrent_executors_gets_a_lease",
    ),
    Mutation(
        "kernel/pipeline/commit.py",
        "stop=stop_after_delay(park_after_s)",
        "stop=stop_after_delay(0)",
        "tests/wire/test_reliability.py::test_a_result_waits_for_an_unavailable_database",
    ),
    Mutation(
        "kernel/jetstream/durable_settings.py",
        "                await self._redeliver_skipped(durable)\n",
        "                pass\n",
        "tests/wire/test_storage.py::test_a_durable_whose_filter_was_wrong_redelivers_what_it_may_have_skipped",
    ),
    Mutation(
        "kernel/jetstream/streams.py",
        "    if floor > 0:\n",
        "    if floor < 0:\n",
        "tests/wire/test_storage.py::test_a_recreated_durable_starts_after_the_ack_floor_of_the_old_one",
    ),
    Mutation(
        "kernel/pipeline/doorbell_sender.py",
        "                raise\n",
        "                pass\n",
        "tests/races/test_nats.py::test_a_command_whose_doorbell_fails_is_handed_back_until_no_worker_waits",
    ),
    Mutation(
        "kernel/pipeline/doorbell_sender.py",
        "        except NotStored:\n            raise\n",
        "        except NotStored:\n            published = False\n",
        "tests/races/test_nats.py::test_while_no_message_is_stored_a_doorbell_is_never_given_up",
    ),
    Mutation(
        "kernel/jetstream/doorbell_publisher.py",
        "            if why := self._why_not_stored(error):\n",
        "            if (why := self._why_not_stored(error)) and not isinstance(error, _PERMANENT):\n",
        "tests/races/test_nats.py::test_while_no_message_is_stored_a_doorbell_is_never_given_up",
    ),
    Mutation(
        "kernel/jetstream/hand_back.py",
        "or self._unrun_deliveries.pop(metadata.sequence.stream, 0) + 1 == number",
        "or self._unrun_deliveries.pop(metadata.sequence.stream, 0) > 0",
        "tests/races/test_intake.py::test_command_handed_back_and_delivered_elsewhere_in_between_needs_a_lease",
    ),
    Mutation(
        "kernel/jetstream/consumer.py",
        "                self._intake.mark_stale()  #",
        "                pass  #",
        "tests/races/test_intake.py::test_command_that_waited_through_a_stall_or_a_disconnect_needs_a_lease",
    ),
    Mutation(
        "kernel/jetstream/consumer.py",
        "            self._intake.hand_back_waiting()\n        while",
        "            pass\n        while",
        "tests/races/test_intake.py::test_waiting_commands_are_handed_back_while_calls_cannot_be_finished",
    ),
    Mutation(
        "kernel/jetstream/fair_queue.py",
        "            flow.start = max(flow.start, self._virtual_time)\n",
        "",
        "tests/unit/test_bus.py::test_a_project_that_was_idle_gets_no_credit_for_it",
    ),
    Mutation(
        "kernel/jetstream/slots.py",
        "self._max_of_project if self._several_projects else self._limit",
        "self._limit",
        "tests/races/test_intake.py::test_calls_of_one_project_that_never_end_leave_slots_for_others",
    ),
    Mutation(
        "quotas/account.py",
        "return bool(self._granted)",
        "return True",
        "tests/races/test_budgets.py::test_sessions_that_are_refused_from_the_start_leave_no_record",
    ),
    Mutation(
        "kernel/jetstream/look_ahead.py",
        "while batch := self._wanted():",
        "while batch := 0:",
        "tests/wire/test_intake.py::test_a_command_behind_the_backlog_of_another_project_runs_next",
    ),
)
"""Every command gets one result or one dead letter, even if a process dies."""


"""Alerts, `inspect`, `top` and the page name the cause, and show no other project's call and no secret."""

GATEWAY = (
    Mutation(
        "gateway/stored.py",
        "_digest((project, *parts), 20)",
        "_digest(parts[-1:], 20)",
        "tests/gateway/test_mcp.py::test_a_paid_result_that_nobody_took_is_found_by_an_identical_call_of_the_same_caller",
    ),
    Mutation(
        "gateway/calls.py",
        "if may_store(definition, arguments):",
        "if definition:",
        "tests/gateway/test_mcp.py::test_a_call_that_is_not_to_be_tracked_leaves_no_text",
    ),
    Mutation(
        "gateway/calls.py",
        '            self._begin(self._stop(running, task), f"stop {running.id}")\n',
        "",
        "tests/gateway/test_mcp.py::test_a_cancelled_call_stops_its_request_frees_its_slot_and_is_charged",
    ),
    Mutation(
        "gateway/calls.py",
        "if not running.has_received_all:",
        "if running:",
        "tests/gateway/test_mcp.py::test_a_call_that_is_cancelled_after_its_response_arrived_keeps_its_result",
    ),
    Mutation(
        "gateway/calls.py",
        "return caller.may_call(tool.name) and permitted(caller.project_id, tool.definition.built_in)",
        "return caller.may_call(tool.name)",
        "tests/gateway/test_mcp.py::test_a_caller_sees_and_calls_what_its_project_may_use",
    ),
    Mutation(
        "mcp/stdio.py",
        "                await self._unanswered.acquire()\n",
        "",
        "tests/gateway/test_stdio.py::test_no_further_request_is_read_while_too_many_are_unanswered",
    ),
    Mutation(
        "mcp/stdio.py",
        "self._source.readline(MAX_LINE_BYTES + 1)",
        "self._source.readline()",
        "tests/gateway/test_stdio.py::test_a_line_that_never_ends_takes_bounded_memory",
    ),
    Mutation(
        "state/sqlite_file.py",
        "path.chmod(0o600)",
        "path.chmod(0o644)",
        "tests/gateway/test_state_file.py::test_a_file_that_others_may_read_becomes_private",
    ),
    Mutation(
        "state/sqlite_file.py",
        'connection.execute("PRAGMA secure_delete = ON")',
        'connection.execute("PRAGMA secure_delete = OFF")',
        "tests/gateway/test_state_file.py::test_an_expired_text_leaves_no_byte",
    ),
    Mutation(
        "gateway/tokens.py",
        "if known is None or not known.record.usable(self._clock()):",
        "if known is None:",
        "tests/gateway/test_tokens.py::test_an_expired_token_is_refused",
    ),
    Mutation(
        "gateway/token_record.py",
        "right = hmac.compare_digest(_hash(secret), token.hash if token else _NO_HASH)",
        "right = hmac.compare_digest(_NO_HASH, _NO_HASH)",
        "tests/gateway/test_tokens.py::test_only_the_whole_right_token_is_accepted",
    ),
    Mutation(
        "gateway/tokens.py",
        "record = None if self._is_outdated(source) else source.tokens[token_id]",
        "record = source.tokens[token_id]",
        "tests/gateway/test_nats_state.py::test_tokens_are_refused_once_they_could_not_be_read_for_too_long",
    ),
    Mutation(
        "state/nats_stream.py",
        "if not counts.messages or seen >= ",
        "if True or seen >= ",
        "tests/gateway/test_nats_state.py::test_a_server_that_lags_behind_accepts_no_revoked_token",
    ),
    Mutation(
        "gateway/quotas.py",
        "limits, accounts = state.limits, state.budgets",
        "limits, accounts = state.limits, state.tokens",
        "tests/end_to_end/test_two_doors.py::test_both_doors_share_a_budget",
    ),
    Mutation(
        "gateway/jwts.py",
        "audience=self.options.audience or self.options.resource,",
        'audience=jwt.decode(text, options={"verify_signature": False}).get("aud"),',
        "tests/gateway/test_oauth.py::test_another_jwt_is_refused",
    ),
    Mutation(
        "gateway/jwts.py",
        "algorithms=[public_key.algorithm],",
        'algorithms=["RS256", "RS512", "ES256"],',
        "tests/gateway/test_oauth.py::test_another_jwt_is_refused",
    ),
    Mutation(
        "gateway/issuer_keys.py",
        "self._clock() - self._tried_at >= RETRY_S",
        "self._clock() > self._tried_at",
        "tests/gateway/test_oauth.py::test_keys_are_read_again_for_a_new_one_but_not_for_each_unknown_one",
    ),
    Mutation(
        "jina/document.py",
        'if request.method != "GET" or request.url != self._url or request.url.scheme != "https":',
        'if request.url.scheme != "https":',
        "tests/gateway/test_oauth.py::test_only_the_document_is_requested_and_its_size_is_bounded",
    ),
    Mutation(
        "jina/document.py",
        "if len(found) > MAX_BYTES:",
        "if not MAX_BYTES:",
        "tests/gateway/test_oauth.py::test_only_the_document_is_requested_and_its_size_is_bounded",
    ),
    Mutation(
        "http/access.py",
        "        self._check_host(headers)\n",
        "",
        "tests/gateway/test_access.py::test_a_foreign_host_name_is_refused",
    ),
    Mutation(
        "http/access.py",
        "        self._check_origin(headers)\n",
        "",
        "tests/gateway/test_access.py::test_a_web_page_of_a_foreign_origin_may_not_call",
    ),
    Mutation(
        "gateway/calls.py",
        "if tool is None or not self._offers(caller, tool):",
        "if tool is None:",
        "tests/gateway/test_mcp.py::test_a_caller_sees_and_calls_what_its_project_may_use",
    ),
    Mutation(
        "http/tools.py",
        "if key is None or not self._gateway.may_call(caller, name):",
        "if key is None:",
        "tests/gateway/test_http.py::test_a_stored_result_is_only_for_a_caller_who_may_call_its_tool",
    ),
    Mutation(
        "http/senders.py",
        "lambda: tokens.find(text) is None and not tokens.outdated",
        "lambda: tokens.outdated",
        "tests/gateway/test_http.py::test_running_requests_of_a_revoked_token_end",
    ),
    Mutation(
        "http/senders.py",
        "lambda: time.time() > ends",
        "lambda: False",
        "tests/gateway/test_oauth.py::test_a_stream_ends_after_its_jwt",
    ),
    Mutation(
        "http/request_shares.py",
        "if self._requests_of_project[project] >= self._max_of_project:",
        "if not project:",
        "tests/gateway/test_access.py::test_the_tokens_of_one_project_leave_connections_and_bodies_to_others",
    ),
    Mutation(
        "http/request_shares.py",
        "or self._bytes_of_project[project] + size > MAX_BYTES * MAX_SHARE",
        "",
        "tests/gateway/test_access.py::test_the_tokens_of_one_project_leave_connections_and_bodies_to_others",
    ),
    Mutation(
        "http/request_shares.py",
        "            counted_bytes += size\n",
        "",
        "tests/gateway/test_access.py::test_the_bodies_of_one_token_take_bounded_memory_and_leave_room_for_others",
    ),
    Mutation(
        "http/senders.py",
        "if agent != token.agent and not token.any_agent:",
        "if not agent:",
        "tests/gateway/test_http.py::test_a_token_names_agents_only_if_it_may",
    ),
    Mutation(
        "http/senders.py",
        "if has_token and self._failed_tries.add(address):",
        "if not address:",
        "tests/gateway/test_http.py::test_failed_tries_are_limited_and_a_right_token_is_still_taken",
    ),
    Mutation(
        "http/senders.py",
        "self._open_to_all = self._open_to_all and not len(self._tokens)",
        "self._open_to_all = self._open_to_all",
        "tests/gateway/test_http.py::test_with_a_token_nobody_is_served_without_one",
    ),
    Mutation(
        "http/request_shares.py",
        "if self._requests_of_token[token] >= self._max_of_token:",
        "if not token:",
        "tests/gateway/test_access.py::test_one_token_has_a_bounded_number_of_requests",
    ),
    Mutation(
        "http/connections.py",
        "        if not self._client_reads:\n            return\n",
        "",
        "tests/gateway/test_access.py::test_a_client_that_reads_nothing_is_cut_off",
    ),
    Mutation(
        "http/connections.py",
        "if not self.in_request and not self._in_head:",
        "if not self.in_request:",
        "tests/gateway/test_access.py::test_a_slow_client_is_cut_off_and_others_are_served",
    ),
    Mutation(
        "http/calls.py",
        "return_when=asyncio.FIRST_COMPLETED",
        "timeout=15",
        "tests/gateway/test_http.py::test_a_client_that_is_gone_stops_its_upstream_request_and_its_cost_is_settled",
    ),
    Mutation(
        "state/sqlite.py",
        "SELECT bucket, {_OWNER} FROM texts GROUP BY 1, 2",
        "SELECT bucket, '' FROM texts GROUP BY 1, 2",
        "tests/gateway/test_state_file.py::test_texts_of_one_project_do_not_take_the_place_of_anothers",
    ),
    Mutation(
        "http/idempotency.py",
        "if stored_digest != self._call_digest.encode():",
        "if not stored_digest:",
        "tests/gateway/test_http.py::test_a_request_that_is_repeated_with_its_key_is_charged_once",
    ),
    Mutation(
        "cli/gateway_serve.py",
        "if not _is_loopback(host):",
        "if not host:",
        "tests/gateway/test_gateway_process.py::test_without_tokens_it_refuses_to_listen_elsewhere_and_says_why",
    ),
    Mutation(
        "gateway/calls.py",
        "if self._slots.waiting_of(project) >= free_places:",
        "if free_places <= 0:",
        "tests/gateway/test_mcp_http.py::test_floods_of_several_projects_leave_places_for_another",
    ),
    Mutation(
        "gateway/calls.py",
        "take(caller.project_id, caller.agent_id)",
        "take(caller.project_id)",
        "tests/gateway/test_mcp_http.py::test_agents_of_one_project_take_turns_for_the_slots_of_calls",
    ),
)
"""A gateway's results belong to their callers, its file to its user; no client takes unbounded memory."""

MUTATIONS = (*MONEY, *IDENTITY, *SECRETS, *LOSS, *GATEWAY)
