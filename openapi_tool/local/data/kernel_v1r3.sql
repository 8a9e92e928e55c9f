-- Protocol v1r3: what differs from the tables of v1r4, which exist already.
drop table state.turn_waiting_tools, state.agent_inbox;

create table state.agent_inbox (
    inbox_id text primary key,
    project_id text not null,
    agent_id text not null,
    message_type text not null,
    enqueue_mode text,
    correlation_id text,
    recursion_depth int not null,
    traceparent text not null,
    tracestate text,
    trace_id text,
    parent_step_id text,
    source_agent_id text,
    source_step_id text,
    payload jsonb not null default '{}',
    status text not null default 'pending',
    processed_at timestamptz,
    archived_at timestamptz,
    created_at timestamptz default now()
);
create index on state.agent_inbox (project_id, agent_id, created_at desc);
create index on state.agent_inbox using hash (correlation_id);
create unique index idx_agent_inbox_unique on state.agent_inbox (project_id, message_type, md5(correlation_id));

alter table state.execution_edges alter recursion_depth drop not null;
