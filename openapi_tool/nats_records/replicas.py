"""How many copies (replicas) NATS keeps of the streams and buckets that this program creates."""

from __future__ import annotations

import logging

from nats.js.errors import NotFoundError

from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import outage_as_unavailable
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_client.options import DurableOptions

log = logging.getLogger(__name__)


async def replica_count(client: BusClient, options: DurableOptions) -> int:
    """Return the set number of replicas, else that of the command stream, else 1. Raises Unavailable."""
    if options.nats.replicas is not None:
        return options.nats.replicas
    jetstream = client.jetstream()
    with outage_as_unavailable(client.bus.where):
        try:
            stream = await jetstream.find_stream_name_by_subject(options.filter_subject)
            return (await jetstream.stream_info(stream)).config.num_replicas or 1
        except NotFoundError:
            pass
        except Denied as denied:
            log.warning(
                "buckets and streams are created with one replica, as the command stream's number is not known: %s",
                denied,
                extra={"action": "replicas.unknown"},
            )
    return 1
