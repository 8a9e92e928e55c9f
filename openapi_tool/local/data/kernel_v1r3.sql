-- The kernel's tables that tool calls touch, protocol v1r3 (the kernel owns the real ones).
create schema resource;
create schema state;

create table public.projects (
    project_id text primary key,
    title text not null,
    status text not null default 'active' check (status in ('active', 'inactive', 'archived')),
    owner_id text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
);

create table resource.project_agents (
    project_id text not null,
    agent_id text not null,
    profile_box_id uuid not null,
    worker_target text not null,
    tags jsonb not null default '[]',
    display_name text,
    owner_agent_id text,
    status text not null default 'active',
    metadata jsonb not null default '{}',
    created_at timestamptz default now(),
    last_seen_at timestamptz,
    primary key (project_id, agent_id)
);

create table resource.tools (
    project_id text not null,
    tool_name text not null,
    description text,
    parameters jsonb not null default '{}',
    target_subject text,
    after_execution text,
    options jsonb not null default '{}',
    primary key (project_id, tool_name)
);

create table cards (
    card_id text primary key,
    tenant_id text not null,
    content jsonb,
    tool_calls jsonb,
    tool_call_id text,
    ttl_seconds int,
    expires_at timestamptz,
    deleted_at timestamptz,
    metadata jsonb,
    created_at timestamptz default now()
);
create index on cards (expires_at);
create index on cards (tenant_id);
create index on cards using hash (tool_call_id);
create index on cards ((metadata ->> 'agent_turn_id'), (metadata ->> 'step_id'), (metadata ->> 'type'));
create unique index uniq_cards_tool_result_call on cards (tenant_id, md5(tool_call_id))
where tool_call_id is not null and metadata ->> 'type' = 'tool.result';

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

create table state.execution_edges (
    edge_id text primary key,
    project_id text not null,
    channel_id text,
    primitive text not null,
    edge_phase text not null,
    source_agent_id text,
    source_agent_turn_id text,
    source_step_id text,
    target_agent_id text,
    target_agent_turn_id text,
    correlation_id text,
    enqueue_mode text,
    recursion_depth int check (recursion_depth >= 0),
    trace_id text,
    parent_step_id text,
    metadata jsonb not null default '{}',
    created_at timestamptz default now()
);
create index on state.execution_edges using hash (correlation_id);
create index on state.execution_edges (project_id, trace_id);
create unique index idx_execution_edges_unique
on state.execution_edges (project_id, md5(correlation_id), primitive, edge_phase);
