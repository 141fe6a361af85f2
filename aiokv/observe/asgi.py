"""Stand-in."""

from typing import Any


def asgi(engine: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    return app
