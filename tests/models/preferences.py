"""Naive model of the order of eviction with shares, retentions and demotions: lists of blocks.

One tier, eviction by recency, one request at a time. A block is (context, tokens of its prefix).
"""

from __future__ import annotations

from dataclasses import dataclass, field

Block = tuple[str, tuple[int, ...]]
DEMOTED, NORMAL = (0,), (1,)


@dataclass
class Preferences:
    """Cached blocks; ``parts`` has those that no request uses, by part, the next victim first."""

    block_tokens: int
    capacity: int
    shares: dict[str, int]  # blocks, by context
    cached: set[Block] = field(default_factory=set)
    used: list[Block] = field(default_factory=list)
    level: dict[Block, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[tuple[object, ...], list[Block]] = field(default_factory=dict)
    served: str = ""

    def path(self, context: str, tokens: list[int]) -> list[Block]:
        """Return the cached full blocks of a prompt."""
        found = []
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            if (block := (context, tuple(tokens[:end]))) not in self.cached:
                break
            found.append(block)
        return found

    def match(self, context: str, tokens: list[int]) -> int:
        """Match a prompt without a grant, which uses the blocks of its hit; return their number."""
        hit = self.path(context, tokens[:-1])
        for block in reversed(hit):
            self.leave(block)
            self.use(block)
            self.enter(block)
        return len(hit)

    def request(self, context: str, tokens: list[int]) -> int:
        """Serve a request whose blocks are all computed; return the blocks of its hit."""
        hit = self.path(context, tokens[:-1])
        self.match(context, tokens)
        self.served = context
        for block in hit:
            self.leave(block)
        self.used = hit
        total = -(-len(tokens) // self.block_tokens)
        while len(self.cached) + total - len(hit) > self.capacity:
            self.evict()
        full = [
            (context, tuple(tokens[:end]))
            for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens)
        ]
        for block in full:
            self.leave(block)
            self.cached.add(block)
            self.use(block)
        self.used = []
        for block in reversed(full):
            self.enter(block)
        return len(hit)

    def use(self, block: Block) -> None:
        if self.level.get(block) == DEMOTED:
            del self.level[block]

    def enter(self, block: Block) -> None:
        context, level = block[0], self.level.get(block, NORMAL)
        if context not in self.shares or level == DEMOTED:
            self.parts.setdefault(level, []).append(block)
            return
        reserved = self.parts.setdefault(("share", context), [])
        reserved.append(block)
        while len(reserved) > self.shares[context]:
            first = reserved.pop(0)
            self.parts.setdefault(self.level.get(first, NORMAL), []).append(first)

    def leave(self, block: Block) -> None:
        for part in self.parts.values():
            if block in part:
                part.remove(block)

    def in_order(self) -> list[Block]:
        """Return the blocks that no request uses, in the order of eviction."""
        levels = sorted(part for part in self.parts if part[0] != "share")
        shares = sorted(part for part in self.parts if part[0] == "share")
        shares.sort(key=lambda part: part[1] != self.served)
        return [block for part in levels + shares for block in self.parts[part]]

    def has_child(self, block: Block) -> bool:
        end = len(block[1])
        return any(c == block[0] and len(t) > end and t[:end] == block[1] for c, t in self.cached)

    def evict(self) -> None:
        self.drop(next(block for block in self.in_order() if not self.has_child(block)))

    def drop(self, block: Block) -> None:
        self.leave(block)
        self.cached.remove(block)
        self.level.pop(block, None)

    def retain(self, context: str, tokens: list[int], priority: int, end: int) -> int:
        path, level = self.path(context, tokens), (2 + priority, end)
        for block in reversed(path):
            if self.level.get(block, NORMAL) < level:
                self.leave(block)
                self.level[block] = level
                self.enter(block)
        return len(path)

    def unshared(self, context: str, tokens: list[int]) -> list[Block]:
        """Return the last blocks of a prompt that no other cached prompt has, deepest first."""
        path = self.path(context, tokens)
        last: list[Block] = []
        for block in reversed(path):
            below = [t for c, t in self.cached if c == context and t[: len(block[1])] == block[1]]
            if len(below) - 1 > len(last):
                break
            last.append(block)
        return last

    def demote(self, context: str, tokens: list[int]) -> int:
        last = self.unshared(context, tokens)
        for block in last:
            self.leave(block)
            self.level[block] = DEMOTED
            self.enter(block)
        return len(last)

    def forget(self, context: str, tokens: list[int]) -> int:
        last = self.unshared(context, tokens)
        for block in last:
            self.drop(block)
        return len(last)

    def end(self, now: int) -> None:
        """End the retentions whose end is ``now`` or before."""
        for part in sorted(part for part in self.parts if part[0] != "share" and len(part) == 2):
            if part[1] <= now:
                self.parts.setdefault(NORMAL, []).extend(self.parts.pop(part))
        self.level = {b: lv for b, lv in self.level.items() if len(lv) == 1 or lv[1] > now}
