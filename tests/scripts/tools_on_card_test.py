#!/usr/bin/env python3
"""tools_on_card_test ON_VIRTUAL_GPU LIBRARIES BIN: bench, profiles, errors of memory, --doctor and gpu-check with a card, which is
virtual here, and without one."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ON_VIRTUAL_GPU, LIBRARIES, BIN = sys.argv[1:4]
TINY = ["--kib", "64", "--edge", "32"]


def run(program, *arguments, card=True, seed="1", devices=1, env=None):
    """Status and output of a program, with virtual cards or without any."""
    command = [f"{BIN}/{program}", *arguments]
    if card:
        command = [ON_VIRTUAL_GPU, "--libraries", LIBRARIES, "--seed", seed, "--devices", str(devices), *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
                          env={**os.environ, **(env or {})})
    return done.returncode, done.stdout


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def good(self, *command, **options):
        status, output = run(*command, **options)
        self.assertEqual(status, 0, output)
        return output

    def bench(self, *arguments, ranks=0, **options):
        """What a command of bench prints, and its JSON; on so many ranks of tlaunch, if any."""
        path = self.folder / "bench.json"
        launcher = ["tlaunch", "--nproc", str(ranks), f"{BIN}/bench"] if ranks else ["bench"]
        output = self.good(*launcher, *arguments, "--json", str(path), **options)
        return output, json.loads(path.read_text(encoding="utf-8"))["result"]


class Precision(Folder):
    def test_tf32_is_for_those_who_ask(self):
        for precision in ("fp32", "tf32"):
            counters = self.folder / precision
            self.good("train", "--device", "cuda", "--model", "mlp", "--batch-size", "4", "--steps", "1", "--precision", precision,
                      env={"VGPU_COUNTERS": str(counters)})
            products = [line for line in counters.read_text(encoding="utf-8").splitlines() if "cublasLt DEFAULT" in line]
            self.assertTrue(products)
            self.assertEqual({"TF32" in line for line in products}, {precision == "tf32"}, products)


class Bench(Folder):
    def check_head(self, output, result):
        self.assertRegex(output, r"(?m)^cuda:0: virtual GPU, .*sm_")
        self.assertRegex(output, r"(?m)^times mean nothing here: virtual GPU")
        self.assertEqual(result["device"], "cuda:0")
        self.assertIn("mean nothing", result["times"])
        self.assertEqual(result["clock"], "device")

    def test_roofline(self):
        output, result = self.bench("roofline", "--device", "cuda", *TINY)
        self.check_head(output, result)
        names = [r["what"] for r in result["rows"]]
        for name in ("host to device", "device to host", "device to host, ordinary memory", "copy by the runtime",
                     "triad, a = b + s (c - b)"):
            self.assertIn(name, names)
        for dtype in ("f32", "bf16", "f16"):
            self.assertEqual(sum(n.startswith(f"matmul {dtype} 32^3") for n in names), 3)
        self.assertTrue(all(r["rate"] > 0 for r in result["rows"]))

    def test_ops(self):
        output, result = self.bench("ops", "--device", "cuda:0", "--samples", "9")
        self.check_head(output, result)
        ops = {r["name"]: r for r in result["ops"]}
        for name in ("empty", "add", "add_backward", "contract 16 x 4 x 4", "item", "view"):
            self.assertGreater(ops[name]["host_ns"]["median"], 0)
        # A view is no work for the device, an addition is.
        self.assertGreater(ops["add"]["device_ns"]["median"], ops["view"]["device_ns"]["median"])
        only = self.bench("ops", "--device", "cuda", "--samples", "9", "--only", "mul_number")[1]
        self.assertEqual([r["name"] for r in only["ops"]], ["mul_number"])

    def test_kernels(self):
        output, result = self.bench("kernels", "--device", "cuda", *TINY, "--samples", "1")
        self.check_head(output, result)
        families = {r["family"] for r in result["rows"]}
        self.assertEqual(families, {"pointwise", "copy", "random", "reduce", "scan", "softmax", "layer norm", "cross-entropy",
                                    "embedding", "gather", "matmul", "attention", "convolution", "AdamW"})
        rows = {r["what"]: r for r in result["rows"]}
        self.assertEqual(rows["add f32[16, 1024]"]["bytes"], 3 * 64 * 1024)
        self.assertEqual(rows["softmax backward bf16[32, 1024]"]["bytes"], 3 * 64 * 1024)
        self.assertEqual(rows["AdamW step, 0.0164 M values"]["bytes"], 7 * 64 * 1024)
        product = rows["matmul bf16 32^3, as a linear layer forward (b transposed)"]
        self.assertEqual(product["flops"], 2 * 32**3)
        self.assertGreater(product["share_of_product"], 0)
        for row in result["rows"]:
            self.assertAlmostEqual(row["gbytes_per_s"], row["bytes"] / row["seconds"] * 1e-9)

    def test_train(self):
        output, result = self.bench("train", *GPT, "--edge", "448", "--compile", "--samples", "9", "--warmup", "2")
        self.check_head(output, result)
        self.assertTrue(any(re.match(r"cuBLASLt [\d.]+: /", line) for line in result["libraries"]), result["libraries"])
        self.assertFalse(any(line.startswith("cuda:") for line in result["libraries"]))
        self.assertEqual([result[key] for key in ("model", "dtype", "ranks", "local_batch", "global_batch", "seq_len")],
                         ["gpt-nano", "f32", 1, 12, 12, 16])
        # 6 for each weight that is multiplied and each token, and attention: two layers of width 32, a vocabulary of 65.
        weights, tokens = 2 * 12 * 32 * 32 + 32 * 65, 12 * 16
        self.assertEqual(result["model_flops"], tokens * (6 * weights + 12 * 2 * 32 * 16))
        self.assertNotIn("published", result["product_peak"])
        for name, step in result["runs"].items():
            self.assertEqual(step["compiled"], name == "compiled")
            self.assertEqual(step["seconds"]["samples"], 9)
            self.assertAlmostEqual(step["tokens_per_s"] * step["seconds"]["median"], tokens)
            self.assertAlmostEqual(step["model_flops_per_s"] * step["seconds"]["median"] / result["model_flops"], 1)
            self.assertAlmostEqual(step["share_of_measured_peak"] * result["product_peak"]["measured"] / step["model_flops_per_s"], 1)
            self.assertGreater(step["peak_bytes"], 16 * result["parameters"])  # parameters, gradients, two moments
            self.assertLess(step["peak_bytes"], 2 << 20)  # of one of the two ways, not of both, nor of the products
            self.assertLess(step["loss"], 4.3)
        self.assertGreater(result["runs"]["compiled"]["compile_s"], 0)

    def test_collectives(self):
        sizes = ["--min-bytes", "4096", "--max-bytes", "32768", "--seconds", "0"]
        output, result = self.bench("collectives", "--device", "cuda", *sizes, ranks=2, devices=2)
        self.assertIn("times mean nothing here: virtual GPU", output)
        self.assertEqual([result["device"], result["ranks"], result["backend"]], ["cuda:0", 2, "nccl"])
        rows = {(row["verb"], row["bytes"]): row for row in result["rows"]}
        factors = {"all_reduce": 1, "all_gather": 1 / 2, "reduce_scatter": 1 / 2, "all_to_all": 1 / 2, "gather": 1 / 2, "scatter": 1 / 2,
                   "broadcast": 1, "reduce": 1, "send_recv": 1, "all_reduce bucket": 1}  # 2 (n - 1) / n, (n - 1) / n, 1
        self.assertEqual(set(rows), {("barrier", 0), ("vote", 0), *((verb, size) for verb in factors for size in (4096, 32768))})
        for (verb, size), row in rows.items():
            self.assertAlmostEqual(row["gbytes_per_s"] * row["us"]["median"] * 1e3, size)
            if verb not in ("barrier", "vote"):
                self.assertAlmostEqual(row["bus_gbytes_per_s"] / row["gbytes_per_s"], factors[verb])
        # Two ranks on one card, and ranks that are threads.
        for device, ranks, backend in (("cuda:0", 2, "shm, staged"), ("cuda:0", 0, "loopback, staged"), ("cuda", 0, "nccl")):
            _, result = self.bench("collectives", "--device", device, *sizes, "--only", "all_reduce", ranks=ranks, devices=2)
            self.assertEqual(result["backend"], backend)
            self.assertEqual(len(result["rows"]), 4)

    def test_scaling(self):
        output, (job,) = self.bench("scaling", "--device", "cuda", "--model", "mlp", "--batch-size", "4", "--rounds", "6", "--steps", "1",
                                    devices=2)
        self.assertRegex(output, r"(?m)^cuda:0: virtual GPU, .*\ntimes mean nothing here: virtual GPU")
        self.assertEqual([job[key] for key in ("nproc", "backend", "device", "batch_size", "global_batch", "precision", "compile")],
                         [2, "nccl", "cuda:0", 4, 8, "fp32", False])
        self.assertIn("mean nothing", job["times"])
        for phase in ("solo_ms", "unconnected_ms", "lockstep_ms", "ddp_ms", "fsdp_ms"):
            self.assertEqual(len(job[phase]), 6)
            self.assertGreater(min(job[phase]), 0)
        self.assertGreater(job["weak_scaling"]["median"], 0)
        for phase, batch in (("solo", 4), ("ddp", 8), ("fsdp", 8)):
            self.assertAlmostEqual(job["samples_per_s"][phase] * statistics.median(job[f"{phase}_ms"]) * 1e-3, batch)

    def test_strong_scaling(self):
        command = ["scaling", "--device", "cuda", "--model", "mlp", "--rounds", "6", "--steps", "1", "--strong", "--batch-size"]
        output, (job,) = self.bench(*command, "8", devices=2)
        self.assertIn("strong scaling: solo / ranks / ddp", output)
        self.assertEqual([job[key] for key in ("scaling", "ranks", "batch_size", "global_batch")], ["strong", 2, 4, 8])
        shares = sorted(solo / 2 / ddp for solo, ddp in zip(job["solo_ms"], job["ddp_ms"]))
        self.assertAlmostEqual(job["strong_scaling"]["median"], statistics.median(shares))
        for phase in ("solo", "ddp"):
            self.assertAlmostEqual(job["samples_per_s"][phase] * statistics.median(job[f"{phase}_ms"]) * 1e-3, 8)
        status, output = run("bench", *command, "9", devices=2)
        self.assertEqual(status, 1, output)
        self.assertIn("bench scaling: --strong: 2 ranks cannot share a batch of 9 evenly; give a --batch-size that they divide", output)

    def test_serve(self):
        command = [ON_VIRTUAL_GPU, "--libraries", LIBRARIES, f"{BIN}/bench", "serve", "--device", "cuda", "--edge", "32"]
        done = subprocess.run(command, input="go add\ngo mlp\ngo contractions\npeak\nfree\nquit\n", capture_output=True, text=True, timeout=300,
                              check=False)
        head, add, step, other, peak, free = map(json.loads, done.stdout.splitlines())
        self.assertEqual(head["settings"]["device"], "cuda:0")
        self.assertNotIn("contractions", head["names"])  # those are of the CPU's library
        self.assertGreater(add["ms"], 0)
        self.assertGreater(step["ms"], add["ms"])
        self.assertEqual(other, {"error": "go contractions"})
        self.assertGreater(min(peak.values()), 0)
        self.assertEqual(free, {"free": True})

    def test_errors(self):
        cases = [(("roofline", "--device", "cudda"), True, 'device: "cudda" is not a device of this build; it has cpu, meta, cuda'),
                 (("ops", "--device", "cuda:7"), True, "bench ops: there is no cuda:7; cuda has one device, of index 0"),
                 (("kernels", "--device", "meta"), True, "bench kernels: --device meta has no values to measure"),
                 (("kernels", "--device", "cuda", "--edge", "4"), True, "bench kernels: --edge 4: expected 8 to 65536"),
                 (("roofline", "--kib", "64"), True, "bench roofline: --kib and --edge are for --device of another kind"),
                 (("ops", "--device", "cuda", "--samples", "2"), True, "bench ops: --samples 2: a median takes at least 9"),
                 (("ops", "--device", "cuda", "--only", "none-such"), True, "bench ops: --only none-such: none of these"),
                 (("kernels", "--device", "cuda", "--only", "none-such"), True, "softmax backward bf16"),
                 (("train", "--device", "cuda", "--threads", "2"), True, "bench train: --device cuda: --threads, --cpu, --cpu-time"),
                 (("train", "--device", "cuda", "--cpu-time"), True, "and --detail are for the CPU"),
                 (("train", "--edge", "64"), True, "bench train: --kib and --edge are for --device of another kind"),
                 (("train", "--device", "cuda", "--samples", "2"), True, "bench train: --samples 2: a median takes at least 9"),
                 (("scaling", "--device", "cuda"), True, "bench scaling: --device cuda: there is one card, and scaling takes two"),
                 (("scaling", "--device", "cuda:0"), True, "each rank takes the card of its own number; write cuda"),
                 (("serve", "--device", "cuda", "--cpu", "0"), True, "bench serve: --device cuda: --cpu and --cpu-time are for the CPU"),
                 *(((command, "--device", "cuda"), False, f"bench {command}: cuda:0 cannot be used: no driver: ")
                   for command in ("roofline", "train", "scaling", "collectives", "serve"))]
        for arguments, card, expected in cases:
            status, output = run("bench", *arguments, card=card)
            self.assertEqual(status, 1, output)
            self.assertEqual(output.count("\n"), 1, output)
            self.assertIn(expected, output)
        status, output = run("bench", "scaling", "--device", "cuda", "--nproc", "2,3", devices=2)
        self.assertEqual((status, output.count("\n")), (1, 1), output)
        self.assertIn("bench scaling: --nproc 3: there are 2 cards, and each rank takes one", output)


GPT = ["--model", "gpt-nano", "--set", "layers=2", "--set", "dim=32", "--seq-len", "16", "--device", "cuda"]


class Profile(Folder):
    def test_a_profile_has_lanes_and_memory_of_the_card(self):
        trace, metrics = self.folder / "trace.json", self.folder / "metrics"
        output = self.good("train", *GPT, "--steps", "6", "--profile", str(trace), "--metrics", str(metrics))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.assertEqual(lanes[0], "program")
        self.assertIn("cuda:0", lanes.values())
        work = [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == "cuda:0"]
        program = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
        # Each op of the program that enqueued something is on the card's lane, in the same order.
        named = [e["name"] for e in sorted(work, key=lambda e: e["ts"])]
        self.assertTrue({"contract", "softmax", "layer_norm", "embedding", "transfer"} & set(named) > {"contract", "embedding"})
        self.assertGreater(len(named), 100)
        # One stream does one thing after the other, and nothing before the program asked for it, but for the clocks' difference.
        ends = [e["ts"] + e["dur"] for e in sorted(work, key=lambda e: e["ts"])]
        begins = sorted(e["ts"] for e in work)
        self.assertTrue(all(b >= e - 2 for e, b in zip(ends, begins[1:])))
        self.assertGreater(begins[0], min(e["ts"] for e in program) - 1e4)
        held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory of cuda:0"]
        self.assertGreater(len(held), 20)
        self.assertRegex(output, r"(?m)^contract +device ")
        told = re.search(r"(?m)^memory of cuda:0: .* at most (\S+) MB; .* by \d+ calls, 0 of them in these steps; (\d+) alloc", output)
        self.assertTrue(told, output)
        self.assertGreater(int(told[2]), 50)
        # The metrics' peak is the card's, of the whole run so far.
        peak = [json.loads(line)["peak_bytes"] for line in metrics.read_text(encoding="utf-8").splitlines() if "peak_bytes" in line][-1]
        self.assertAlmostEqual(peak * 1e-6, float(told[1]), places=1)
        self.assertGreaterEqual(peak, max(held))
        host = re.search(r"(?m)^memory of cpu: .* at most (\S+) MB", output)
        self.assertNotAlmostEqual(float(host[1]), float(told[1]), places=1)

    def test_losses_are_those_without_a_profile(self):
        def losses(*more):
            path = self.folder / "metrics"
            self.good("train", *GPT, "--steps", "5", "--metrics", str(path), *more)
            return re.findall(r'"(?:loss|params_xxh128)":[^,}]*', path.read_text(encoding="utf-8"))
        plain = losses()
        self.assertEqual(len(plain), 6)
        self.assertEqual(losses("--profile", str(self.folder / "trace.json")), plain)


class Memory(Folder):
    ERROR = re.compile(r"cuda:0: out of memory: .* requested for (.*?); .*? held by tensors \((.*?)\), .*; largest holders: (.*?); use")

    def shortage(self, mib, *arguments):
        status, output = run("train", *arguments, seed="late", env={"TESSERA_CUDA_MEMORY": str(mib)})
        self.assertEqual(status, 1, output)
        found = self.ERROR.search(output)
        self.assertTrue(found, output)
        return found.groups()

    def test_a_shortage_in_forward_names_modules(self):
        asking, uses, holders = self.shortage(64, "--model", "gpt-nano", "--batch-size", "64", "--steps", "2", "--device", "cuda")
        self.assertRegex(asking, r"^activations of ")
        self.assertRegex(uses, r"^activations [\d.]+ MiB, ")
        self.assertIn("parameters ", uses)
        five = holders.split(", ")
        self.assertEqual(len(five), 5)
        modules = [h for h in five if re.match(r"activations of \w+(\.\w+)+ [\d.]+ MiB in \d+ block", h)]
        self.assertGreaterEqual(len(modules), 3, holders)

    def test_a_shortage_of_the_optimizer_names_parameters_and_state(self):
        asking, uses, holders = self.shortage(160, "--model", "mlp", "--set", "hidden=3000", "--steps", "1", "--device", "cuda")
        self.assertRegex(asking, "^optimizer state of ")
        self.assertRegex(uses, "optimizer state")
        self.assertRegex(holders, "parameters of ")


class Doctor(Folder):
    def test_with_a_card(self):
        output = run("tlaunch", "--doctor")[1]
        self.assertRegex(output, r"(?m)^ok    CUDA driver for CUDA \d+\.\d+: .*libcuda\.so\.1$")
        self.assertRegex(output, r"(?m)^ok    cuda:0: virtual GPU, 4\.0 GiB, capability \d+\.\d+$")
        self.assertRegex(output, r"(?m)^ok    NVRTC \d+\.\d+: .*libnvrtc\.so\.1[23]$")
        self.assertRegex(output, r"(?m)^ok    cuDNN [\d.]+: /.*/libcudnn\.so\.9$")
        self.assertRegex(output, r"(?m)^ok    cuBLASLt [\d.]+: .*/libcublasLt\.so\.13$")
        self.assertRegex(output, r"(?m)^ok    NCCL 2\.[\d.]+: .*/libnccl\.so\.2$")
        hints = len(re.findall("(?m)^hint", output))
        self.assertRegex(output, rf"(?m)^\d+ to fix, {hints} hints$")

    def test_the_drivers_own_version_is_in_the_name_of_its_file(self):
        libraries = self.folder / "libraries"
        libraries.mkdir()
        for library in Path(LIBRARIES).iterdir():
            (libraries / library.name).symlink_to(library.resolve())
        (libraries / "libcuda.so.1").unlink()
        (libraries / "libcuda.so.580.65.06").write_bytes(Path(LIBRARIES, "libcuda.so.1").read_bytes())
        (libraries / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")
        done = subprocess.run([ON_VIRTUAL_GPU, "--libraries", libraries, f"{BIN}/train", "--devices"], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertRegex(done.stdout, r"(?m)^ok    CUDA driver for CUDA \d+\.\d+: .*/libcuda\.so\.580\.65\.06$")

    def test_without_a_card(self):
        status, output = run("tlaunch", "--doctor", card=False)
        self.assertEqual(status, 1 if re.search("(?m)^FIX", output) else 0)
        self.assertRegex(output, r"(?m)^hint  CUDA: no driver: .*\n      -> install the card's driver$")
        self.assertIn("0 to fix" if status == 0 else "to fix", output)

    def test_a_program_that_cannot_be_asked_is_a_hint(self):
        alone = self.folder / "tlaunch"
        alone.write_bytes(Path(BIN, "tlaunch").read_bytes())
        alone.chmod(0o755)
        output = subprocess.run([alone, "--doctor"], capture_output=True, text=True, timeout=60, check=False).stdout
        self.assertRegex(output, r"(?m)^hint  devices: .*/train: No such file or directory$")
        (self.folder / "train").write_text("#!/bin/sh\necho no luck; exit 3\n", encoding="utf-8")
        (self.folder / "train").chmod(0o755)
        output = subprocess.run([alone, "--doctor"], capture_output=True, text=True, timeout=60, check=False).stdout
        self.assertRegex(output, r"(?m)^hint  devices: .*/train --devices failed: no luck$")


class GpuCheck(Folder):
    """scripts/gpu-check run, on the programs of this build instead of those of an archive."""

    def setUp(self):
        super().setUp()
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for program in Path(BIN).iterdir():
            (self.bin / program.name).symlink_to(program.resolve())
        (self.folder / "reference").symlink_to(Path(ON_VIRTUAL_GPU).resolve().parent / "reference")
        (self.folder / "run").write_text((Path(ON_VIRTUAL_GPU).parent / "gpu-check").read_text(encoding="utf-8"), encoding="utf-8")

    def check(self, *stages, card=True, devices=1):
        path = self.folder / "report.json"
        command = [sys.executable, self.folder / "run", "--json", path, "--only", *stages]
        if card:
            command = [ON_VIRTUAL_GPU, "--libraries", LIBRARIES, "--devices", str(devices), *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return done, {report["stage"]: report for report in json.loads(path.read_text(encoding="utf-8"))}

    def test_stages_pass(self):
        done, reports = self.check("ops", "train mlp")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(list(reports), ["facts", "train mlp", "ops"])
        self.assertRegex(reports["facts"]["cards"][0], "cuda:0: virtual GPU")
        self.assertLess(reports["train mlp"]["value"]["compiled"], 1e-5)
        self.assertEqual({run: len(losses) for run, losses in reports["train mlp"]["losses"].items()},
                         {"cpu": 20, "cuda": 20, "again": 20, "compiled": 20})

    def wrap(self, program, script):
        """Runs the shell script for the program; "$REAL" is the real one."""
        path = self.bin / program
        real = path.resolve()
        path.unlink()
        path.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def test_losses_apart_fail(self):
        self.wrap("train", 'case "$*" in *cuda*) set -- "$@" --seed 7;; esac\nexec $REAL "$@"')
        done, reports = self.check("train mlp")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(reports["train mlp"]["result"], "fail")
        self.assertGreater(reports["train mlp"]["value"]["cuda"], 1e-4)

    def test_two_runs_of_other_bits_fail(self):
        calls = self.folder / "calls"
        self.wrap("train", f'$REAL "$@" || exit\necho >> {calls}\nfor metrics; do :; done\n'
                        f'[ $(wc -l < {calls}) -ne 3 ] || sed -i "s/params_xxh128.:./&0/" "$metrics"')
        done, reports = self.check("train mlp")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(reports["train mlp"]["result"], "fail")
        self.assertEqual(reports["train mlp"]["value"]["cuda"], reports["train mlp"]["value"]["again"])

    def test_a_test_that_fails_is_named(self):
        test = self.bin / "test_cuda"
        test.unlink(missing_ok=True)
        test.write_text("#!/bin/sh\necho '[ RUN      ] A.B'\necho not equal\necho '[  FAILED  ] A.B (3 ms)'\nexit 1\n", encoding="utf-8")
        test.chmod(0o755)
        done, reports = self.check("cuda")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(reports["cuda"]["failed"], {"A.B": "not equal"})

    def test_without_a_card(self):
        done, reports = self.check("train mlp", "bench train gpt2", card=False)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(list(reports), ["facts", "train mlp", "bench train gpt2"])
        self.assertIn("gpu-check: there is no card", done.stderr)
        for stage in ("train mlp", "bench train gpt2"):
            self.assertEqual((reports[stage]["result"], reports[stage]["why"]), ("not run", "no card"))
        self.assertIn("train mlp: not run: no card\n", done.stdout)
        self.assertEqual(done.stdout.count("bound 0.60, not run: no card\n"), 1)
        self.assertEqual([line["not run"] for line in reports["bench train gpt2"]["bounds"]], ["no card", "no card"])

    # bench with models and sizes that suit a virtual card, for what gpu-check asks of it.
    SMALL = '''for last; do :; done
case "$*" in
  train*) $REAL train --device cuda --model mlp --batch-size 4 --compile --samples 9 --warmup 0 --edge 32 --json "$last" ;;
  collectives*) $REAL collectives --device DEVICE --min-bytes 4096 --max-bytes 4096 --seconds 0 --only all_reduce --json "$last" ;;
  scaling*) $REAL scaling --device cuda --model mlp --batch-size 4 --rounds 6 --steps 1 --json "$last" ;;
esac'''

    def test_benchmarks_on_one_card(self):
        self.wrap("bench", self.SMALL.replace("DEVICE", "$3"))
        done, reports = self.check("bench train gpt2", "bench collectives", "bench scaling")
        self.assertEqual(done.returncode, 0, done.stdout)
        trained = reports["bench train gpt2"]
        self.assertEqual(trained["record"]["model"], "mlp")
        self.assertTrue(all(line["not run"].startswith("times mean nothing: virtual GPU") for line in trained["bounds"]))
        # PyTorch is not here, or sees that the card is none.
        self.assertRegex(trained["pytorch"], "No module named 'torch'|finds no card|CUDA")
        self.assertEqual(reports["bench collectives staged"]["record"]["backend"], "shm, staged")
        for stage in ("bench collectives nccl", "bench scaling"):
            self.assertEqual(reports[stage]["why"], "one card")
        self.assertIn("bound 0.90, not run: one card\n", done.stdout)

    def test_benchmarks_on_two_cards(self):
        # Ranks have a card each even where they are to share one, which is a failure.
        self.wrap("bench", self.SMALL.replace("DEVICE", "cuda"))
        done, reports = self.check("bench collectives", "bench scaling", devices=2)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual({stage: report["result"] for stage, report in reports.items()},
                         {"facts": "pass", "bench collectives staged": "fail", "bench collectives nccl": "pass", "bench scaling": "pass"})
        self.assertEqual(reports["bench scaling"]["record"][0]["nproc"], 2)
        line, = reports["bench scaling"]["bounds"]
        self.assertTrue(line["not run"].startswith("times mean nothing: virtual GPU"))

    def test_a_loss_that_is_no_number_fails(self):
        self.wrap("bench", self.SMALL + """\nsed -i 's/"loss": .*/"loss": null/' "$last\"""")
        done, reports = self.check("bench train gpt2")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(reports["bench train gpt2"]["result"], "fail")
        self.assertEqual({line["not run"] for line in reports["bench train gpt2"]["bounds"]}, {"the stage failed"})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
