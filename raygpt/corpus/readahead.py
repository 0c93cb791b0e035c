"""Reads ahead of training: fetches what the next groups of shards need into the node's cache."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from raygpt.corpus.blocks import BLOCK
from raygpt.corpus.cache import Need, now
from raygpt.corpus.fetching import BlockRange, CachedShards, request_runs
from raygpt.corpus.lanes import Group
from raygpt.errors import first_line

AHEAD = 8  # requests at a time, of the 16 connections: the others are for what a batch waits for
HORIZON_S = 600.0  # of training that is fetched ahead: a store may be away for minutes
GROUPS = 1000  # of a plan, at most: a stream's lanes may be more than its windows, and most of its groups empty then
FIRST_PACE_S = 1.0  # a batch, until training has taken one
PASS_S = 2.0  # between two looks at what is missing, if nothing changes: another process may have evicted some


class ReadAhead:
    """A thread that fetches what the next batches need, and tells the node's other processes."""

    def __init__(self, shards: CachedShards):
        self._shards = shards
        self._groups: deque[tuple[Group, list[BlockRange]]] = deque()
        self._upcoming: Iterator[Group] = iter(())
        self._rows: tuple[int, ...] | None = None
        self._batch, self._context = -1, 0
        self._pace, self._since = FIRST_PACE_S, 0.0
        self._changes = 0  # of the groups
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._problem = ""  # the last one that was reported

    def follow(self, batch: int, rows: tuple[int, ...], context: int, upcoming: Callable[[], Iterator[Group]]) -> None:
        """Training has reached a batch; `upcoming` makes an iterator of what these rows need from there on."""
        with self._changed:
            if rows != self._rows or batch not in (self._batch, self._batch + 1):
                self._rows, self._context, self._upcoming, self._pace = rows, context, upcoming(), FIRST_PACE_S
                self._batch = batch
                self._groups.clear()
                self._note_change()
                # Before the batch fetches anything: that might evict what it needs itself, or the next ones.
                self._shards.cache.publish(self._plan())
            elif batch > self._batch:
                self._pace += 0.1 * (time.monotonic() - self._since - self._pace)
            self._batch, self._since = batch, time.monotonic()
            while self._groups and self._groups[0][0].end <= batch:
                self._groups.popleft()
                self._note_change()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._note_change()
        if self._thread:
            self._thread.join()

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify()

    def _work(self) -> None:
        while not self._is_stopped:
            with self._changed:
                changes, plan = self._changes, self._plan()
            try:
                self._shards.cache.publish(plan)
                self._fetch(plan, changes)
            except Exception as error:  # what is not read ahead is fetched when a batch needs it
                self._report_once(f"nothing is read ahead for now ({first_line(error)})")
            with self._changed:
                if changes == self._changes:
                    self._changed.wait(PASS_S)

    def _report_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._shards.report(problem)

    def _plan(self) -> list[Need]:
        """What the next groups need, and when; as much as the cache holds, but at least two groups."""
        size = sum(_bytes(ranges) for _, ranges in self._groups)
        while len(self._groups) < (GROUPS if size < self._shards.cache.limit else 2):
            group = next(self._upcoming)
            self._groups.append((group, self._shards.ranges(group, self._context)))
            size += _bytes(self._groups[-1][1])
        store, current = self._shards.index.fingerprint, now()
        return [
            Need(store, *span, when=current + max(0, group.first - self._batch) * self._pace)
            for group, ranges in self._groups
            for span in ranges
        ]

    def _fetch(self, plan: Sequence[Need], changes: int) -> None:
        """Request what is missing of the plan, soonest first, a few requests at a time; until the plan changes."""
        flying: list[tuple[Future[Any], int]] = []
        soon = max(now() + HORIZON_S, self._end_of_next_group(plan))
        for need in plan:
            if need.when > soon:
                return
            for run in request_runs(self._shards.missing(need)):
                flying = self._wait_for_a_slot(flying)
                size = len(run) * BLOCK + sum(size for _, size in flying)  # what is on its way needs room too
                if changes != self._changes or not self._shards.cache.make_room(size, need.when):
                    return
                flying += [(future, len(run) * BLOCK) for future in self._shards.fetch(run, need.when)]

    def _wait_for_a_slot(self, flying: list[tuple[Future[Any], int]]) -> list[tuple[Future[Any], int]]:
        """Wait while there are enough requests, or a batch waits for its own; returns those that are on their way."""
        while True:
            flying = [entry for entry in flying if not entry[0].done()]
            if self._is_stopped or not (self._shards.is_waiting or len(flying) >= AHEAD):
                return flying
            time.sleep(0.005)

    def _end_of_next_group(self, plan: Sequence[Need]) -> float:
        """The next group is fetched in any case."""
        times = sorted({need.when for need in plan})
        return times[min(1, len(times) - 1)] if times else 0.0


def _bytes(ranges: Sequence[BlockRange]) -> int:
    return sum((span.end - span.first) * BLOCK for span in ranges)
