#!/usr/bin/env python3
"""tlaunch on several hosts: one agent on each, which meet, start ranks, and end or start again together.

TESSERA_BIN is the folder of the programs.
"""
import os
import re
import signal
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from by_hand_test import BIN, TRAIN, parameters, pids_of  # noqa: E402
from hosts import Hosts  # noqa: E402

PORT = 29511
SECRET = "a secret of this test, long enough"


class Agents:
    """tlaunch on each of `hosts`, with `each` ranks; `options` are those of all."""

    def __init__(self, hosts, each, options, command, **variables):
        self.hosts, self.each, self.options, self.command = hosts, each, options, command
        self.variables = {"TESSERA_JOB_KEY": SECRET, "OMP_NUM_THREADS": "1", **variables}
        self.agents = {}

    def start(self, *numbers, each=None, command=None, more=(), **variables):
        for k in numbers:
            self.agents[k] = self.hosts[k].start(
                BIN / "tlaunch", f"--nnodes={len(self.hosts.hosts)}", f"--node-rank={k}", f"--rdzv-endpoint=node0:{PORT}",
                f"--nproc={each or self.each}", "--join-timeout=60", *self.options, *more, *(command or self.command),
                env={**os.environ, **self.variables, **variables},
            )
        return self

    def ends(self, timeout=60):
        """What each agent printed, by its host."""
        return {k: agent.communicate(timeout=timeout)[0] for k, agent in self.agents.items()}

    def codes(self):
        return {k: agent.returncode for k, agent in self.agents.items()}


def kill_agent(host, how=signal.SIGKILL):
    for pid in pids_of(host, "bin/tlaunch --nnodes"):
        host.run("kill", f"-{int(how)}", pid)


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"it ended before it said {text!r}: {''.join(lines)}")


