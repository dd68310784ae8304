"""Requests whose replica died before it answered, sent to another one: around the application of Ray's proxy."""

import logging

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .settings import Settings

ATTEMPTS = 3  # a request that ends whoever reads it must not end them all
MOST = Settings.max_body  # bytes of a body that are kept for the next attempt
LOGGER = logging.getLogger("ray.serve")  # of the proxy
REFUSAL = {"error": "the replicas that had the request stopped: try again later"}


class Request:
    """One request, which can be read again from its start as long as nothing of an answer was sent."""

    def __init__(self, receive: Receive, send: Send):
        self.is_answered = False
        self.is_gone = False  # its client
        self.is_kept = True  # all that was read
        self._receive = receive
        self._send = send
        self._messages: list[Message] = []
        self._bytes = 0
        self._next = 0

    async def receive(self) -> Message:
        if self._next < len(self._messages):
            self._next += 1
            return self._messages[self._next - 1]
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
        else:
            self._keep(message)
        return message

    def _keep(self, message: Message) -> None:
        self._bytes += len(message.get("body", b""))
        self.is_kept = self._bytes <= MOST
        if self.is_kept:
            self._messages.append(message)
        else:
            self._messages.clear()
        self._next = len(self._messages)

    def rewind(self) -> None:
        self._next = 0

    async def send(self, message: Message) -> None:
        self.is_answered = True
        await self._send(message)


class SentAgain:
    """An ASGI application around `app`, which returns without an answer if the replica died. Requests change nothing that is
    stored, so that one may be read twice; none is answered twice. An answer that has begun stays without its end, by which
    clients see that."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(receive, send)
        for _ in range(ATTEMPTS):
            await self.app(dict(scope), request.receive, request.send)  # which changes its path
            if request.is_answered or request.is_gone:
                return
            if not request.is_kept:
                break
            LOGGER.warning("a replica stopped with the request %s %s, which is sent again", scope["method"], scope["path"])
            request.rewind()
        await JSONResponse(REFUSAL, 503, {"Retry-After": "1"})(scope, receive, send)
