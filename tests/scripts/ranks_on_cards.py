#!/usr/bin/env python3
"""ranks_on_cards.py ON_VIRTUAL_GPU LIBRARIES TRAIN TLAUNCH: two, four and eight ranks of `train`, each with a card of its own, learn
what two ranks on the CPU learn: losses agree within rounding, whatever the strategy, in orders of the card's work that seeds draw and
in checked mode, which would find an event that is missing. With --deterministic, parameters have one hash over ranks and strategies
(not that of the CPU, whose products sum in another order). A collective that hangs, or gets an error of NCCL, ends the job soon, with
one error. Ranks that share a card pass through the host, which is said in one line. tlaunch binds a rank near its card.
What two cards save, four ranks of the CPU load with the same bits, and the other way round. (scripts/measure/faults.py --cards kills ranks.)
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ON_CARD, LIBRARIES, TRAIN, TLAUNCH = sys.argv[1:5]
MODEL = ["--model", "gpt-nano", "--set", "layers=2", "--set", "dim=32", "--seq-len", "16", "--batch-size", "4"]
WORK = tempfile.TemporaryDirectory()
LAST = {}  # what the latest run left beside its losses


def run(options, devices=2, how=(), ranks=2, environment=None, steps=5):
    metrics = os.path.join(WORK.name, "metrics")
    if os.path.exists(metrics):
        os.remove(metrics)
    command = [ON_CARD, "--libraries", LIBRARIES, "--devices", str(devices), *how, TLAUNCH, "--nproc", str(ranks), TRAIN, *MODEL,
               "--steps", str(steps), "--metrics", metrics, *options]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **(environment or {})})
    losses, LAST["hash"] = [], None
    if os.path.exists(metrics):
        with open(metrics, encoding="utf-8") as lines:
            entries = [json.loads(line) for line in lines]
        losses = [entry["loss"] for entry in entries if "loss" in entry]
        LAST["hash"] = entries[-1].get("params_xxh128") if entries else None
    return done.returncode, losses, done.stdout + done.stderr, time.monotonic() - start


def expect(holds, what, output):
    if not holds:
        sys.exit(f"ranks_on_cards: {what}\n{output}")


# The last step's loss is that of parameters which all steps before have changed.
status, on_cpu, output, _ = run(["--device", "cpu"])
expect(status == 0 and len(on_cpu) == 5, f"on the CPU: status {status}, {len(on_cpu)} losses", output)
status, _, output, _ = run(["--device", "cuda"], devices=4, ranks="gpu", steps=1)
expect(status == 0 and "4 ranks" in output, f"--nproc gpu on four cards: status {status}", output)

# A machine of two nodes with four cores each, as files of Linux. Cards 0 and 2 are attached to node 1, cards 1 and 3 to node 0.
def machine_file(path, text):
    path = os.path.join(WORK.name, "sys", path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        print(text, file=file)


def node_file(card):
    return f"bus/pci/devices/0000:{card + 1:02x}:00.0/numa_node"


for cpu in range(8):
    topology = f"devices/system/cpu/cpu{cpu}/topology"
    machine_file(f"{topology}/core_id", cpu)
    machine_file(f"{topology}/thread_siblings", f"{1 << cpu:08x}")
for node, cpus in enumerate(("0000000f", "000000f0")):
    machine_file(f"devices/system/node/node{node}/cpumap", cpus)
    machine_file(f"devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 1000000 kB")
machine_file("devices/system/cpu/online", "0-7")
machine_file("devices/system/node/online", "0-1")
for card in range(4):
    machine_file(node_file(card), 1 - card % 2)


def placed(*options):
    environment = {**os.environ, "HWLOC_FSROOT": WORK.name}
    command = [ON_CARD, "--libraries", LIBRARIES, "--devices", "4", TLAUNCH, *options, "--dry-run", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done.stdout + done.stderr


NEAR = ["rank 0: cpus 4-5:", "rank 1: cpus 0-1:", "rank 2: cpus 6-7:", "rank 3: cpus 2-3:"]
for options in (["--nproc", "gpu"], ["--nproc", "4", "--bind", "gpu"]):
    expect(all(line in placed(*options) for line in NEAR), f"{options}: ranks are not on the cores near their cards", placed(*options))
    expect("note:" not in placed(*options), f"{options}: a note where all is as asked", placed(*options))
for options, answer in ((["--nproc", "gpu", "--bind", "core"], "rank 0: cpus 0-1:"),
                        (["--nproc", "5", "--bind", "gpu"], "--bind gpu: there are 5 ranks and 4 cards")):
    expect(answer in placed(*options), f"{options}: not {answer}", placed(*options))
machine_file(node_file(3), -1)  # the machine does not say where the card is

def expect_placed(what, *lines):
    said = placed("--nproc", "gpu")
    expect(all(line in said for line in lines) and said.count("note:") == 1, f"{what}: not {lines}", said)


expect_placed("a card of no node", "rank 0: cpus 0-1:",
              "note: --bind gpu: the machine does not say which cores are near the card of rank 3, so ranks have equal shares of all 8 cores\n")
machine_file(node_file(3), 5)
expect_placed("a card at a node without cores", "rank 0: cpus 0-1:", "note: --bind gpu: no core of NUMA node 5, where the card of rank 3 is")
for node, cpus in enumerate(("0000003f", "000000c0")):
    machine_file(f"devices/system/node/node{node}/cpumap", cpus)
for card in range(4):
    machine_file(node_file(card), 1)
expect_placed("cards at a node of two cores", "rank 0: cpus 6:", "rank 3: cpus 7:",
              "note: --bind gpu: the 4 ranks with cards at NUMA node 1 share its 2 cores\n")
# A machine of one node, as most virtual ones are, has no core that is nearer to a card than another, whether or not it says the node.
shutil.rmtree(os.path.join(WORK.name, "sys/devices/system/node/node1"))
machine_file("devices/system/node/online", "0")
machine_file("devices/system/node/node0/cpumap", "000000ff")
for nodes in ((-1, -1, -1, -1), (0, -1, 0, -1)):
    for card, node in enumerate(nodes):
        machine_file(node_file(card), node)
    said = placed("--nproc", "gpu")
    expect("note:" not in said and all(f"rank {r}: cpus {2 * r}-{2 * r + 1}:" in said for r in range(4)), f"one node, cards at {nodes}", said)

for ranks, strategy, how in ((2, "ddp", "--seed 1"), (2, "fsdp", "--seed 2"), (2, "tp", "--seed 3"), (2, "pp", "--seed late"),
                             (2, "ddp", "--seed 4 --check"), (2, "fsdp", "--seed 5 --check"), (2, "ddp --compile", "--seed 6"),
                             (2, "fsdp --compile", "--seed 7"), (2, "tp --compile", "--seed 8"),
                             (2, "fsdp --offload --compile", "--seed 9"),
                             (4, "ddp", "--seed 6"), (4, "hsdp --mesh replicate=2,shard=2", "--seed 7"),
                             (4, "fsdp+tp --mesh dp=2,tp=2", "--seed 8"), (4, "pp --mesh dp=2,pp=2", "--seed 9"),
                             (8, "hsdp+tp --mesh replicate=2,shard=2,tp=2", "--seed 10")):
    status, losses, output, seconds = run(["--device", "cuda", "--strategy", *strategy.split()], devices=ranks, ranks=ranks, how=how.split())
    expect(status == 0, f"{ranks} ranks, {strategy} {how}: status {status}", output)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, on_cpu, strict=True))
    expect(worst < 1e-5, f"{ranks} ranks, {strategy} {how}: losses {losses}, on the CPU {on_cpu}", output)
    expect("through the host" not in output, f"{ranks} ranks, {strategy} {how}: not by NCCL", output)
    print(f"{ranks} ranks, {strategy} {how}: losses differ by at most {worst:.1e} of the CPU's, {seconds:.1f} s")

# Contractions that ranks share have bits of their own, which one rank has too if it is asked to.
WHOLE, SHARED = ["--deterministic"], ["--deterministic", "--exact-contraction"]
for exact, runs in ((WHOLE, ((1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "hsdp --mesh replicate=2,shard=2"))),
                    (SHARED, ((1, "ddp"), (2, "tp"), (4, "fsdp+tp --mesh dp=2,tp=2")))):
    hashes = {}
    for ranks, strategy in runs:
        status, _, output, _ = run([*exact, "--device", "cuda", "--strategy", *strategy.split()], devices=ranks, ranks=ranks)
        expect(status == 0 and LAST["hash"], f"{ranks} ranks, {strategy} {exact}: status {status}", output)
        hashes[f"{ranks} of {strategy}"] = LAST["hash"]
    expect(len(set(hashes.values())) == 1, f"{exact}: parameters differ: {hashes}", "")
    print(f"{' '.join(exact)}: parameters {LAST['hash']} on {'; '.join(hashes)}")

status, losses, output, _ = run(["--device", "cuda"], devices=1)
worst = max(abs(a - b) / abs(b) for a, b in zip(losses, on_cpu, strict=True))
expect(status == 0 and worst < 1e-5, f"two ranks on one card: status {status}, losses {losses}", output)
expect(output.count("ranks 0 and 1 share card") == 1, "two ranks on one card: not said once", output)


RUNS = os.path.join(WORK.name, "runs")


def hash_of(strategy, device, options=(), how=(), ranks=2, steps=4):
    """The hash of all parameters at the end of a run in fp16."""
    status, _, output, _ = run(["--strategy", strategy, "--device", device, "--precision", "fp16", *options], how=how, ranks=ranks,
                               steps=steps)  # fmt: skip
    expect(status == 0, f"{strategy} on {device}, {options}: status {status}", output)
    expect(device == "cpu" or "every CPU" not in output, f"{strategy} on {device}: told of the CPU", output)
    with open(os.path.join(WORK.name, "metrics"), encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][-1]["params_xxh128"]


def resumed(strategy, device, steps, more=(), **how):
    return hash_of(strategy, device, ["--checkpoint", RUNS, "--resume", *more], steps=steps, **how)


# A save has the bits of its step, although the next steps go on while it is copied: with as many steps, a run that resumes has nothing
# left to do but to say them.
four = hash_of("fsdp", "cuda", ["--checkpoint", RUNS, "--save-every", "2"], how=["--seed", "6"])
expect(resumed("fsdp", "cpu", 4, ranks=4) == four, "four ranks of the CPU loaded other bits than two cards have saved", "")
two = hash_of("fsdp", "cuda", how=["--seed", "late"], steps=2)
shutil.rmtree(os.path.join(RUNS, "step-000000004"))
os.remove(os.path.join(RUNS, "latest"))
expect(resumed("fsdp", "cpu", 2, ranks=4) == two, "a later step is in a save of two cards", "")
six = resumed("fsdp", "cpu", 6, ranks=4)
expect(resumed("ddp", "cuda", 6, how=["--seed", "7"]) == six, "two cards loaded other bits than four ranks of the CPU have saved", "")
print("two cards and four ranks of the CPU save and load the same bits")
for how in (["--seed", "8"], ["--seed", "9", "--check"]):
    expect(hash_of("fsdp", "cuda", ["--offload"], how=how) == four, f"offloaded parameters have other bits, {how}", "")
expect(resumed("fsdp+tp", "cuda", 6, more=["--mesh", "dp=2,tp=1", "--offload"]) == six, "offloaded parameters are loaded with other bits", "")
print("parameters in memory of the host have the bits of those on cards")


def expect_end(words, what, options=(), environment=None):
    status, _, output, seconds = run(["--device", "cuda", *options], environment={"TESSERA_TIMEOUT": "3", **environment}, steps=50)
    expect(status not in (0, None), f"{what}: status {status}", output)
    expect(words in output, f"{what}: no '{words}'", output)
    expect(seconds < 40, f"{what}: it took {seconds:.0f} s", output)
    print(f"{what}: the job ends after {seconds:.1f} s with '{words}'")


expect_end("all ranks are in the call, but not all of its data has come", "a collective that hangs", environment={"VGPU_NCCL": "hang:1:9"})
expect_end("in a captured graph on world (cuda)", "a collective that hangs in a graph", ["--compile", "--strategy", "fsdp"],
           {"VGPU_NCCL": "hang:1:200"})  # fmt: skip
expect_end("remote process exited or there was a network error", "an error of NCCL's", environment={"VGPU_NCCL": "error:1:9"})
expect_end("NCCL: ncclCommInitRankConfig: unhandled system error", "a communicator that is refused",
           environment={"VGPU_NCCL": "refuse:ncclCommInitRankConfig"})
left = [name for name in os.listdir("/dev/shm") if "vgpu" in name]
expect(not left, f"left in /dev/shm: {left}", "")
print("ranks_on_cards: ranks on cards learn what they learn on the CPU, and failures end the job")
