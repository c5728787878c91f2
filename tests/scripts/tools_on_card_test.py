#!/usr/bin/env python3
"""tools_on_card_test ON_VIRTUAL_GPU LIBRARIES BIN: bench, profiles, errors of memory, --doctor and gpu-check with a card, which is
virtual here, and without one."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ON_VIRTUAL_GPU, LIBRARIES, BIN = sys.argv[1:4]
TINY = ["--kib", "64", "--edge", "32"]


def run(program, *arguments, card=True, seed="1", env=None):
    """Status and output of a program, with a virtual card or without any."""
    command = [f"{BIN}/{program}", *arguments]
    if card:
        command = [ON_VIRTUAL_GPU, "--libraries", LIBRARIES, "--seed", seed, *command]
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

    def bench(self, *arguments, **options):
        """What a command of bench prints, and its JSON."""
        path = self.folder / "bench.json"
        output = self.good("bench", *arguments, "--json", str(path), **options)
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

    def test_errors(self):
        cases = [(("roofline", "--device", "cudda"), True, 'device: "cudda" is not a device of this build; it has cpu, meta, cuda'),
                 (("ops", "--device", "cuda:7"), True, "bench ops: there is no cuda:7; cuda has one device, of index 0"),
                 (("kernels", "--device", "meta"), True, "bench kernels: --device meta has no values to measure"),
                 (("kernels", "--device", "cuda", "--edge", "4"), True, "bench kernels: --edge 4: expected 8 to 65536"),
                 (("roofline", "--kib", "64"), True, "bench roofline: --kib and --edge are for --device of another kind"),
                 (("ops", "--device", "cuda", "--samples", "2"), True, "bench ops: --samples 2: a median takes at least 9"),
                 (("ops", "--device", "cuda", "--only", "none-such"), True, "bench ops: --only none-such: none of these"),
                 (("kernels", "--device", "cuda", "--only", "none-such"), True, "softmax backward bf16"),
                 (("roofline", "--device", "cuda"), False, "bench roofline: cuda:0 cannot be used: no driver: ")]
        for arguments, card, expected in cases:
            status, output = run("bench", *arguments, card=card)
            self.assertEqual(status, 1, output)
            self.assertEqual(output.count("\n"), 1, output)
            self.assertIn(expected, output)


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
        (self.folder / "run").write_text((Path(ON_VIRTUAL_GPU).parent / "gpu-check").read_text(encoding="utf-8"), encoding="utf-8")

    def check(self, *stages, card=True):
        path = self.folder / "report.json"
        command = [sys.executable, self.folder / "run", "--json", path, "--only", *stages]
        if card:
            command = [ON_VIRTUAL_GPU, "--libraries", LIBRARIES, *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return done, {report["stage"]: report for report in json.loads(path.read_text(encoding="utf-8"))}

    def test_stages_pass(self):
        done, reports = self.check("ops", "train mlp")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(list(reports), ["facts", "ops", "train mlp"])
        self.assertRegex(reports["facts"]["cards"][0], "cuda:0: virtual GPU")
        self.assertLess(reports["train mlp"]["value"]["compiled"], 1e-5)
        self.assertEqual({run: len(losses) for run, losses in reports["train mlp"]["losses"].items()},
                         {"cpu": 20, "cuda": 20, "again": 20, "compiled": 20})

    def wrap_train(self, script):
        """Runs the shell script for train; "$REAL" is the real one."""
        train = self.bin / "train"
        real = train.resolve()
        train.unlink()
        train.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n", encoding="utf-8")
        train.chmod(0o755)

    def test_losses_apart_fail(self):
        self.wrap_train('case "$*" in *cuda*) set -- "$@" --seed 7;; esac\nexec $REAL "$@"')
        done, reports = self.check("train mlp")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(reports["train mlp"]["result"], "fail")
        self.assertGreater(reports["train mlp"]["value"]["cuda"], 1e-4)

    def test_two_runs_of_other_bits_fail(self):
        calls = self.folder / "calls"
        self.wrap_train(f'$REAL "$@" || exit\necho >> {calls}\nfor metrics; do :; done\n'
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
        done, reports = self.check("train mlp", card=False)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(list(reports), ["facts"])
        self.assertIn("gpu-check: there is no card", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