class AgentsTest(unittest.TestCase):
    def check_two_hosts_train(self, **how):
        with Hosts(2, **how) as hosts:
            began = time.monotonic()
            job = Agents(hosts, 2, [], [*TRAIN, "--steps=3", "--deterministic"]).start(1, 0)
            texts = job.ends()
            took = time.monotonic() - began
            self.assertEqual(job.codes(), {0: 0, 1: 0}, texts)
            self.assertIn("[node0 rank0]", texts[0])
            self.assertNotIn("rank2", texts[0])
            alone = hosts[1].run(*TRAIN, "--steps=3", "--deterministic")
            self.assertEqual(parameters(texts[0]), parameters(alone.stdout))
            return took

    def test_two_hosts_have_the_bits_of_one_rank(self):
        self.assertLess(self.check_two_hosts_train(), 10 + 5 * 2)

    def test_a_name_that_is_loopback_on_its_own_host(self):
        self.check_two_hosts_train(own_name="127.0.1.1")

    def test_ranks_know_where_they_stand(self):
        with Hosts(3) as hosts:
            script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK, attempt $TESSERA_RESTART_COUNT"
            job = Agents(hosts, 2, [], ["bash", "-c", script]).start(2, 1, 0)
            texts = job.ends()
            for k in range(3):
                for local in range(2):
                    rank = 2 * k + local
                    self.assertIn(f"[node{k} rank{rank}] {rank} of 6, {local} of 2 on {k}, attempt 0\n", texts[k])
            self.assertEqual(job.codes(), {0: 0, 1: 0, 2: 0})

    def test_the_rank_that_failed_first_is_named_with_its_host_on_all(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 2, [], ["bash", "-c", "[ $RANK = 3 ] && { echo I fail; exit 7; }; sleep 100"]).start(0, 1)
            texts = job.ends()
            self.assertEqual(job.codes(), {0: 7, 1: 7})
            for k in (0, 1):
                self.assertRegex(texts[k], r"tlaunch: rank 3 on node1 failed first: exit status 7 after .* s")
                self.assertEqual(texts[k].count("failed first"), 1, texts[k])

    def test_a_killed_rank_is_named_by_the_ranks_of_other_hosts_at_once(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, [], [*TRAIN, "--steps=1000000", "--metrics=/dev/fd/1"]).start(0, 1)
            read_until(job.agents[0], '"step":3')
            began = time.monotonic()
            for pid in pids_of(hosts[1], "^[^ ]*bin/train"):
                hosts[1].run("kill", "-9", pid)
            texts = job.ends()
            self.assertLess(time.monotonic() - began, 5)
            self.assertRegex(texts[0], r"\[node0 rank0\] .*: rank 1 on node1 is gone, signal 9 \(Killed\)")
            self.assertRegex(texts[0], r"tlaunch: rank 1 on node1 failed first: signal 9 \(Killed\)")
            self.assertEqual(job.codes(), {0: 137, 1: 137})

    def test_all_ranks_start_again_after_a_failure(self):
        with Hosts(2) as hosts:
            script = "echo attempt $TESSERA_RESTART_COUNT; sleep 0.2; [ $RANK = 2 -a $TESSERA_RESTART_COUNT -lt 2 ] && exit 5; exit 0"
            job = Agents(hosts, 2, ["--max-restarts=2"], ["bash", "-c", script]).start(0, 1)
            texts = job.ends()
            self.assertEqual(job.codes(), {0: 0, 1: 0}, texts)
            for k in (0, 1):
                for attempt in range(3):
                    self.assertEqual(texts[k].count(f"] attempt {attempt}\n"), 2, texts[k])
                self.assertIn("tlaunch: restarting all ranks, restart 2 of 2", texts[k])

    def test_a_host_that_is_lost_ends_the_job_and_is_named(self):
        for victim in (1, 0):
            with Hosts(2) as hosts:
                job = Agents(hosts, 1, [], ["bash", "-c", "echo ready; exec sleep 100"]).start(0, 1)
                read_until(job.agents[1 - victim], "ready")
                began = time.monotonic()
                kill_agent(hosts[victim])
                text = job.agents[1 - victim].communicate(timeout=30)[0]
                self.assertLess(time.monotonic() - began, 3)
                self.assertRegex(text, rf"tlaunch: node {victim} \(node{victim}\)(, which leads,)? is lost: ")
                self.assertEqual(job.agents[1 - victim].returncode, 1)
                time.sleep(0.5)
                for k in (0, 1):
                    self.assertEqual(pids_of(hosts[k], "sleep 100"), [], f"a rank is left on node{k}")

    def test_a_host_that_is_silent_is_lost_at_its_timeout(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--node-timeout=1.5"], ["bash", "-c", "echo ready; exec sleep 100"]).start(0, 1)
            read_until(job.agents[0], "ready")
            began = time.monotonic()
            hosts[1].link("hole")
            texts = job.ends()
            took = time.monotonic() - began
            self.assertGreater(took, 1.2)
            self.assertLess(took, 1.5 + 3)
            self.assertIn("tlaunch: node 1 (node1) is lost: no word for 1.5 s", texts[0])
            self.assertIn("tlaunch: node 0 (node0), which leads, is lost: no word for 1.5 s", texts[1])

    def test_a_cut_that_is_shorter_than_the_timeout_is_survived(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--node-timeout=8"], ["bash", "-c", "echo ready; sleep 6; echo attempt $TESSERA_RESTART_COUNT"]).start(0, 1)
            read_until(job.agents[0], "ready")
            hosts[1].link("hole")
            time.sleep(2)
            hosts[1].link("up")
            texts = job.ends()
            self.assertEqual(job.codes(), {0: 0, 1: 0}, texts)
            self.assertIn("attempt 0", texts[0])

    def test_a_host_that_was_lost_comes_back(self):
        """Also the one that leads; the others wait for it, and all ranks start again."""
        script = "echo attempt $TESSERA_RESTART_COUNT; [ $TESSERA_RESTART_COUNT = 2 ] || exec sleep 100"
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--max-restarts=5"], ["bash", "-c", script]).start(0, 1)
            for attempt, victim in enumerate((1, 0)):
                read_until(job.agents[1 - victim], f"attempt {attempt}\n")
                kill_agent(hosts[victim])
                time.sleep(0.2)
                job.start(victim)
            texts = job.ends()
            self.assertEqual(job.codes(), {0: 0, 1: 0}, texts)
            for k in (0, 1):
                self.assertIn("attempt 2\n", texts[k])

    def test_a_stop_signal_on_one_host_stops_all(self):
        with Hosts(2) as hosts:
            script = "trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
            job = Agents(hosts, 1, [], ["bash", "-c", script]).start(0, 1)
            read_until(job.agents[1], "ready")
            read_until(job.agents[0], "ready")
            kill_agent(hosts[1], signal.SIGTERM)
            texts = job.ends()
            for k in (0, 1):
                self.assertIn("told", texts[k])
            self.assertEqual(job.codes(), {0: 143, 1: 143}, texts)

    def test_a_host_that_is_lost_after_its_ranks_ended_well(self):
        """The job has failed: the other host's ranks could not end."""
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--max-restarts=1"], ["bash", "-c", "[ $RANK = 1 ] || { echo ready; exec sleep 100; }"]).start(0, 1)
            read_until(job.agents[0], "ready")
            time.sleep(0.7)
            kill_agent(hosts[1])
            read_until(job.agents[0], "tlaunch: node 1 (node1) is lost: ")
            kill_agent(hosts[0], signal.SIGTERM)
            text = job.agents[0].communicate(timeout=30)[0]
            self.assertEqual(job.agents[0].returncode, 143, text)

    def test_restarts_are_counted_alike_by_all(self):
        with Hosts(3) as hosts:
            job = Agents(hosts, 1, ["--max-restarts=1"], ["bash", "-c", "echo attempt $TESSERA_RESTART_COUNT; exec sleep 100"]).start(0, 1, 2)
            read_until(job.agents[2], "attempt 0\n")
            kill_agent(hosts[0])
            job.agents[0].communicate(timeout=30)
            job.start(0)
            read_until(job.agents[0], "attempt 1\n")
            read_until(job.agents[2], "attempt 1\n")
            kill_agent(hosts[1])
            texts = job.ends()
            self.assertEqual((job.codes()[0], job.codes()[2]), (1, 1), texts)

    def test_stop_signals_that_come_one_after_another(self):
        """To each host, as a scheduler sends them: ranks have their time."""
        with Hosts(2) as hosts:
            script = "trap 'sleep 1.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
            job = Agents(hosts, 1, [], ["bash", "-c", script]).start(0, 1)
            for k in (0, 1):
                read_until(job.agents[k], "ready")
            kill_agent(hosts[0], signal.SIGTERM)
            time.sleep(0.6)
            kill_agent(hosts[1], signal.SIGTERM)
            texts = job.ends()
            for k in (0, 1):
                self.assertIn("saved", texts[k])
            self.assertEqual(job.codes(), {0: 143, 1: 143}, texts)

    def test_a_stop_signal_where_ranks_have_ended_stops_those_of_other_hosts(self):
        for told in (0, 1):
            with Hosts(2) as hosts:
                script = f"[ $RANK = {told} ] && exit 0; trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
                job = Agents(hosts, 1, [], ["bash", "-c", script]).start(0, 1)
                read_until(job.agents[1 - told], "ready")
                time.sleep(0.7)
                kill_agent(hosts[told], signal.SIGWINCH)
                kill_agent(hosts[told], signal.SIGUSR1)
                kill_agent(hosts[told], signal.SIGTERM)
                texts = job.ends()
                self.assertIn("told", texts[1 - told])
                self.assertEqual(job.codes(), {0: 143, 1: 143}, texts)

    def test_a_rank_that_stays_stopped_after_others_have_ended(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--timeout=2"], ["bash", "-c", "[ $RANK = 0 ] || kill -STOP $$"]).start(0, 1)
            texts = job.ends(timeout=30)
            self.assertIn("rank 1 was stopped by a signal", texts[1])
            self.assertEqual(job.codes(), {0: 137, 1: 137}, texts)

    def test_ranks_that_cannot_be_started_on_one_host(self):
        with Hosts(2) as hosts:
            job = Agents(hosts, 1, ["--max-restarts=3"], ["bash", "-c", "exec sleep 100"])
            job.start(0).start(1, more=["--log-dir=/proc/no"])
            texts = job.ends(timeout=30)
            self.assertEqual(job.codes(), {0: 1, 1: 1}, texts)
            for k in (0, 1):
                self.assertIn("tlaunch: node1: --log-dir: cannot create /proc/no/", texts[k])

    def test_what_slurm_sets_is_enough(self):
        """As srun -N2 tlaunch has it, without a flag."""
        with Hosts(2) as hosts:
            script = "echo $RANK of $WORLD_SIZE on $GROUP_RANK, port $MASTER_PORT"
            agents = []
            for k in (1, 0):
                step = {
                    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(k), "SLURM_NODEID": str(k), "SLURM_LOCALID": "0",
                    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[0-1]", "SLURMD_NODENAME": f"node{k}",
                }
                environment = {**os.environ, "TESSERA_JOB_KEY": SECRET, **step}
                agents.insert(0, hosts[k].start(BIN / "tlaunch", "--nproc=2", "bash", "-c", script, env=environment))
            for k, agent in enumerate(agents):
                text = agent.communicate(timeout=60)[0]
                self.assertEqual(agent.returncode, 0, text)
                self.assertIn(f"[node{k} rank{2 * k}] {2 * k} of 4 on {k}", text)

    def test_bad_input_is_one_line_where_a_person_looks(self):
        with Hosts(2) as hosts:
            program = ["bash", "-c", "true"]

            def refused(there, **how):
                job = Agents(hosts, 2, [], program).start(0).start(1, **how)
                text = job.agents[1].communicate(timeout=30)[0]
                self.assertRegex(text, f"^tlaunch: {there}\n$")
                self.assertEqual(job.agents[1].returncode, 1)
                kill_agent(hosts[0], signal.SIGTERM)
                here = job.agents[0].communicate(timeout=30)[0]
                self.assertIn("signal 15 (Terminated) while waiting for the other hosts", here)
                return here

            told = refused(r"node 1 \(node1\) was started with .*: bash -c false, node 0 \(node0\) with .*: bash -c true; start all hosts alike",
                           command=["bash", "-c", "false"])
            self.assertIn("tlaunch: node 1 (node1) was refused: ", told)
            refused(r"node 1 \(node1\) was started with .* --nproc 1 .*; start all hosts alike", each=1)
            told = refused(r"node0:29511 is no agent with this host's secret \([0-9a-f]{8} from TESSERA_JOB_KEY\): .*; give all hosts one secret, .*",
                           TESSERA_JOB_KEY="another secret than theirs")
            self.assertRegex(told, r"tlaunch: [0-9]+ connections? from 10\.77\.0\.11 (was|were) turned away: it does not know the secret")


if __name__ == "__main__":
    if os.environ.get("TESSERA_NO_NAMESPACES") == "1":
        print("hosts: left out, TESSERA_NO_NAMESPACES=1")
        sys.exit(77)
    unittest.main(verbosity=2, warnings="ignore")
