"""Messages between the scheduler half and the worker halves, carried by vLLM with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks on their way from host memory to vLLM's blocks.

    Attributes:
        request_id: the request that waits for them.
        transfer_ids: ids of the transfers; empty when nothing moves any more.
        block_ids: vLLM's blocks that are written, in order of the positions.
        in_step: True if the step that carries this message computes with the blocks; False if the
            request waits until the worker reports it.
        failed: True if no transfer could be started.
    """

    request_id: str
    transfer_ids: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    in_step: bool = False
    failed: bool = False


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Message to the workers.

    Attributes:
        step: number of the step, from 1.
        loads: loads that have begun since the last step.
        waits: requests whose loads have begun; the step computes with their blocks.
        is_empty: True if the step computes nothing. vLLM makes such a step after requests have
            ended, and then none until it gets a request.
    """

    step: int
    loads: list[Load] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    is_empty: bool = False


@dataclass(slots=True)
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message from the workers: they have computed a step.

    Attributes:
        step: number of the step.
    """

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the message of two ranks, which have computed the same step."""
        if not isinstance(other, StepOutcome) or other.step != self.step:
            raise ValueError(f"ranks report different steps: {self} and {other}")
        return self
