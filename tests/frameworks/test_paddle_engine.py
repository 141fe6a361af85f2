"""The engine over Paddle tensors on the CPU."""

import pytest


@pytest.mark.asyncio
async def test_blocks_return_from_host_memory(paddle):
    from tests.models.paddle_blocks import assert_blocks_return

    await assert_blocks_return("cpu")
