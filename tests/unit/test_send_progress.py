"""Parts of a send: each layer of each block once, and the last ones after the commit only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiokv.engine.progress import SendPart, SendProgress

FIRST, END = 2, 14


@given(
    num_ranges=st.integers(1, 5),
    chunk_blocks=st.integers(1, 6),
    actions=st.lists(
        st.tuples(
            st.sampled_from(("layers", "commit", "part")), st.integers(0, END), st.integers(0, 6)
        ),
        max_size=60,
    ),
)
def test_parts_cover_each_layer_of_each_block_once(num_ranges, chunk_blocks, actions):
    progress = SendProgress(FIRST, num_ranges, chunk_blocks)
    committed, mark = FIRST, 0
    computed: dict[int, dict[int, int]] = {}  # range -> block -> mark of the call that named it
    sent: set[tuple[int, int]] = set()

    def take() -> bool:
        part = progress.next_part(committed)
        if part is None:
            return False
        ranges = range(part.first_range, part.end_range or num_ranges)
        blocks = range(part.first_block, part.first_block + part.num_blocks)
        assert part.num_blocks >= 1
        assert part.num_blocks * len(ranges) <= chunk_blocks * num_ranges
        assert progress.share(part) == len(ranges) / num_ranges
        assert progress.is_last(part) == (num_ranges - 1 in ranges)
        for i in ranges:
            for block in blocks:
                assert (i, block) not in sent
                sent.add((i, block))
                if part.mark:
                    assert i < num_ranges - 1
                    assert part.mark >= computed[i][block]
                else:
                    assert block < committed
        progress.begin(part)
        return True

    for action, block, count in actions:
        if action == "layers":
            mark += 1
            progress.note_computed(block, count, mark)
            for i in range(min(count, num_ranges)):
                known = computed.setdefault(i, {})
                for each in range(FIRST, block):
                    known.setdefault(each, mark)
        elif action == "commit":
            committed = max(committed, block)
        else:
            take()
    while take():
        pass
    early = {(i, b) for i, known in computed.items() for b in known if i < num_ranges - 1}
    assert sent == early | {(i, b) for i in range(num_ranges) for b in range(FIRST, committed)}


def test_layers_of_one_call_move_together():
    progress = SendProgress(0, 4, 2)
    progress.note_computed(3, 2, mark=7)
    progress.note_computed(3, 4, mark=8)
    parts = []
    while (part := progress.next_part(0)) is not None:
        progress.begin(part)
        parts.append(part)
    assert parts == [SendPart(0, 3, 0, 2, 7), SendPart(0, 3, 2, 3, 8)]
    assert progress.next_part(3) == SendPart(0, 3, 3, 4)


def test_forgotten_layers_move_with_their_blocks():
    progress = SendProgress(0, 2, 8)
    progress.note_computed(4, 1, mark=1)
    progress.forget_computed()
    assert progress.next_part(0) is None
    assert progress.next_part(4) == SendPart(0, 4)


def test_computed_ranges_with_one_mark_are_one_part():
    progress = SendProgress(FIRST, 4, chunk_blocks=3)
    progress.note_computed(FIRST + 4, 3, mark=7)
    part = progress.next_part(FIRST)
    assert part == SendPart(
        FIRST, 4, 0, 3, 7
    )  # 3 of 4 ranges: 4 blocks are as much as 3 whole ones
    progress.begin(part)
    assert progress.next_part(FIRST) is None
    assert progress.next_part(FIRST + 4) == SendPart(FIRST, 4, 3, 4)
