"""Selection of mutated files and of the tests that are likely to fail, the likeliest first."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from tests.mutation.native_mutants import native_mutants
from tests.mutation.python_mutants import PythonMutants

if TYPE_CHECKING:
    from pathlib import Path

    from tests.mutation.mutant import Mutant

PYTHON_FILES = (
    "aiokv/scheduler/*.py",
    "aiokv/engine/*.py",
    "aiokv/layout/*.py",
    "aiokv/worker/**/*.py",
    "aiokv/ranks/*.py",
    "aiokv/sync/*.py",
    "aiokv/stores/**/*.py",
    "aiokv/peers/*.py",
    "aiokv/wire/*.py",
    "aiokv/events/*.py",
    "aiokv/connectors/**/*.py",
)
NATIVE_FILES = (
    "native/src/index/*.cpp",
    "native/src/store/*.cpp",
    "native/src/digest/*.cpp",
    "native/src/io/*.cpp",
    "native/src/io/*.hpp",
)
LEFT_ALONE = (
    *("cuda.py", "cuda_handles.py", "cuda_ipc.py", "cuda_numa.py", "cuda_state.py"),  # need a GPU
    "uring_abi.hpp",  # constants of the kernel
)
# Their tests need these packages; without them, these files are left alone, too.
PACKAGES = {"aiokv/connectors/vllm/": "vllm", "aiokv/connectors/sglang": "sglang"}

# Tests of ``native/tests``, by the longest prefix of a path.
NATIVE_TESTS: dict[str, tuple[str, ...]] = {
    "native/src/index": (
        "components",
        "events",
        "eviction",
        "external",
        "host_state",
        "hot_prefixes",
        "index",
        "items",
        "lease_table",
        "promises",
        "rates",
        "run_pool",
        "state",
        "stores",
        "swap",
        "walk",
        "window",
    ),
    "native/src/store": ("store",),
    "native/src/digest": ("digest",),
    "native/src/io": ("io",),
}

# Modules of one subject each.
ENGINES = (
    "peers/test_engines_cancelled.py",
    "peers/test_engines_ends.py",
    "peers/test_engines_prompts.py",
    "peers/test_engines_refusals.py",
)
EXTERNAL = (
    "integration/test_external_device.py",
    "integration/test_external_ids.py",
    "integration/test_external_failures.py",
    "integration/test_external_control.py",
    "integration/test_external_groups.py",
    "integration/test_external_retired.py",
)

# By the longest prefix of a path; EVERYTHING runs for each mutant that survives these tests.
LIKELY: dict[str, tuple[str, ...]] = {
    "aiokv/engine/lease.py": (
        "integration/test_engine.py",
        "integration/test_counts.py",
        "integration/test_usage.py",
        "integration/test_preemption.py",
        "integration/test_fork.py",
        "integration/test_state.py",
        "integration/test_windows.py",
        "integration/test_failures.py",
        "integration/test_expiry.py",
    ),
    "aiokv/scheduler": (
        "unit/test_effects.py",
        "unit/test_waiting_lines.py",
        "unit/test_step_clock.py",
        "property/test_scheduler_walks.py",
        "unit/test_config.py",
        "integration/test_engine.py",
        "integration/test_dispatcher.py",
        "integration/test_lines.py",
        "integration/test_coalescing.py",
        "integration/test_write_policies.py",
        "integration/test_quota.py",
        "integration/test_pins.py",
        "integration/test_preemption.py",
        "integration/test_control.py",
    ),
    "aiokv/scheduler/line.py": ("unit/test_line.py",),
    "aiokv/scheduler/waits.py": ("unit/test_waits.py", "unit/test_waiting_lines.py"),
    "aiokv/scheduler/sharded.py": ("unit/test_sharded.py",),
    "aiokv/scheduler/preemption.py": (
        "integration/test_preemption.py",
        "property/test_scheduler_walks.py",
        "integration/test_coalescing.py",
        "ranks/test_loss.py",
    ),
    "aiokv/scheduler/releases.py": (
        "unit/test_waiting_lines.py",
        "integration/test_computing.py",
        "property/test_scheduler_walks.py",
        "integration/test_lines.py",
    ),
    "aiokv/scheduler/external.py": (
        *EXTERNAL,
        "property/test_external_engine_walks.py",
    ),
    "aiokv/scheduler/peers.py": (*ENGINES, "peers/test_layers.py"),
    "aiokv/scheduler/pins.py": ("unit/test_waiting_lines.py", "integration/test_pins.py"),
    "aiokv/scheduler/quota.py": (
        "unit/test_waiting_lines.py",
        "integration/test_quota.py",
        "integration/test_lines.py",
    ),
    "aiokv/scheduler/pending.py": (
        "integration/test_coalescing.py",
        "integration/test_lines.py",
        "unit/test_waiting_lines.py",
        "unit/test_core_pending.py",
    ),
    "aiokv/engine": (
        "integration/test_engine.py",
        "integration/test_control.py",
        "integration/test_cancellation.py",
        "integration/test_coalescing.py",
        "integration/test_pins.py",
        "integration/test_quota.py",
        "integration/test_sleep.py",
        "integration/test_preemption.py",
        "integration/test_batches.py",
        "integration/test_open_step.py",
        "integration/test_verify.py",
        "integration/test_write_policies.py",
    ),
    "aiokv/engine/boundaries.py": (
        "unit/test_boundaries.py",
        "integration/test_stored_state.py",
        "integration/test_stored_windows.py",
    ),
    "aiokv/engine/comparison.py": ("unit/test_comparison.py", "integration/test_stores.py"),
    "aiokv/engine/expiries.py": ("integration/test_expiry.py",),
    "aiokv/engine/fetch_line.py": ("unit/test_fetch_line.py", "integration/test_stores.py"),
    "aiokv/engine/fetches.py": ("integration/test_stores.py", "integration/test_stored_state.py"),
    "aiokv/engine/ticket_transfers.py": ("unit/test_ticket_transfers.py", *ENGINES),
    "aiokv/engine/peers.py": (
        "integration/test_observers.py",
        *ENGINES,
        "peers/test_layers.py",
        "peers/test_cancelled_sends.py",
        "peers/test_peer_states.py",
    ),
    "aiokv/engine/observers.py": ("integration/test_observers.py",),
    "aiokv/engine/trace_writer.py": ("integration/test_record_trace.py",),
    "aiokv/engine/events.py": ("integration/test_kv_events.py",),
    "aiokv/engine/progress.py": ("unit/test_send_progress.py", "peers/test_layers.py"),
    "aiokv/engine/receiving.py": ENGINES,
    "aiokv/engine/sending.py": (*ENGINES, "peers/test_layers.py"),
    "aiokv/engine/pins.py": ("integration/test_pins.py", "integration/test_multimodal.py"),
    "aiokv/engine/sleeping.py": ("integration/test_sleep.py",),
    "aiokv/engine/batches.py": ("integration/test_batches.py",),
    "aiokv/engine/control.py": (
        "integration/test_control.py",
        "drill/test_control_and_failures.py",
    ),
    "aiokv/engine/open_step.py": ("integration/test_open_step.py",),
    "aiokv/engine/recovery.py": ("ranks/test_loss.py", "ranks/test_onload.py"),
    "aiokv/engine/leases.py": (
        "integration/test_engine.py",
        "integration/test_cancellation.py",
        "integration/test_expiry.py",
        "integration/test_shutdown.py",
    ),
    "aiokv/engine/granting.py": (
        "integration/test_engine.py",
        "integration/test_cancellation.py",
        "integration/test_lines.py",
        "integration/test_coalescing.py",
        "integration/test_usage.py",
    ),
    "aiokv/engine/dispatcher.py": (
        "integration/test_dispatcher.py",
        "integration/test_lines.py",
        "integration/test_interrupts.py",
        "integration/test_coalescing.py",
        "integration/test_cancellation.py",
        "integration/test_engine.py",
    ),
    "aiokv/engine/lifecycle.py": (
        "integration/test_shutdown.py",
        "integration/test_misuse.py",
        "integration/test_forked_process.py",
        "integration/test_engine.py",
    ),
    "aiokv/engine/lifetime.py": ("integration/test_misuse.py", "integration/test_engine.py"),
    "aiokv/engine/computing.py": ("integration/test_computing.py",),
    "aiokv/worker": (
        "unit/test_controller.py",
        "unit/test_transfers.py",
        "unit/test_poller.py",
        "unit/test_layers.py",
        "unit/test_regions.py",
        "unit/test_cpu_device.py",
        "drill/test_transfers.py",
        "integration/test_engine.py",
        "integration/test_verify.py",
        "integration/test_state.py",
        "integration/test_host_state.py",
        "integration/test_host_windows.py",
        "integration/test_sleep.py",
    ),
    "aiokv/worker/layers.py": ("unit/test_layers.py", "unit/test_controller.py"),
    "aiokv/worker/plan_table.py": ("unit/test_plan_table.py", "unit/test_controller.py"),
    "aiokv/worker/poller.py": ("unit/test_poller.py", "unit/test_controller.py"),
    "aiokv/worker/watches.py": ("unit/test_poller.py", "unit/test_controller.py"),
    "aiokv/layout": (
        "unit/test_regions.py",
        "unit/test_block_layout.py",
        "unit/test_peer_mapping.py",
    ),
    "aiokv/layout/regions.py": (
        "unit/test_regions.py",
        "integration/test_cache_shapes.py",
    ),
    "aiokv/layout/host_block.py": ("integration/test_cache_shapes.py", "unit/test_store_set.py"),
    "aiokv/worker/checksums.py": ("integration/test_verify.py",),
    "aiokv/worker/device/cpu.py": ("unit/test_cpu_device.py", "unit/test_controller.py"),
    "aiokv/ranks": ("ranks",),
    "aiokv/wire": (
        "peers/test_frames.py",
        "peers/test_wire.py",
        "peers/test_wire_authentication.py",
        "peers/test_wire_liveness.py",
        "peers/test_connections.py",
        "peers/test_tcp.py",
        "ranks/test_protocol.py",
        "ranks/test_peers.py",
        "ranks/test_listener.py",
        "ranks/test_loss.py",
    ),
    "aiokv/ranks/reduce.py": ("ranks/test_reduce.py", "ranks/test_onload.py"),
    "aiokv/sync": ("sync",),
    "aiokv/stores": (
        "unit/test_store_guard.py",
        "unit/test_store_set.py",
        "unit/test_store_waits.py",
        "unit/test_store_cost.py",
        "unit/test_store_threads.py",
        "unit/test_store_proof.py",
        "unit/test_store_urls.py",
        "unit/test_options.py",
        "unit/test_fingerprint.py",
        "integration/test_stores.py",
        "integration/test_stored_state.py",
        "integration/test_stored_windows.py",
        "integration/test_boundary_fetches.py",
        "property/test_failing_stores.py",
        "stores/test_inspection.py",
        "stores/test_probes.py",
        "ranks/test_stores.py",
    ),
    "aiokv/stores/cost.py": ("unit/test_store_cost.py", "unit/test_store_guard.py"),
    "aiokv/stores/inspection.py": ("stores/test_inspection.py", "stores/test_store_cli_engine.py"),
    "aiokv/stores/s3.py": ("stores/test_s3.py",),
    "aiokv/stores/directory": (
        "unit/test_directory_quota.py",
        "stores/test_directory.py",
        "stores/test_inspection.py",
        "stores/test_store_cli_engine.py",
    ),
    "aiokv/stores/disk": (
        "unit/test_disk_io.py",
        "unit/test_flaky_io.py",
        "stores/test_disk.py",
        "stores/test_disk_damage.py",
        "stores/test_disk_failures.py",
        "stores/test_inspection.py",
        "stores/test_disk_power_cut.py",
        "stores/test_probes.py",
        "stores/test_disk_crash.py",
    ),
    "aiokv/stores/mooncake": ("stores/test_mooncake.py",),
    "aiokv/stores/redis": ("stores/test_redis.py", "stores/test_redis_cluster.py"),
    "aiokv/peers": (
        "unit/test_peer_ticket.py",
        "unit/test_peer_options.py",
        "unit/test_block_layout.py",
        "unit/test_peer_mapping.py",
        "unit/test_peer_transfers.py",
        "unit/test_peer_transfer_blocks.py",
        "unit/test_peer_transfer_groups.py",
        "unit/test_prompt_digests.py",
        "peers/test_frames.py",
        "peers/test_ring.py",
        "peers/test_handshake.py",
        "peers/test_connections.py",
        "peers/test_wire.py",
        "peers/test_wire_authentication.py",
        "peers/test_wire_liveness.py",
        "peers/test_receiver.py",
        "peers/test_send_queue.py",
        "peers/test_incoming.py",
        "peers/test_assembly.py",
        "peers/test_acceptance.py",
        "peers/test_tcp.py",
        "peers/test_fragment_work.py",
        "peers/test_peer_states.py",
        "peers/test_peer_transfers.py",
        "peers/test_cancelled_sends.py",
        "peers/test_cancelled_requests.py",
        "peers/test_layer_workers.py",
        "peers/test_one_sided.py",
        "peers/test_one_sided_workers.py",
        "peers/test_device_slots.py",
        "peers/test_peer_layouts.py",
        "peers/test_sides.py",
        *ENGINES,
        "peers/test_layers.py",
        "property/test_peer_layouts.py",
        "property/test_failing_peers.py",
    ),
    "aiokv/peers/mooncake.py": ("peers/test_mooncake_peers.py",),
    "aiokv/peers/nixl.py": ("peers/test_nixl.py",),
    "aiokv/peers/ticket.py": (
        "unit/test_peer_ticket.py",
        "peers/test_peer_transfers.py",
        *ENGINES,
    ),
    "aiokv/layout/block_layout.py": ("unit/test_block_layout.py", "peers/test_peer_layouts.py"),
    "aiokv/layout/mapping.py": (
        "unit/test_peer_mapping.py",
        "property/test_peer_layouts.py",
        "peers/test_peer_layouts.py",
    ),
    "aiokv/peers/mappings.py": (
        "unit/test_peer_mapping.py",
        "property/test_peer_layouts.py",
        "peers/test_peer_layouts.py",
    ),
    "aiokv/events": ("integration/test_kv_events.py", "integration/test_zmq_publisher.py"),
    "aiokv/connectors": (
        "connectors/test_pages.py",
        "connectors/test_sglang.py",
        "connectors/sglang/test_pools.py",
    ),
    "aiokv/connectors/vllm": (
        "connectors/vllm/test_blocks.py",
        "connectors/vllm/test_link.py",
        "connectors/vllm/test_prefills.py",
        "connectors/vllm/test_retired.py",
        "connectors/vllm/test_worker.py",
        "connectors/vllm/test_serving.py",
        "connectors/vllm/test_loads.py",
        "connectors/vllm/test_failures.py",
        "connectors/vllm/test_resets.py",
        "connectors/vllm/test_settings.py",
        "connectors/vllm/test_random_serving.py",
    ),
    "aiokv/connectors/fastdeploy": (
        "connectors/test_fastdeploy_manager.py",
        "connectors/test_fastdeploy_room.py",
        "connectors/test_fastdeploy_looks.py",
        "connectors/test_fastdeploy_matches.py",
        "connectors/test_fastdeploy_prefix.py",
        "connectors/test_fastdeploy_stores.py",
        "connectors/test_fastdeploy_patch.py",
        "connectors/test_fastdeploy_controller.py",
        "connectors/test_fastdeploy.py",
    ),
    "native/src/digest": (
        "unit/test_trailers.py",
        "unit/test_digests.py",
        "unit/test_store_proof.py",
        "integration/test_verify.py",
    ),
    "native/src/io": (
        "unit/test_disk_io.py",
        "unit/test_flaky_io.py",
        "stores/test_disk.py",
        "stores/test_disk_failures.py",
    ),
    "native/src/store": (
        "stores/test_disk.py",
        "stores/test_disk_damage.py",
        "stores/test_disk_power_cut.py",
    ),
    "native/src/index/external_blocks.cpp": (
        *EXTERNAL,
        "property/test_external_blocks_machine.py",
        "property/test_external_engine_walks.py",
    ),
    "native/src/index/external_groups.cpp": (
        "integration/test_external_groups.py",
        "property/test_external_engine_walks.py",
    ),
    "native/src/index/external_saves.cpp": (
        *EXTERNAL,
        "property/test_external_blocks_machine.py",
        "property/test_external_engine_walks.py",
    ),
    "native/src/index": (
        "property/test_core_state_machine.py",
        "property/test_swap_state_machine.py",
        "property/test_state_slots.py",
        "property/test_window_groups.py",
        "integration/test_host_state.py",
        "integration/test_host_windows.py",
        "property",
        "unit/test_core_pending.py",
        "unit/test_core_preempted.py",
        "unit/test_saving_ahead.py",
        "integration/test_computing.py",
        "integration/test_fork.py",
        "integration/test_counts.py",
        "integration/test_multimodal.py",
        "integration/test_write_policies.py",
        "integration/test_usage.py",
        "integration/test_batches.py",
        "unit/test_config.py",
        "drill",
    ),
}
EVERYTHING = (
    *("unit", "drill", "property", "integration", "stores", "ranks", "peers", "sync"),
    "connectors",
)
# Tests of the whole command line: slow, and other tests detect the same mutants.
TOO_SLOW = (
    "integration/test_demo.py",
    "integration/test_demo_failures.py",
    "ranks/test_chaos.py",
    "ranks/test_processes.py",
)


def likely_tests(path: str) -> tuple[str, ...]:
    return _longest(LIKELY, path)


def native_tests(path: str) -> tuple[str, ...]:
    return _longest(NATIVE_TESTS, path)


def _longest(by_prefix: dict[str, tuple[str, ...]], path: str) -> tuple[str, ...]:
    return by_prefix[max((prefix for prefix in by_prefix if path.startswith(prefix)), key=len)]


def python_mutants_of(root: Path) -> list[Mutant]:
    return [
        mutant
        for path in _files(root, PYTHON_FILES)
        for mutant in PythonMutants(path, (root / path).read_bytes()).all()
    ]


def native_mutants_of(root: Path) -> list[Mutant]:
    return [
        mutant
        for path in _files(root, NATIVE_FILES)
        for mutant in native_mutants(path, (root / path).read_bytes())
    ]


def _files(root: Path, patterns: tuple[str, ...]) -> list[str]:
    found = {path for pattern in patterns for path in root.glob(pattern)}
    paths = sorted(str(path.relative_to(root)) for path in found if path.name not in LEFT_ALONE)
    return [path for path in paths if _has_package(path)]


def _has_package(path: str) -> bool:
    """Return True if the tests of a file can run in this environment."""
    needed = (name for prefix, name in PACKAGES.items() if path.startswith(prefix))
    return all(importlib.util.find_spec(name) for name in needed)
