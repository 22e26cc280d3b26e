"""``warmcast bench deliver --simulate``: forecasts beside what can be computed by hand."""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.infra.bench.deliver.forecast import Settings
from warmcast.infra.bench.deliver.sharing import share
from warmcast.infra.bench.deliver.simulation import simulate
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)
MB = 10**6
RATES = (
    "nic_rate", "origin_rate", "origin_connection_rate", "disk_write_rate", "disk_read_rate"
)  # fmt: skip

rates = st.sampled_from([0.1e9, 0.6e9, 1e9, 6e9, 12.5e9, 200e9])
fleets = st.builds(
    Settings,
    nodes=st.integers(1, 12),
    replicas=st.integers(1, 30),
    model_bytes=st.integers(MB, 400 * MB),
    nic_rate=rates,
    origin_rate=rates,
    origin_connection_rate=rates,
    disk_write_rate=rates,
    node_round_trip=st.sampled_from([0.0, 0.2e-3]),
    origin_round_trip=st.sampled_from([0.0, 20e-3]),
    fetches=st.integers(1, 16),
    uploads=st.integers(1, 32),
    rotated=st.booleans(),
    pass_on_parts=st.booleans(),
    step=st.sampled_from([0.0, 0.003, 0.05]),
)
failures = st.builds(
    replace,
    fleets,
    failing=st.floats(0, 0.9),
    failing_at=st.floats(0, 0.99),
    detection=st.sampled_from([0.0, 0.5]),
)
modest = settings(deadline=None, max_examples=60)


def cold(fleet):
    return simulate(fleet, Deadline.after(60)).bursts[0]


# By hand


@modest
@given(st.integers(1, 400 * MB), st.integers(1, 16), rates, st.sampled_from([0.0, 0.02]))
def test_one_node_pulls_as_many_at_a_time_as_it_may(nbytes, fetches, rate, round_trip):
    fleet = Settings(
        1, 1, nbytes, nic_rate=1e15, disk_write_rate=1e15, origin_rate=1e15, fetches=fetches,
        origin_connection_rate=rate, origin_round_trip=round_trip,
    )  # fmt: skip
    free = [0.0] * fetches
    for chunk in range(fleet.chunks):
        length = min(fleet.chunk_bytes, nbytes - chunk * fleet.chunk_bytes)
        heapq.heappush(free, heapq.heappop(free) + round_trip + length / rate)
    assert cold(fleet).seconds_to_last == pytest.approx(max(free), rel=1e-6)


@pytest.mark.parametrize("limit", ["nic_rate", "disk_write_rate", "origin_rate"])
def test_one_node_is_as_fast_as_its_narrowest_place(limit):
    fleet = Settings(1, 1, 256 * MB, **{limit: 1e9}, origin_round_trip=0)
    assert cold(fleet).seconds_to_last == pytest.approx(0.256)


@modest
@given(st.integers(2, 40), st.integers(1, 16 * MB), rates, rates)
def test_one_chunk_goes_to_all_at_once(nodes, nbytes, nic, connection):
    """It passes through its owner, who sends it to each of the others."""
    fleet = Settings(
        nodes, nodes, nbytes, nic_rate=nic, disk_write_rate=1e15, origin_rate=1e15, uploads=100,
        origin_connection_rate=connection, origin_round_trip=0.02,
    )  # fmt: skip
    seconds = 0.02 + max(nbytes / min(nic, connection), (nodes - 1) * nbytes / nic)
    # The first request reaches the owner at once where it asks itself, and that it always does.
    assert cold(fleet).seconds_to_last == pytest.approx(seconds, rel=1e-6)


@modest
@given(st.integers(2, 40), st.integers(1, 16 * MB), rates, rates)
def test_one_chunk_that_has_to_be_whole_goes_to_all_at_once(nodes, nbytes, nic, connection):
    fleet = Settings(
        nodes, nodes, nbytes, nic_rate=nic, disk_write_rate=1e15, origin_rate=1e15, uploads=100,
        origin_connection_rate=connection, pass_on_parts=False,
    )  # fmt: skip
    first = 0.02 + nbytes / min(nic, connection)
    found = cold(fleet)
    assert found.seconds_to_first == pytest.approx(first, rel=1e-6)
    assert found.seconds_to_last == pytest.approx(first + (nodes - 1) * nbytes / nic, rel=1e-6)


def test_all_beginning_at_the_same_chunk_takes_longer():
    fleet = Settings(60, 60, 3000 * MB)
    assert cold(replace(fleet, rotated=False)).seconds_to_last > cold(fleet).seconds_to_last * 1.2


