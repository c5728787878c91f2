"""Hosts on one machine, for tests: each has its own network, host name, processes and mounts, and a link that can fail.

  with Hosts(2) as hosts:
      hosts[0].run("hostname")          # node0, whose address is 10.77.0.10
      hosts[1].link("down")             # its cable is out

Hosts share files, this machine's cores, and nothing else. They are made of Linux namespaces, which takes root and `ip`. What runs
on a host ends with it, and the network of the machine itself is not touched.
"""
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path


class NoHosts(Exception):
    """Hosts cannot be made on this machine."""


def check_possible():
    """Throws NoHosts where there are no namespaces."""
    if os.geteuid() != 0:
        raise NoHosts("hosts are made of namespaces, which takes root")
    if not shutil.which("ip"):
        raise NoHosts("hosts are made with ip, of the package iproute2")
    probe = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if probe.returncode:
        raise NoHosts(f"this machine has no namespaces: {probe.stderr.strip()}")


class Host:
    """One of them. `pid` is that of the process whose end is the end of all that runs there."""

    def __init__(self, number, switch, folder, own_name):
        self.number = number
        self.name = f"node{number}"
        self.address = f"10.77.0.{10 + number}"
        self._switch = switch
        self._port = f"p{number}"
        self._started = []
        names = folder / f"hosts{number}"
        lines = ["127.0.0.1 localhost"]
        if own_name:  # as Debian's installer writes it
            lines.append(f"{own_name} {self.name}")
        lines += [f"10.77.0.{10 + k} node{k}" for k in range(16) if k != number or not own_name]
        names.write_text("\n".join(lines) + "\n")
        boot = folder / f"boot{number}"
        boot.write_text(f"{os.getpid():08x}-0000-4000-8000-{number:012x}\n")
        ready = folder / f"ready{number}"
        init = (
            f"hostname {self.name}; mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; mount --bind {names} /etc/hosts; "
            f"mount --bind {boot} /proc/sys/kernel/random/boot_id; ip link set lo up; touch {ready}; while :; do sleep 3600 & wait $!; done"
        )
        spaces = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._outer = subprocess.Popen([*spaces, "bash", "-c", init], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 20
        while not ready.exists():
            if self._outer.poll() is not None or time.monotonic() > deadline:
                raise NoHosts(f"{self.name} did not start")
            time.sleep(0.01)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.pid = int(children[0])
        ip = ["nsenter", "-t", str(switch), "-n", "ip", "link"]
        subprocess.run([*ip, "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid)], check=True)
        subprocess.run([*ip, "set", self._port, "master", "br0", "up"], check=True)
        for command in (f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", *command.split()], check=True)

    def command(self, *words):
        """What runs `words` on this host, in this folder and with this environment."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", f"--wd={os.getcwd()}", "--", *map(str, words)]

    def run(self, *words, **how):
        return subprocess.run(self.command(*words), capture_output=True, text=True, **how)

    def start(self, *words, **how):
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True} | how
        self._started.append(subprocess.Popen(self.command(*words), **how))
        return self._started[-1]

    def link(self, state):
        """"up"; "down": the cable is out; "hole": what is sent vanishes, and nobody is told."""
        words = {"up": "master br0 up", "down": "down", "hole": "nomaster up"}[state]
        subprocess.run(["nsenter", "-t", str(self._switch), "-n", "ip", "link", "set", self._port, *words.split()], check=True)

    def rate(self, rate):
        """How fast this host sends, in the words of tc: "500kbit"."""
        words = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 16kb latency 200ms"
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *words.split()], check=True)

    def end(self):
        """Ends the host and all that runs on it, as pulling its plug does."""
        if self._outer.poll() is None:
            # nsenter stops itself with its child, which it would then not reap.
            for process in self._started:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
            os.kill(self.pid, signal.SIGKILL)
            self._outer.wait()


class Hosts:
    """`count` hosts, node0 and so on, whose links meet in a switch. `own_name` is what /etc/hosts of each says of its own name:
    None: its address, as that of all others."""

    def __init__(self, count, own_name=None):
        check_possible()
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._switch = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, start_new_session=True)
        self.hosts = []
        try:
            own = os.readlink("/proc/self/ns/net")
            while os.readlink(f"/proc/{self._switch.pid}/ns/net") == own:
                time.sleep(0.005)
            for words in ("add br0 type bridge forward_delay 0 stp_state 0", "set br0 up"):
                subprocess.run(["nsenter", "-t", str(self._switch.pid), "-n", "ip", "link", *words.split()], check=True)
            for k in range(count):
                self.hosts.append(Host(k, self._switch.pid, self._folder, own_name))
        except BaseException:
            self.end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def __getitem__(self, number):
        return self.hosts[number]

    def end(self):
        for host in self.hosts:
            host.end()
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
