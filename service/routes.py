"""Routes that count what never reaches their handlers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import Counter


def counting_route(invalid: Counter) -> type[APIRoute]:
    """Routes that count requests whose path, query or body is not what the schema says."""

    class CountingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def counted(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestValidationError:
                    invalid.inc()
                    raise

            return counted

    return CountingRoute