@modest
@given(st.integers(2, 40), st.integers(10**5, 16 * MB))
def test_one_chunk_goes_to_one_after_another(nodes, nbytes):
    fleet = Settings(nodes, nodes, nbytes, uploads=1, disk_write_rate=1e15, origin_rate=1e15)
    first = 0.02 + nbytes / fleet.origin_connection_rate
    last = first + (nodes - 2) * nbytes / fleet.nic_rate
    found = cold(fleet)
    assert found.seconds_to_first == pytest.approx(first, rel=1e-6)
    assert found.seconds_to_last == pytest.approx(last, rel=1e-6)


def test_who_owns_a_chunk_without_wanting_it_pulls_it_when_asked():
    """With one replica on a hundred nodes: a round trip to the owner, and its to the origin."""
    fleet = Settings(100, 1, 16 * MB)
    asked = 0.0 if cold(fleet).busiest_node_sent_bytes == 0 else fleet.node_round_trip
    seconds = asked + 0.02 + 16 * MB / fleet.origin_connection_rate
    assert cold(fleet).seconds_to_last == pytest.approx(seconds)


# What holds for all


@modest
@given(fleets)
def test_every_byte_is_pulled_once_and_reaches_all(fleet):
    found, warm = simulate(fleet, Deadline.after(60)).bursts
    assert found.origin_bytes == fleet.model_bytes
    assert found.lost_bytes == 0
    assert found.replicas == fleet.replicas
    if fleet.replicas >= fleet.nodes:
        assert found.received_bytes == fleet.nodes * fleet.model_bytes
    sent = found.mean_node_sent_bytes * fleet.nodes
    assert found.received_bytes == pytest.approx(sent + fleet.model_bytes, abs=2)
    assert (warm.origin_bytes, warm.received_bytes, warm.replicas) == (0, 0, fleet.replicas)
    assert warm.seconds_to_last == pytest.approx(fleet.model_bytes / fleet.disk_read_rate)


@modest
@given(fleets | failures)
def test_no_time_is_below_what_the_rates_allow(fleet):
    found = cold(fleet)
    narrowest = min(fleet.nic_rate, fleet.disk_write_rate)
    least = [
        fleet.model_bytes / narrowest,
        min(fleet.model_bytes, fleet.chunk_bytes) / fleet.origin_connection_rate,
        fleet.model_bytes / fleet.origin_rate,
    ]
    if not fleet.failing:
        least.append(found.busiest_node_sent_bytes / fleet.nic_rate)
        assert found.bound_seconds == pytest.approx(max(least), rel=1e-5)
    assert found.bound_seconds >= max(least) * (1 - 1e-5)
    assert found.seconds_to_last >= found.bound_seconds * (1 - 1e-5)
    assert found.seconds_to_first >= fleet.model_bytes / narrowest * (1 - 1e-6)
    assert found.seconds_to_first <= found.seconds_to_median <= found.seconds_to_last


@modest
@given(failures)
def test_whoever_is_left_gets_the_model(fleet):
    fleet = replace(fleet, replicas=fleet.nodes)
    found = cold(fleet)
    assert math.isfinite(found.seconds_to_last)
    assert found.origin_bytes >= fleet.model_bytes
    assert 0 <= found.lost_bytes <= found.received_bytes
    kept = found.received_bytes - found.lost_bytes
    assert kept == pytest.approx(found.replicas * fleet.model_bytes, abs=2)
    if not fleet.step:
        lost = min(round(fleet.failing * fleet.nodes), fleet.nodes - 1)
        assert found.replicas == fleet.nodes - lost


@modest
@given(fleets, st.sampled_from([0.01, 3.0, 1000.0]))
def test_a_fleet_that_is_faster_throughout_takes_as_much_less(fleet, factor):
    faster = {name: getattr(fleet, name) * factor for name in RATES}
    for name in ("node_round_trip", "origin_round_trip", "step"):
        faster[name] = getattr(fleet, name) / factor
    before, after = cold(fleet), cold(replace(fleet, **faster))
    assert after.seconds_to_last * factor == pytest.approx(before.seconds_to_last, rel=1e-3)


@modest
@given(fleets, st.sampled_from(RATES))
def test_more_bandwidth_anywhere_takes_no_longer(fleet, name):
    """But for what another order of the same transfers may cost, which is little."""
    wider = replace(fleet, **{name: getattr(fleet, name) * 2})
    assert cold(wider).seconds_to_last <= cold(fleet).seconds_to_last * 1.1 + fleet.step


