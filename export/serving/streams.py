"""Server-sent events."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

Item = TypeVar("Item")


class EventStream(StreamingResponse):
    """A response of server-sent events.

    `content` yields complete events, as `event` returns them. It is closed when the request is
    cancelled, for example because the client disconnected.
    """

    def __init__(self, content: AsyncGenerator[bytes, None]):
        super().__init__(
            content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self.content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.content):
            await self.stream_response(send)


async def wait_for_first(
    items: AsyncGenerator[Item, None], default: Item | None = None
) -> AsyncGenerator[Item, None]:
    """Wait for the first of `items` and return an iterator over all of them. If there are none, it
    is the `default`, unless that is None.

    Until then the request can be rejected with a status.
    """
    first = await anext(items, default)

    async def all_items() -> AsyncGenerator[Item, None]:
        async with aclosing(items):
            if first is not None:
                yield first
            async for item in items:
                yield item

    return all_items()


def event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(content)


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
