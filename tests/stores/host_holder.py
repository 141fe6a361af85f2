"""A process that pins the slots of keys 1 and 2 and reserves slots for 3 and 4, until it is killed.

``python -m tests.stores.host_holder PATH``, with the socket of the service.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiokv.stores.host.link import attach
from aiokv.stores.host.messages import Load, Save
from tests.stores.conformance import Blocks, keys_of


async def _main() -> None:
    link, _ = await attach(Path(sys.argv[1]), Blocks().memory)
    await link.ask(Load(number=0, keys=keys_of([1, 2])))
    await link.ask(Save(number=1, keys=keys_of([3, 4])))
    print("holds", flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(_main())