@modest
@given(st.data())
def test_no_end_of_a_transfer_gives_more_than_it_has(data):
    count = data.draw(st.integers(1, 30))
    drawn = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    source, target = (np.array(data.draw(drawn), dtype=np.intp) for _ in range(2))
    weight = np.array(data.draw(drawn)) + 1.0
    limit = np.array(data.draw(drawn)) * 1.0
    room = np.array([0.0, 1.0, 2.0, 5.0, 100.0])
    found = share(weight, source, target, room.copy(), room.copy(), limit, 64)
    used_there = np.bincount(target, found, minlength=5)
    used_here = np.bincount(source, found * weight, minlength=5)
    assert (found <= limit + 1e-6).all()
    assert (used_here <= room + 1e-6).all()
    assert (used_there <= room + 1e-6).all()
    full = (
        (used_here >= room - 1e-6)[source]
        | (used_there >= room - 1e-6)[target]
        | (found >= limit - 1e-6)
    )
    assert full.all()


def test_one_short_end_is_shared_by_max_min():
    zeros, ends = np.zeros(3, dtype=np.intp), np.arange(3)
    limit = np.array([1.0, 9.0, 9.0])
    found = share(np.ones(3), zeros, ends, np.array([9.0]), np.full(3, 9.0), limit, 64)
    assert found.tolist() == pytest.approx([1, 4, 4])


# Failures


def test_nodes_lost_before_the_start_cost_the_wait_and_no_byte():
    fleet = Settings(20, 20, 600 * MB, failing=0.2, failing_at=0, detection=3)
    found = cold(fleet)
    assert (found.origin_ratio, found.lost_bytes, found.replicas) == (1, 0, 16)
    assert 3 < found.seconds_to_last < 3.5


def test_what_only_the_lost_nodes_had_is_pulled_again():
    """Most of the model is on many nodes by then: what is pulled again is less than their part."""
    found = cold(Settings(20, 20, 2000 * MB, failing=0.2, failing_at=0.5))
    assert 1 < found.origin_ratio < 1.25
    assert found.lost_bytes > 4 * 2000 * MB * 0.3


# Steps and groups


def test_steps_come_close_to_events():
    fleet = Settings(30, 30, 2000 * MB)
    exact, fine, coarse = (
        cold(replace(fleet, step=step)).seconds_to_last for step in (0.0, 0.001, 0.007)
    )
    assert exact == pytest.approx(fine, rel=0.05)
    assert exact == pytest.approx(coarse, rel=0.2)
    assert abs(exact - fine) < abs(exact - coarse)


def test_groups_come_close_to_single_nodes():
    fleet = Settings(300, 300, 6000 * MB)
    single, grouped = cold(fleet), cold(replace(fleet, groups=100))
    assert grouped.origin_bytes == single.origin_bytes
    assert grouped.received_bytes == single.received_bytes
    assert grouped.busiest_node_sent_bytes == single.busiest_node_sent_bytes
    assert grouped.seconds_to_last == pytest.approx(single.seconds_to_last, rel=0.1)


def test_a_deadline_ends_it():
    with pytest.raises(DeadlineExceeded):
        simulate(Settings(3000, 3000, 14000 * MB), Deadline.after(0))


# The command


def test_the_command(capsys, tmp_path):
    file = tmp_path / "forecast.json"
    words = ["--nodes", "40", "--replicas", "100", "--size", "1GB", "--failing", "0.1"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "deliver", "--simulate", *words, "--json", str(file)], [BENCH])
    assert not end.value.code
    found = json.loads(file.read_text())
    assert found["assumptions"]["nic_rate"] == 12.5e9
    first, second = found["bursts"]
    assert (first["burst"], second["burst"]) == ("cold", "warm")
    assert (first["nodes"], first["replicas"], first["model_bytes"]) == (40, 90, 10**9)
    out = capsys.readouterr().out
    assert "not a measurement" in out
    assert "nic rate 12.5 GB/s" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--simulate", "--nodes", "0"), "--nodes"),
        (("--simulate", "--replicas", "-1"), "--replicas"),
        (("--simulate", "--size", "big"), "--size"),
        (("--simulate", "--failing", "1"), "failing"),
        (("--simulate", "--failing", "nan"), "failing"),
        (("--simulate", "--nodes", "70000"), "65536"),
        (("--simulate", "--deadline", "0"), "--deadline"),
        (("--simulate", "--json", "/no/such/folder/x.json"), "no folder"),
        (("--failing", "0.1"), "--simulate"),
    ],
)
def test_refusals(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", "deliver", *words], [BENCH])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["nic_rate", "node_round_trip", "step"])
def test_settings_without_sense_are_refused(name):
    with pytest.raises(UsageError, match=name.replace("_", " ")):
        Settings(2, 2, 100, **{name: -1.0})
