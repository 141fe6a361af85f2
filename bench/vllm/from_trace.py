"""Workload from the public conversation trace: sessions of several turns, scaled to one GPU."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from aiokv.trace.users import UserOptions, sessions_of
from bench.vllm.workload import (
    AGENT_OUTPUT_TOKENS,
    HASH_BLOCK_TOKENS,
    AgentTurn,
    Prompt,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.trace.format import TraceRequest

# All requests of the trace begin with the same block; more shared blocks mean the same session.
_COMMON_BLOCKS = 3

# Sessions of agents: prompts, answers and pauses are an eighth of those of the trace, so that 24
# sessions need about 200,000 tokens of KV.
_AGENT_SCALE = 8
_AGENT_SESSIONS = 160
_AGENT_TURNS = 8, 24  # shorter sessions are left out, longer ones are cut
_AGENT_MAX_TOKENS = 24_000  # of a prompt; the session ends before a longer one
_AGENT_MAX_PAUSE_SECONDS = 32.0  # of the trace

Session = list[Prompt]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the trace to take.

    Attributes:
        sessions: number of sessions.
        min_turns: turns that a session must have.
        max_turns: turns after which a session is cut.
        min_prompt_tokens: length that each first turn must have.
        max_prompt_tokens: length that no turn may exceed.
        unique_prompts: number of prompts that share nothing.
        equality_sessions: number of sessions whose outputs are compared.
        equality_max_tokens: length that none of their turns may exceed.
    """

    sessions: int = 20
    min_turns: int = 4
    max_turns: int = 6
    min_prompt_tokens: int = 2_048
    max_prompt_tokens: int = 16_384
    unique_prompts: int = 20
    equality_sessions: int = 6
    equality_max_tokens: int = 4_096


def build_workload(requests: Sequence[TraceRequest], sizes: Sizes) -> Workload:
    """Take the first sessions of the trace that fit ``sizes``, in order of their first turn."""
    sessions = _sessions(requests)
    chosen = _choose(sessions, sizes, sizes.max_prompt_tokens)[: sizes.sessions]
    short = _choose(sessions, sizes, sizes.equality_max_tokens)[: sizes.equality_sessions]
    turns = _rounds(session[1:] for session in chosen)
    return Workload(
        opening=[session[0] for session in chosen],
        turns=turns,
        unique=_unique(turns[: sizes.unique_prompts], requests),
        equality=_rounds(short),
        max_prompt_tokens=max(turn.num_tokens for session in chosen for turn in session),
        working_set_tokens=HASH_BLOCK_TOKENS
        * len({block for session in chosen for turn in session for block in turn.hash_ids}),
    )


def agent_sessions(requests: Sequence[TraceRequest]) -> list[list[AgentTurn]]:
    """Take the first sessions that have enough turns; see the constants of this module."""
    users = UserOptions(users=1, max_pause_seconds=_AGENT_MAX_PAUSE_SECONDS)
    fewest, most = _AGENT_TURNS
    chosen = []
    for session in sessions_of(requests, users):
        turns = [
            AgentTurn(
                # Every eighth block: prompts share as large a part of each other as in the trace.
                Prompt(
                    max(1, turn.request.input_tokens // _AGENT_SCALE),
                    turn.request.hash_ids[::_AGENT_SCALE],
                ),
                turn.pause / _AGENT_SCALE,
                min(max(1, turn.request.output_tokens // _AGENT_SCALE), AGENT_OUTPUT_TOKENS),
            )
            for turn in session[:most]
        ]
        fitting = list(takewhile(lambda turn: turn.prompt.num_tokens <= _AGENT_MAX_TOKENS, turns))
        if len(fitting) >= fewest:
            chosen.append(fitting)
    return chosen[:_AGENT_SESSIONS]


def _sessions(requests: Iterable[TraceRequest]) -> list[Session]:
    """Group requests that continue one another, each group in order of arrival."""
    sessions: list[Session] = []
    by_prefix: dict[tuple[int, ...], Session] = {}
    for request in requests:
        ids = request.hash_ids
        prefixes = [tuple(ids[:length]) for length in range(_COMMON_BLOCKS, len(ids) + 1)]
        session = next((by_prefix[key] for key in reversed(prefixes) if key in by_prefix), None)
        if session is None:
            session = []
            sessions.append(session)
        session.append(Prompt(request.input_tokens, ids))
        by_prefix.update(dict.fromkeys(prefixes, session))
    return sessions


def _choose(sessions: Iterable[Session], sizes: Sizes, max_tokens: int) -> list[Session]:
    return [
        session[: sizes.max_turns]
        for session in sessions
        if len(session) >= sizes.min_turns
        and session[0].num_tokens >= min(sizes.min_prompt_tokens, max_tokens // 2)
        and max(turn.num_tokens for turn in session) <= max_tokens
    ]


def _rounds(sessions: Iterable[Session]) -> list[Prompt]:
    """Return one turn of each session, then the next of each, until all have ended."""
    sessions = list(sessions)
    longest = max(len(session) for session in sessions)
    return [session[turn] for turn in range(longest) for session in sessions if turn < len(session)]


def _unique(prompts: Sequence[Prompt], requests: Iterable[TraceRequest]) -> list[Prompt]:
    """Return prompts of the same lengths, of blocks that are in no request."""
    next_id = 1 + max(block for request in requests for block in request.hash_ids)
    unique = []
    for prompt in prompts:
        ids = list(range(next_id, next_id + len(prompt.hash_ids)))
        unique.append(Prompt(prompt.num_tokens, ids))
        next_id = ids[-1] + 1
    return unique
