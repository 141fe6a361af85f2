"""Delivery of reports to the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.plan import TransferReport


def deliver(on_report: Callable[[TransferReport], None], report: TransferReport) -> None:
    """Call ``on_report``; the exception handler of the loop gets its exception."""
    try:
        on_report(report)
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {
                "message": f"aiokv: on_report raised for transfer {report.transfer_id}",
                "exception": error,
            }
        )
