"""What a fleet would do whose nodes all want one model: the agents' ring, a modelled network.

Modelled are single transfers of chunks: who asks whom and when (the agents' ring, order and
bounds), and the rates at which bytes move meanwhile (:mod:`sharing`). Rates hold from one event to
the next. In fleets of more than some thousand transfers time goes by steps instead, a quarter of
what a full set of transfers takes, and nodes that are neighbours in the order may be grouped; both
are among the assumptions of the forecast.

Where it errs:

- A step rounds the ends of transfers up to its own. Bandwidth that this leaves goes to the others
  of the same step, so what a busy network needs is hardly longer, and what waits for answers is.
- A group asks as one. With n nodes in it an owner may serve n - 1 more than its bound.
- Pulls from the origin come before what a node receives from other nodes, and take none of the
  places for fetches of an owner that was asked for them.
- Who is kept waiting waits on, where agents may turn to another owner and, in the end, to the
  origin: what owners of many chunks cost in time here may cost them bytes of the origin.
- Nodes are all alike, none is slow, and nothing else uses the network. A fleet with stragglers
  takes longer than this says.

What does not depend on any of it: origin bytes, and without failures the bytes that each node
sends. No time is below what the rates allow for those bytes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from warmcast.infra.bench.deliver.forecast import MODELLED, Burst, Forecast, Settings
from warmcast.infra.bench.deliver.sharing import Floats, Indexes, share
from warmcast.loader.node.ring import Ring
from warmcast.manifests.deadline import Deadline

_EXACT = 4000
"""Transfers up to which time goes from event to event."""

_STEPS = 4
"""Steps in the time that a full set of transfers takes."""

_ROUNDS = 4
_ROUNDS_EXACT = 64
_DONE = 1e-3
"""Bytes: what is left of a transfer when it is over."""

_NONE = -1
_SHA256 = hashlib.sha256(b"a model").hexdigest()


def simulate(settings: Settings, deadline: Deadline | None = None) -> Forecast:
    """A cold burst and, on what it left, a warm one.

    Seconds for thousands of nodes, a minute for ten thousand. Raises :class:`DeadlineExceeded`.
    """
    fleet = _Fleet(settings)
    fleet.run(deadline or Deadline.never())
    assumptions = {
        **asdict(settings),
        "step": fleet.step,
        "group_size": fleet.group_size,
        "modelled": list(MODELLED),
    }
    return Forecast(assumptions, (_cold(fleet), _warm(fleet)))


def _cold(fleet: _Fleet) -> Burst:
    settings = fleet.settings
    model = settings.model_bytes
    sent, received = fleet.sent, float(fleet.sent.sum()) + fleet.origin_bytes
    bounds = {
        "receiving": model / fleet.intake,
        "the busiest node": fleet.needed_of_one / settings.nic_rate,
        "the origin": fleet.needed_of_origin / settings.origin_rate,
        "an origin connection": min(model, settings.chunk_bytes) / settings.origin_connection_rate,
    }
    bound_by = max(bounds, key=lambda name: bounds[name])
    return Burst(
        "cold",
        settings.nodes,
        fleet.replicas_alive(),
        model,
        round(fleet.origin_bytes),
        fleet.origin_bytes / model,
        *fleet.seconds(),
        busiest_node_sent_bytes=round(sent.max()),
        mean_node_sent_bytes=float(sent.mean()),
        received_bytes=round(received),
        lost_bytes=max(0, round(received - fleet.kept_bytes())),
        bound_seconds=bounds[bound_by],
        bound_by=bound_by,
    )


def _warm(fleet: _Fleet) -> Burst:
    """Every node that has replicas has all chunks: nothing is asked of anybody."""
    settings = fleet.settings
    seconds = settings.model_bytes / settings.disk_read_rate
    return Burst(
        "warm",
        settings.nodes,
        fleet.replicas_alive(),
        settings.model_bytes,
        origin_bytes=0,
        origin_ratio=0.0,
        seconds_to_first=seconds,
        seconds_to_median=seconds,
        seconds_to_last=seconds,
        busiest_node_sent_bytes=0,
        mean_node_sent_bytes=0.0,
        received_bytes=0,
        lost_bytes=0,
        bound_seconds=seconds,
        bound_by="the disk",
    )


class _Fleet:
    """A cold burst in progress.

    Arrays are over nodes, over chunks, over groups of nodes that want the model, or over slots:
    each group has as many as a node has fetches at a time, a slot being one chunk that is on its
    way to each of the group's nodes. ``row`` is the group of each slot.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        chunks, receivers = settings.chunks, settings.receivers
        self.names = [f"node-{index:05d}" for index in range(settings.nodes)]
        self.alive = np.ones(settings.nodes, dtype=np.bool_)
        self.sent = np.zeros(settings.nodes)
        self.sizes = np.full(chunks, float(settings.chunk_bytes))
        self.sizes[-1] = settings.model_bytes - (chunks - 1) * settings.chunk_bytes
        self.owner = self._owners()

        self.group_size = -(-receivers // settings.groups)
        self.group = np.full(settings.nodes, _NONE, dtype=np.intp)
        self.group[:receivers] = np.arange(receivers) // self.group_size
        self.groups = -(-receivers // self.group_size)
        self.members = np.bincount(self.group[:receivers]).astype(np.float64)
        self.start = np.zeros(self.groups, dtype=np.intp)
        if settings.rotated:
            self.start = np.arange(self.groups) * self.group_size * chunks // receivers
        self.left = np.full(self.groups, chunks)
        self.finished_at = np.full(self.groups, math.nan)

        width = min(settings.fetches, chunks)
        self.row = np.repeat(np.arange(self.groups), width)
        self.next = np.zeros(self.groups, dtype=np.intp)
        self.chunk = np.full(self.groups * width, _NONE, dtype=np.intp)
        self.done = np.zeros(len(self.chunk))
        self.ready = np.zeros(len(self.chunk))
        self.serving = np.zeros(len(self.chunk), dtype=np.bool_)
        self.weight = np.zeros(len(self.chunk))

        self.arrived = np.zeros(chunks)
        self.pull_at = np.full(chunks, math.inf)
        self.known_at = np.zeros(chunks)
        self.origin_bytes = 0.0
        # What the busiest node and the origin had sent when the last replica was there; to nodes
        # that fail later more may be sent.
        self.needed_of_one = self.needed_of_origin = 0.0
        self.lost_at = math.inf
        if round(settings.failing * settings.nodes):
            self.lost_at = settings.failing_at * receivers * settings.model_bytes

        self.intake = min(settings.nic_rate, settings.disk_write_rate)
        self.step = self._step()
        self.now = 0.0
        self._ask(np.arange(len(self.chunk)), np.zeros(len(self.chunk)))

    @property
    def _blink(self) -> float:
        """Seconds that cannot be told from none at this time."""
        return 1e-12 * self.now

    def run(self, deadline: Deadline) -> None:
        """Until every node that wants the model and is alive has it."""
        while self.left.any():
            deadline.check("simulating a delivery")
            if self.sent.sum() + self.origin_bytes >= self.lost_at - _DONE:
                self._lose_nodes()
            self._serve()
            self._move()

    def seconds(self) -> tuple[float, float, float]:
        """When the first, the median and the last replica were there."""
        alive = self.members > 0
        times = np.repeat(self.finished_at[alive], self.members[alive].astype(np.intp))
        return float(times.min()), float(np.median(times)), float(times.max())

    def replicas_alive(self) -> int:
        """Replicas on nodes that did not fail."""
        settings = self.settings
        each, more = divmod(settings.replicas, settings.nodes)
        return int(np.sum((each + (np.arange(settings.nodes) < more))[self.alive]))

    def kept_bytes(self) -> float:
        """On the nodes that did not fail: their models, and what they own without wanting it."""
        owned = self.arrived[self.alive[self.owner] & (self.group[self.owner] == _NONE)].sum()
        return float(self.members.sum()) * self.settings.model_bytes + float(owned)

    def _owners(self) -> Indexes:
        living = np.flatnonzero(self.alive)
        ring = Ring(self.names[index] for index in living)
        index = {name: node for node, name in zip(living, ring.nodes, strict=True)}
        owners = ring.owners(_SHA256, self.settings.chunks)
        return np.array([index[owner[0]] for owner in owners], dtype=np.intp)

    def _step(self) -> float:
        settings = self.settings
        if settings.step is not None:
            return settings.step
        if self.groups * settings.chunks <= _EXACT:
            return 0.0
        chunk = min(settings.chunk_bytes, settings.model_bytes)
        return min(
            settings.fetches * chunk / self.intake,
            settings.uploads * chunk / settings.nic_rate,
            chunk / settings.origin_connection_rate,
        ) / _STEPS  # fmt: skip

    def _ask(self, slots: Indexes, at: Floats) -> None:
        """Give each slot its group's next chunk, asked for at a time, or none if there is none.

        ``slots`` ascend.
        """
        rows = self.row[slots]
        counts = np.bincount(rows, minlength=self.groups)
        rank = np.arange(len(slots)) - (np.cumsum(counts) - counts)[rows]
        place = self.next[rows] + rank
        self.next = np.minimum(self.next + counts, self.settings.chunks)
        some = place < self.settings.chunks
        self.chunk[slots] = _NONE
        self._request(
            slots[some], (self.start[rows] + place)[some] % self.settings.chunks, at[some]
        )

    def _request(self, slots: Indexes, chunks: Indexes, at: Floats) -> None:
        self.chunk[slots] = chunks
        self.done[slots] = 0
        self.serving[slots] = False
        self._weigh(slots)
        asks = np.where(self.weight[slots] > 0, self.settings.node_round_trip, 0.0)
        self.ready[slots] = np.maximum(at, self.known_at[chunks]) + asks
        np.minimum.at(self.pull_at, chunks, self.ready[slots] + self.settings.origin_round_trip)

    def _weigh(self, slots: Indexes) -> None:
        """The weight of a slot is how many of its group get the chunk from another node."""
        rows, owners = self.row[slots], self.owner[self.chunk[slots]]
        self.weight[slots] = self.members[rows] - (self.group[owners] == rows)

    def _serve(self) -> None:
        """Let owners take up what was asked of them, the earliest first, within their bound."""
        asked = self.ready <= self.now + self.step / 2 + self._blink
        waiting = np.flatnonzero((self.chunk != _NONE) & ~self.serving & (self.weight > 0) & asked)
        busy = np.flatnonzero(self.serving)
        places = self.settings.uploads - np.bincount(
            self.owner[self.chunk[busy]], self.weight[busy], minlength=self.settings.nodes
        )
        waiting = waiting[places[self.owner[self.chunk[waiting]]] > 0]
        if not len(waiting):
            return
        owners = self.owner[self.chunk[waiting]]
        order = np.lexsort((self.ready[waiting], owners))
        waiting, owners = waiting[order], owners[order]
        ahead = np.cumsum(self.weight[waiting]) - self.weight[waiting]
        first = np.searchsorted(owners, owners)
        self.serving[waiting[ahead - ahead[first] < places[owners]]] = True

    def _move(self) -> None:
        """Move bytes until the next event, or for a step."""
        settings, now, step = self.settings, self.now, self.step
        pulls = np.flatnonzero(
            (self.pull_at <= now + step + self._blink) & (self.arrived < self.sizes)
        )
        room = np.full(settings.nodes, self.intake)
        pulled = self._pull(pulls, room)
        coming = np.zeros(settings.chunks)
        coming[pulls] = pulled

        slots = np.flatnonzero(self.serving)
        chunks = self.chunk[slots]
        held = self.arrived
        if not settings.pass_on_parts:
            held, coming = np.where(held < self.sizes, 0.0, held), np.zeros(settings.chunks)
        behind = held[chunks] - self.done[slots]
        if step:
            limit = np.minimum(coming[chunks] + behind / step, settings.nic_rate)
        else:
            limit = np.where(behind > _DONE, settings.nic_rate, coming[chunks])
        rates = share(
            self.weight[slots],
            self.owner[chunks],
            self.row[slots],
            np.full(settings.nodes, settings.nic_rate),
            self._group_room(room),
            limit,
            _ROUNDS if step else _ROUNDS_EXACT,
        )
        span = step or self._next_event(pulls, pulled, slots, rates, behind, coming[chunks])

        moved = np.minimum(pulled * span, self.sizes[pulls] - self.arrived[pulls])
        self.arrived[pulls] += moved
        self.origin_bytes += float(moved.sum())
        moved = np.minimum(rates * span, self.sizes[chunks] - self.done[slots])
        self.done[slots] += moved
        self.sent += np.bincount(
            self.owner[chunks], moved * self.weight[slots], minlength=settings.nodes
        )
        self.now += span
        self._finish(pulls)

    def _pull(self, pulls: Indexes, room: Floats) -> Floats:
        """The rates of pulls from the origin; ``room``, of nodes, is changed to what they leave."""
        settings = self.settings
        limit = np.full(len(pulls), settings.origin_connection_rate)
        if self.step:
            begun = np.maximum(self.pull_at[pulls], self.now)
            limit *= (self.now + self.step - begun) / self.step
            limit = np.minimum(limit, (self.sizes[pulls] - self.arrived[pulls]) / self.step)
        return share(
            np.ones(len(pulls)),
            np.zeros(len(pulls), dtype=np.intp),
            self.owner[pulls],
            np.array([settings.origin_rate]),
            room,
            limit,
            _ROUNDS if self.step else _ROUNDS_EXACT,
        )

    def _group_room(self, room: Floats) -> Floats:
        """What a node of each group can still receive, their mean."""
        wanting = (self.group != _NONE) & self.alive
        total = np.bincount(self.group[wanting], room[wanting], minlength=self.groups)
        return total / np.maximum(self.members, 1)

    def _next_event(
        self,
        pulls: Indexes,
        pulled: Floats,
        slots: Indexes,
        rates: Floats,
        behind: Floats,
        coming: Floats,
    ) -> float:
        """Seconds until a transfer ends, begins, or has caught up with its owner's pull."""
        chunks = self.chunk[slots]
        catching = (behind > _DONE) & (rates > coming) & (self.arrived[chunks] < self.sizes[chunks])
        moving, flowing = pulled > 0, rates > 0
        ends = [
            (self.sizes[pulls] - self.arrived[pulls])[moving] / pulled[moving],
            (self.sizes[chunks] - self.done[slots])[flowing] / rates[flowing],
            behind[catching] / (rates - coming)[catching],
        ]
        received = self.sent.sum() + self.origin_bytes
        speed = float(pulled.sum() + (rates * self.weight[slots]).sum())
        if received < self.lost_at < math.inf and speed > 0:
            ends.append(np.array([(self.lost_at - received) / speed]))
        begins = np.concatenate([self.pull_at, self.ready[self.chunk != _NONE]]) - self.now
        later = begins[begins > self._blink].min(initial=math.inf)
        return float(max(np.concatenate(ends).min(initial=later), self._blink))

    def _finish(self, pulls: Indexes) -> None:
        """Ends of transfers: what was there is the group's, and its slot asks for the next."""
        whole = pulls[self.sizes[pulls] - self.arrived[pulls] <= _DONE]
        self.origin_bytes += float((self.sizes - self.arrived)[whole].sum())
        self.arrived[whole] = self.sizes[whole]
        # What a node asks of itself may be there already: then its slot asks once more.
        while len(over := self._over()):
            self.serving[over] = False
            self.left -= np.bincount(self.row[over], minlength=self.groups)
            self._ask(over, np.full(len(over), self.now))
        ended = (self.left == 0) & np.isnan(self.finished_at) & (self.members > 0)
        if ended.any():
            self.finished_at[ended] = self.now
            self.needed_of_one = float(self.sent.max())
            self.needed_of_origin = self.origin_bytes

    def _over(self) -> Indexes:
        """Slots whose chunk is there."""
        taken = np.flatnonzero(self.chunk != _NONE)
        chunks = self.chunk[taken]
        here = np.where(self.weight[taken] > 0, self.done[taken], self.arrived[chunks])
        return taken[self.sizes[chunks] - here <= _DONE]

    def _lose_nodes(self) -> None:
        """Nodes fail; their chunks go to those that the ring names without them."""
        settings = self.settings
        self.lost_at = math.inf
        # The first node never fails: a forecast needs a replica.
        order = 1 + np.random.default_rng(settings.seed).permutation(settings.nodes - 1)
        dead = order[: round(settings.failing * settings.nodes)]
        self.alive[dead] = False
        wanting = self.group[dead]
        self.members -= np.bincount(wanting[wanting != _NONE], minlength=self.groups)
        gone = self.members == 0
        self.left[gone] = 0
        self.next[gone] = settings.chunks
        self.chunk[gone[self.row]] = _NONE
        self.serving[gone[self.row]] = False

        moved = np.flatnonzero(~self.alive[self.owner])
        self.owner = self._owners()
        there = self._has(self.group[self.owner[moved]], moved)
        self.arrived[moved] = np.where(there, self.sizes[moved], 0.0)
        self.pull_at[moved] = math.inf
        self.known_at[moved] = self.now + settings.detection

        taken = np.flatnonzero(self.chunk != _NONE)
        self._weigh(taken)
        anew = taken[np.isin(self.chunk[taken], moved)]
        self._request(anew, self.chunk[anew], np.full(len(anew), self.now))

    def _has(self, groups: Indexes, chunks: Indexes) -> npt.NDArray[np.bool_]:
        """Whether a group has a chunk: it came to it in its order, and it is in no slot."""
        passed = (chunks - self.start[groups]) % self.settings.chunks < self.next[groups]
        held = self.chunk.reshape(self.groups, -1)[groups]
        coming = (held == chunks[:, None]).any(axis=1)
        has: npt.NDArray[np.bool_] = (groups != _NONE) & passed & ~coming
        return has
