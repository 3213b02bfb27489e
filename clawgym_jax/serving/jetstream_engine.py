"""JetStream 0.2.2's Engine methods, on top of the batcher that the native driver uses too.

The stock orchestrator cannot carry what a request is (its prompts end at 32768 tokens and longer
ones are cut silently; it knows no sampling parameters). So its prompt is a handle, its prefix an
entry of the table here, its slot a row number: the batcher gives the real slot, prefills and
decodes, all inside `generate`. A step begins when at most one is left that nobody has read.
Not here: batching (`batcher`), what a row says (`jetstream_rows`), threads (the orchestrator's).
Invariants: no method that the orchestrator calls raises; the batcher is touched inside `generate`
only, or under the lock while no request is in it; a failure ends the requests in the batcher alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, NoWeights, SamplerError
from clawgym_jax.serving import jetstream_rows, jetstream_shim
from clawgym_jax.serving.batcher import Batcher
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.jetstream_entry import Entry, Tokenizer
from clawgym_jax.serving.request import DriverStats, Finished, Request
from clawgym_jax.serving.rounds import Rounds
from clawgym_jax.serving.state import SwapPolicy

PREFILL_TOK = 16  # the orchestrator's shortest prompt: BOS, the handle, padding
_PATIENCE_S = 1.0  # for a reader that may be gone; then the next step is taken unread
_LINGER_S = 0.002  # how long an idle step waits for the orchestrator to notice the last row


class JetStreamEngine:
    """See the module. Its user calls submit, cancel, forget and publish, from any thread."""

    samples_per_slot = 1
    max_prefill_length = PREFILL_TOK
    mesh = None
    colocated_cpus = None

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str] | None = None,
        swap_policy: SwapPolicy | None = None,
    ) -> None:
        """decode: ids -> text, needed for stop strings only. swap_policy: else the engine's."""
        self.engine = engine
        self._batcher = Batcher(engine, decode)
        self._wake = threading.Condition()
        policy = swap_policy or engine.config.swap_policy
        self._rounds = Rounds(self._batcher, policy, self._wake, self._end_all)
        self._handles = itertools.count(1)
        self._known: dict[int, Entry] = {}  # by handle, until forgotten
        self._at: dict[int, Entry] = {}  # by the orchestrator's slot, until their last row
        self._owners: dict[Request, Entry] = {}
        self._inside = False  # of generate
        self._unread = 0  # steps that nobody has handed out yet
        self._coming = 0  # prefilled, not inserted
        self._idle = True
        self._since_s = time.perf_counter()  # when the last step ended
        self._gone: SamplerError | None = None  # why nothing is served any more

    # --- for the driver ----------------------------------------------------------------------

    @property
    def stats(self) -> DriverStats:
        return self._batcher.stats

    @property
    def version(self) -> int:
        return self._batcher.version

    def submit(self, request: Request) -> Entry:
        """Makes a handle for the request, to be sent to the orchestrator as its prompt."""
        with self._wake:
            if self._gone is not None:
                raise self._gone
            if self.version == 0 and self._rounds.pending is None:
                raise NoWeights("no weights were published yet; publish before sampling")
            entry = Entry(next(self._handles), request)
            self._known[entry.handle] = entry
            self._owners[request] = entry
        return entry

    def entry(self, handle: int) -> Entry | None:
        with self._wake:
            return self._known.get(handle)

    def cancel(self, handle: int) -> bool:
        """Its slot is free within two steps. Returns whether it has none yet: no row will come."""
        with self._wake:
            entry = self._known.get(handle)
            if entry is None or entry.request is None:
                return False
            entry.request.cancelled = True
            self._wake.notify_all()
            return entry.slot < 0 and not entry.ended

    def forget(self, handle: int) -> None:
        """Nobody will ask for it again; if it still runs, it is cancelled."""
        with self._wake:
            entry = self._known.get(handle)
            if entry is None or entry.request is None:
                return
            entry.forgotten = entry.request.cancelled = True
            if entry.ended:
                del self._known[handle]

    def publish(self, params: Any, version: int) -> None:
        """Swaps by the policy, at a step boundary; blocks until `version` is served."""
        self._rounds.require_newer(version)
        loaded = self.engine.load_params(params)
        with self._wake:
            if self._gone is not None:
                raise self._gone
            self._rounds.require_newer(version)
            self._rounds.pending = (loaded, version)
            if not self._inside and not self._at:
                self._rounds.swap_if_due()
            self._wake.wait_for(lambda: self.version >= version or self._gone is not None)
            if self.version < version:
                raise EngineRestarted("the driver was closed during a weight swap")

    def reset(self, error: SamplerError, closed: bool = False) -> None:
        """Ends all requests with the error; to be called while no orchestrator runs."""
        with self._wake:
            if closed:
                self._gone = error
            for entry in [*self._known.values(), *self._at.values()]:
                if not entry.ended:
                    entry.error = error
            self._known = {h: entry for h, entry in self._known.items() if not entry.forgotten}
            self._at.clear()
            self._rounds.waiting.clear()
            self._owners.clear()
            self._rounds.taken = []
            self._inside, self._unread, self._coming = False, 0, 0
            if not closed:
                self._batcher.reset()
                self._rounds.swap_if_due()
            self._wake.notify_all()

    # --- JetStream's Engine ------------------------------------------------------------------

    @property
    def max_concurrent_decodes(self) -> int:
        """Row numbers: a few more than slots, so that the next request is there when one ends."""
        slots = self.engine.config.slots
        return slots + max(slots // 8, 2)

    def load_params(self, *_: Any, **__: Any) -> Batcher:
        """A reference to what holds the weights; `publish` swaps them in it."""
        return self._batcher

    def init_decode_state(self, *_: Any, **__: Any) -> Batcher:
        return self._batcher

    def get_prefix_destination_sharding(self) -> None:
        """Prefill and decoding share their chips: nothing is sent anywhere."""

    def get_tokenizer(self) -> None:
        """Not needed to build one."""

    def build_tokenizer(self, _: None) -> Tokenizer:
        return Tokenizer()

    def prefill(
        self, *, params: Any, padded_tokens: Any, true_length: int, existing_prefix: Any = None
    ) -> Entry:
        """Finds the request whose handle is the last token."""
        handle = int(padded_tokens[min(true_length, PREFILL_TOK) - 1])
        with self._wake:
            entry = self._known.get(handle)
            self._coming += 1
            self._wake.notify_all()
        if entry is not None:
            return entry
        return Entry(handle, None, error=SamplerError(f"no request has the handle {handle}"))

    def insert(self, prefix: Entry, decode_state: Any, slot: int) -> Any:
        """From now on the orchestrator's slot is the entry's; it waits for a real one."""
        with self._wake:
            self._coming -= 1
            prefix.slot = slot
            self._at[slot] = prefix
            if prefix.request is not None and not prefix.ended:
                self._rounds.waiting.append(prefix.request)
        return decode_state

    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
        """Swaps, admits, prefills and decodes; one row for each of the orchestrator's slots."""
        self._begin()
        start_s = time.perf_counter()
        try:
            self._rounds.turn()
        except Exception as error:
            self._fail(error)
        end_s = self._since_s = time.perf_counter()
        self.stats.busy_s += end_s - start_s
        with self._wake:
            if not self._batcher.busy:  # what just ended may have been what a swap waited for
                self._rounds.swap_if_due()
            rows = self._rows()
            self._unread += 1
            self._inside, self._idle = False, not self._at
            self._wake.notify_all()
        return decode_state, jetstream_shim.results(rows, self._read)

    # --- a step ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Waits until at most one step is unread, and a moment if there is nothing to do."""
        with self._wake:
            self._wake.wait_for(lambda: self._unread <= 1, _PATIENCE_S)
            if not self._at:
                self._wake.wait_for(lambda: self._coming > 0, _LINGER_S)
            if self._idle:
                self.stats.idle_s += time.perf_counter() - self._since_s
            self._inside = True

    def _read(self) -> None:
        with self._wake:
            self._unread = max(self._unread - 1, 0)  # after a reset an old step may be read
            self._wake.notify_all()

    def _end_all(self, finished: Sequence[Finished]) -> None:
        with self._wake:
            for request, result in finished:
                entry = self._owners.pop(request)
                if isinstance(result, SamplerError):
                    entry.error = result
                else:
                    entry.completion = result

    def _fail(self, error: Exception) -> None:
        """Ends the requests that were in the batcher, and empties its slots."""
        self.stats.restarts += 1
        why = EngineRestarted(f"the engine failed and was restarted: {error!r}")
        with self._wake:
            for request in self._rounds.in_engine():
                entry = self._owners.pop(request, None)
                if entry is not None:
                    entry.error = why
            self._rounds.taken = []
        try:
            self._batcher.reset()
        except Exception as fatal:  # no memory for empty slots: nothing can be served any more
            self._give_up(EngineRestarted(f"the engine could not be restarted: {fatal!r}"))

    def _give_up(self, error: SamplerError) -> None:
        with self._wake:
            self._gone = error
            self._rounds.waiting.clear()
            self._owners.clear()
            for entry in self._known.values():
                entry.error = entry.error or error

    def _rows(self) -> np.ndarray:
        """i32[slots, ...]: one new token, or none, of each entry."""
        rows = jetstream_rows.empty(self.max_concurrent_decodes)
        for slot, entry in list(self._at.items()):
            row, request = rows[slot], entry.request
            if request is not None and request.forced is None:
                self._write(row, entry, request)
            if entry.ended:
                jetstream_rows.end(row)
                del self._at[slot]
                if entry.forgotten:
                    self._known.pop(entry.handle, None)
        return rows

    def _write(self, row: np.ndarray, entry: Entry, r: Request) -> None:
        at = entry.sent_tok
        if at < len(r.ids):
            jetstream_rows.write(row, r.ids[at], r.logprobs[at], r.raw[at], r.versions[at])
            entry.sent_tok += 1
