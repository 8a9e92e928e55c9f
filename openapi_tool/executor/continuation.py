"""Results that are too long for a model: a first part now, the whole text as a card, later parts by cursor."""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.executor.ports import Kernel
from openapi_tool.protocol.cards import ArtifactCard, artifact_card
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.protocol.records import Artifact, CardRecord
from openapi_tool.steps import Steps, Turns
from openapi_tool.tools.arguments import Arguments, fold
from openapi_tool.tools.cursor import Cursors, Position, unknown_cursor
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import listed, short
from openapi_tool.tools.result import BLOCK_GAP, Shown, ToolOutput
from openapi_tool.tools.schema import schema_problems, visible_schema
from openapi_tool.tools.truncation import NOTE_CHARS, Cut, boundary, cut, kept_text, later_part, text_chars

CURSOR = "cursor"
_SUBJECTS = ("url", "targeturl")


@dataclass(frozen=True, slots=True)
class ContinuationOptions:
    """How many characters a model is shown at once, how long the whole text is kept (seconds), who writes it."""

    max_chars: int
    ttl_s: int
    actor_id: str


def asked_cursor(definition: ToolDefinition, arguments: Arguments) -> str | None:
    """The cursor of a call that goes on with an earlier result, None for any other. Raises BadRequest."""
    cursor = arguments.values.get(CURSOR)
    if cursor is None or not _has_cursor(definition):
        return None
    problems = [] if isinstance(cursor, str) else [f"{CURSOR}: must be the text that an earlier result named"]
    problems += [
        f"{short(name)}: cannot be given together with {CURSOR}; give one of them"
        for name in sorted(arguments.by_model)
        if fold(name) in _SUBJECTS and arguments.values[name] is not None
    ]
    if problems:
        problems = listed(problems)
        raise BadRequest("Correct these and call again: " + "; ".join(problems), detail={"problems": problems})
    return str(cursor)


def _has_cursor(definition: ToolDefinition) -> bool:
    return CURSOR in definition.tool.arguments.model_fields


def _takes_only_cursor(definition: ToolDefinition) -> bool:
    """Whether a model may call this tool with a cursor and nothing else."""
    schema = visible_schema(definition.parameters, definition.hidden)
    return _has_cursor(definition) and not schema_problems(schema, {CURSOR: "a" * 44})


class Continuation:
    """Cuts what is too long, and finds the next part again, for its owner only."""

    def __init__(
        self, kernel: Kernel, cursors: Cursors, options: ContinuationOptions, turns: Turns | None = None
    ) -> None:
        self._turns = turns or Turns()
        self._kernel = kernel
        self._cursors = cursors
        self._options = options

    async def show(
        self, output: ToolOutput, definition: ToolDefinition, identity: CallIdentity, call_card: CardRecord | None
    ) -> tuple[Shown, ArtifactCard | None]:
        """What a model gets of an output; with the card of the whole text, where that is more and may be kept."""
        steps = self._show(output, definition, identity, call_card)
        return await self._turns.run(steps, text_chars(output.blocks))

    def _show(
        self, output: ToolOutput, definition: ToolDefinition, identity: CallIdentity, call_card: CardRecord | None
    ) -> Steps[tuple[Shown, ArtifactCard | None]]:
        blocks = []
        for block in output.blocks:
            blocks.append(storable_text(block))
            yield
        part = cut(blocks, self._options.max_chars, whole=output.whole)
        if part is None:
            return Shown(BLOCK_GAP.join(blocks)), None
        chars = text_chars(blocks)
        missing = f"{_left(part)}: {chars - part.end:,} of {chars:,} characters."
        if not output.keep:
            note = f"[{missing} They are not kept; ask for less.]"
            return Shown(f"{part.shown}\n\n{note}", truncated=True), None
        kept = yield from kept_text(blocks)
        card = artifact_card(self._options.actor_id, identity, call_card, kept, self._options.ttl_s)
        artifact = Artifact(card.card_id, kept.chars, kept.sha256, "")
        return self._part(part.shown, missing, artifact, part.end, definition, identity), card

    async def go_on(self, cursor: str, definition: ToolDefinition, identity: CallIdentity) -> tuple[ToolOutput, Shown]:
        """The next part, as much as a model is shown at once; costs nothing. Raises NotFound, Unavailable."""
        position = self._cursors.read(identity.project_id, identity.agent_id, cursor)
        room = self._options.max_chars - NOTE_CHARS
        artifact = await self._kernel.artifact(
            identity.project_id, identity.agent_id, position.card_id, position.start, room + 1
        )
        if artifact is None or not artifact.text:
            raise unknown_cursor()
        size = boundary(artifact.text, room)
        end = position.start + size
        where = f"[Continued: characters {position.start + 1:,} to {end:,} of {artifact.chars:,}.]"
        shown = f"{where}\n{later_part(artifact.text[:size])}"
        missing = f"The rest is left out: {artifact.chars - end:,} of {artifact.chars:,} characters."
        state = {"card_id": artifact.card_id, "from": position.start, "to": end, "chars": artifact.chars}
        return ToolOutput((shown,), state), self._part(shown, missing, artifact, end, definition, identity)

    def _part(
        self, text: str, missing: str, artifact: Artifact, end: int, definition: ToolDefinition, identity: CallIdentity
    ) -> Shown:
        reference = {"card_id": artifact.card_id, "chars": artifact.chars, "sha256": artifact.sha256}
        if end >= artifact.chars:
            return Shown(text, artifact_ref=reference)
        cursor = self._cursors.issue(identity.project_id, identity.agent_id, Position(artifact.card_id, end))
        who = "call this tool again" if _takes_only_cursor(definition) else "call a page reading tool that takes one"
        note = f'[{missing} To go on at no cost, {who}, with only cursor "{cursor}".]'
        return Shown(f"{text}\n\n{note}", truncated=True, artifact_ref=reference, next_cursor=cursor)


def _left(part: Cut) -> str:
    if not part.blocks_left:
        return "The rest is left out"
    return (
        f"The last {part.blocks_left} results are left out" if part.blocks_left > 1 else "The last result is left out"
    )
