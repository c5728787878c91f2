#!/usr/bin/env python3
"""The bounds of scripts/gpu-check: on what a card said, on records that reach them and that miss them, and without a card."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import sys
import tempfile
import types
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu-check"))
gpu_check = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
loader.exec_module(gpu_check)

POINTWISE, NORMS = (f"{family}: least share of the memory's bandwidth" for family in ("pointwise", "layer norm"))


def record(share, seconds):
    """Of bench train, as far as bounds are about it."""
    return {"description": "NVIDIA H200, 139.8 GiB, sm_90",
            "runs": {"compiled": {"seconds": {"median": seconds}, "share_of_published_peak": share}}}


PYTORCH = {"torch": "2.15.0", "gpt2_bf16": 130.0, "gpt2_bf16_compiled": 96.0}


def lines_of(report):
    return {line["what"]: line for line in gpu_check.bounded(report)["bounds"]}


def training(result, theirs):
    values = gpu_check.speed_values(result, theirs, "gpt2")
    return lines_of({"stage": "bench train gpt2", "result": "pass", "values": values})


class Bounds(unittest.TestCase):
    def test_training_that_reaches_them_passes(self):
        lines = training(record(0.62, 0.075), PYTORCH)
        self.assertEqual(lines[gpu_check.MFU], {"what": gpu_check.MFU, "bound": 0.6, "value": 0.62, "pass": True})
        self.assertAlmostEqual(lines[gpu_check.TORCH]["value"], 1.28)  # 96 ms over 75
        self.assertTrue(lines[gpu_check.TORCH]["pass"])

    def test_training_that_misses_them_says_so(self):
        lines = training(record(0.41, 0.0801), PYTORCH)
        self.assertFalse(lines[gpu_check.MFU]["pass"])
        self.assertFalse(lines[gpu_check.TORCH]["pass"])
        self.assertEqual(gpu_check.text_of(lines[gpu_check.MFU]), f"{gpu_check.MFU}: 0.410, bound 0.60, miss")
        # A bound that is met exactly is met.
        self.assertTrue(training(record(0.6, 0.08), PYTORCH)[gpu_check.MFU]["pass"])
        self.assertTrue(training(record(0.6, 0.08), PYTORCH)[gpu_check.TORCH]["pass"])

    def test_what_was_not_measured_says_why(self):
        unknown = record(0.5, 0.08)
        del unknown["runs"]["compiled"]["share_of_published_peak"]
        lines = training(unknown, "ModuleNotFoundError: No module named 'torch'")
        self.assertEqual(lines[gpu_check.MFU]["not run"], "no peak is known of NVIDIA H200, 139.8 GiB, sm_90")
        self.assertEqual(gpu_check.text_of(lines[gpu_check.TORCH]),
                         f"{gpu_check.TORCH}: bound 1.20, not run: ModuleNotFoundError: No module named 'torch'")
        for line in training({**record(0.9, 0.01), "times": "mean nothing: virtual GPU"}, PYTORCH).values():
            self.assertEqual(line["not run"], "times mean nothing: virtual GPU")
        failed = lines_of({"stage": "bench train gpt2", "result": "fail"})
        self.assertEqual({line["not run"] for line in failed.values()}, {"the stage failed"})

    def test_pytorch_tells_its_times_or_why_there_are_none(self):
        said = {"torch": "2.15.0", "settings": {"card": "NVIDIA H200"},
                "results": {name: {"median_ms": ms} for name, ms in (("gpt2_bf16", 130.0), ("gpt2_bf16_compiled", 96.0))}}
        with tempfile.TemporaryDirectory() as folder:
            def told(script, left=60):
                python = Path(folder) / "python"
                python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
                python.chmod(0o755)
                return gpu_check.time_pytorch(Path(folder), python, "gpt2", ["--batch-size", "16"], left)
            self.assertEqual(told(f"echo a warning >&2; echo '{json.dumps(said)}'; echo another >&2"),
                             {"torch": "2.15.0", "card": "NVIDIA H200", "gpt2_bf16": 130.0, "gpt2_bf16_compiled": 96.0})
            self.assertEqual(told("echo Traceback; echo 'no torch'; exit 1"), "no torch")
            self.assertEqual(told("sleep 60", left=5), "PyTorch took over 5 s")
            self.assertEqual(told("true", left=4), "no time was left")
            self.assertEqual(told('case "$*" in *"gpt2_bf16 gpt2_bf16_compiled --device cuda"*"--batch-size 16") echo right; esac; exit 1'), "right")

    def test_products_stand_beside_the_best_of_the_library(self):
        rates = {"library": {"a": 700.0, "b": 690.0}, "first suggestion": {"a": 650.0, "b": 750.0}, "own": {"a": 220.0, "b": 220.0}}
        line, = lines_of({"stage": "products", "result": "pass", "values": gpu_check.product_values(rates)}).values()
        self.assertAlmostEqual(line["value"], 0.92)
        self.assertFalse(line["pass"])
        rates["first suggestion"]["b"] = 700.0
        line, = lines_of({"stage": "products", "result": "pass", "values": gpu_check.product_values(rates)}).values()
        self.assertTrue(line["pass"])

    def test_a_file_of_a_card_is_judged(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            gpu_check.bounds(types.SimpleNamespace(file=ROOT / "examples/bench/gpu/h100.json"))
        # gelu in bf16 and the gradient of layer norm in bf16 were the slowest.
        self.assertEqual(said.getvalue(), f"kernels: {POINTWISE}: 0.770, bound 0.85, miss\nkernels: {NORMS}: 0.780, bound 0.85, miss\n")

    def test_families_of_a_table_have_their_least_share(self):
        reports = json.loads((ROOT / "examples/bench/gpu/h100.json").read_text(encoding="utf-8"))
        kernels, = (r for r in reports if r["stage"] == "kernels")
        f32 = [line for line in kernels["lines"] if " f32[" in line]
        lines = lines_of({**kernels, "lines": f32})
        self.assertEqual(lines[POINTWISE]["value"], 0.97)
        self.assertTrue(lines[POINTWISE]["pass"])
        self.assertEqual(lines[NORMS]["value"], 0.84)
        # Products stand beside another peak.
        self.assertNotIn("attention: least share of the memory's bandwidth", gpu_check.least_shares(kernels["lines"]))

    def test_every_bound_is_of_a_stage(self):
        names = [name for name, _ in gpu_check.stages(Path("."), None, None, {}, 0)]
        self.assertEqual(set(gpu_check.BOUNDS) - set(names), set())
        self.assertEqual(len(names), len(set(names)))


if __name__ == "__main__":
    unittest.main()
