#!/usr/bin/env python3
"""Ranks on several hosts, each started with its environment by hand: what is told, when, and by whom.

TESSERA_BIN is the folder of the programs.
"""
import os
import re
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts  # noqa: E402

BIN = Path(os.environ.get("TESSERA_BIN", "build/bin")).resolve()
PORT = 29500
TRAIN = [BIN / "train", "--model=gpt-nano", "--batch-size=4", "--set=layers=1", "--set=dim=32", "--set=heads=2", "--seq-len=16"]


class ByHand:
    """A job on `hosts` with `each` ranks on each: the store is tlaunch's on node0, and ranks get variables alone."""

    def __init__(self, hosts, each, master="node0", **variables):
        self.hosts, self.each, self.master = hosts, each, master
        self.variables = {"OMP_NUM_THREADS": "1", **variables}
        self.store = hosts[0].start(
            BIN / "tlaunch", f"--rdzv-endpoint={master}:{PORT}", "bash", "-c", "echo key=$TESSERA_STORE_KEY; exec sleep 1000"
        )
        line = self.store.stdout.readline()
        if not line.startswith("key="):
            raise AssertionError(f"tlaunch says: {line}{self.store.stdout.read()}")
        self.key = line.strip()[4:]
        self.ranks = []

    def start(self, *command):
        world = len(self.hosts.hosts) * self.each
        for host in self.hosts.hosts:
            for local in range(self.each):
                rank = host.number * self.each + local
                environment = {
                    **os.environ, **self.variables, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(self.each), "GROUP_RANK": str(host.number), "MASTER_ADDR": self.master,
                    "MASTER_PORT": str(PORT), "TESSERA_STORE_KEY": self.key, "TESSERA_RUN_ID": "by-hand",
                }
                self.ranks.append(host.start(*command, env=environment))
        return self.ranks

    def start_and_await_a_step(self, *command):
        self.start(*command, "--steps=1000000", "--metrics=/dev/fd/1")
        self.await_steps(1)

    def await_steps(self, count):
        """Reads what rank 0 says of its next steps; returns the seconds between them."""
        times, before, line = [], time.monotonic(), "it printed nothing"
        for line in self.ranks[0].stdout:
            if line.startswith("{"):
                now = time.monotonic()
                times.append(now - before)
                before = now
            if len(times) == count:
                return times
        raise AssertionError(f"rank 0 ended: {line}")

    def end_store(self, how):
        """Sends tlaunch, which serves the store, the signal `how`."""
        for pid in pids_of(self.hosts[0], "rdzv-endpoint"):
            self.hosts[0].run("kill", f"-{int(how)}", pid)

    def outputs(self, ranks=None, timeout=120):
        return [r.communicate(timeout=timeout)[0] for r in ranks or self.ranks]


def pids_of(host, text):
    """Processes on `host`, by its own numbers, whose command line has `text`."""
    return host.run("pgrep", "-f", text).stdout.split()


def parameters(text):
    """The hash of the trained parameters."""
    return re.search(r"parameters ([0-9a-f]{32})", text).group(1)


class ByHandTest(unittest.TestCase):
    def check_ended_well(self, job, texts):
        for rank, text in zip(job.ranks, texts):
            self.assertEqual(rank.returncode, 0, text)

    def test_a_name_that_is_loopback_on_its_own_host(self):
        """As Debian's /etc/hosts has it: 127.0.1.1 node0. The bits are those of one rank."""
        with Hosts(2, own_name="127.0.1.1") as hosts:
            job = ByHand(hosts, 2, TESSERA_JOIN_TIMEOUT="20")
            job.start(*TRAIN, "--steps=3", "--deterministic")
            texts = job.outputs()
            self.check_ended_well(job, texts)
            alone = hosts[1].run(*TRAIN, "--steps=3", "--deterministic")
            self.assertEqual(parameters(texts[0]), parameters(alone.stdout))

    def test_the_host_of_ranks_that_are_gone_is_named(self):
        with Hosts(2) as hosts:
            job = ByHand(hosts, 2)
            job.start_and_await_a_step(*TRAIN)
            began = time.monotonic()
            hosts[1].end()
            for text in job.outputs(job.ranks[:2]):
                self.assertRegex(text, r"rank [23] on node1 is gone, .*; rank [23] is on node1 too; restart the job")
            self.assertLess(time.monotonic() - began, 30, "it was not noticed before the deadline")

    def test_a_slow_link_is_no_death_while_bytes_move(self):
        with Hosts(2) as hosts:
            job = ByHand(hosts, 1, TESSERA_TIMEOUT="2")
            hosts[1].rate("1mbit")
            began = time.monotonic()
            job.start(*TRAIN, "--set=dim=128", "--steps=1")
            self.check_ended_well(job, job.outputs())
            self.assertGreater(time.monotonic() - began, 5, "no collective took longer than the deadline")

    def test_a_link_that_is_lost_is_reported_at_the_deadline_on_both_sides(self):
        with Hosts(2) as hosts:
            job = ByHand(hosts, 1, TESSERA_TIMEOUT="3")
            job.start_and_await_a_step(*TRAIN)
            began = time.monotonic()
            hosts[1].link("hole")
            here, there = job.outputs()
            self.assertLess(time.monotonic() - began, 3 + 4, "the side without the store came late")
            self.assertRegex(here, "rank 1 on node1 (not seen for|is gone)")
            self.assertRegex(there, "rank 0 on node0 (not seen for|is gone)")

    def test_steps_go_on_without_the_store(self):
        """Collectives of 0.2 s make the watchdog ask the store, whose answers must not be waited for."""
        with Hosts(2) as hosts:
            job = ByHand(hosts, 1)
            job.start_and_await_a_step(*TRAIN, "--set=dim=64")
            hosts[1].rate("8mbit")
            job.await_steps(3)
            for how in (signal.SIGSTOP, signal.SIGKILL):  # silent, then gone
                job.end_store(how)
                times = job.await_steps(12)
                self.assertGreater(max(times), 0.15, "calls were too short to be looked at")
                self.assertLess(max(times), 1.5, f"steps took {times}")


if __name__ == "__main__":
    if os.environ.get("TESSERA_NO_NAMESPACES") == "1":
        print("hosts: left out, TESSERA_NO_NAMESPACES=1")
        sys.exit(77)
    unittest.main(verbosity=2)
