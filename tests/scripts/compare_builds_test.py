#!/usr/bin/env python3
"""scripts/measure/compare_builds.py on programs that only say how long they take: who is slower is found, noise is not."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "measure" / "compare_builds.py"

# `bench serve` and `bench ops` whose times are 1 and 2, but for FACTORS, which names rows, and a noise of 10 %.
BENCH = """#!{python} -SE
import json, os, random, sys
draw = random.Random()
factors = json.loads(os.environ.get("FACTORS", "{{}}"))
time = lambda name, base: base * factors.get(name, 1) * draw.uniform(0.9, 1.1) ** float(os.environ.get("NOISE", "0"))
if sys.argv[1] == "ops":
    ops = [{{"name": name, "ns": {{"median": time(name, 2)}}}} for name in ("add", "sum")]
    open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({{"result": {{"ops": ops}}}}))
    sys.exit()
print(json.dumps({{"names": ["step", "view", "{own}"]}}), flush=True)
for line in sys.stdin:
    word, *name = line.split()
    print(json.dumps({{"ms": time(name[0], 1)}} if word == "go" else {{}}), flush=True)
"""


class CompareBuilds(unittest.TestCase):
    linked_anew = False

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.builds = []
        for name, own in (("a", "adamw"), ("b", "gelu_large")):
            path = Path(self.folder.name) / name / "bin" / "bench"
            path.parent.mkdir(parents=True)
            path.write_text(BENCH.format(python=sys.executable, own=own))
            path.chmod(0o755)
            self.builds += ["--build", str(path.parents[1])]

    def tearDown(self):
        self.folder.cleanup()

    def run_script(self, *flags, **factors):
        """Its status, and the rows of its report."""
        report = Path(self.folder.name) / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-B", str(SCRIPT), *self.builds, "--rounds", "3", "--json", str(report), *flags]
        command += [] if self.linked_anew else ["--as-linked"]
        if factors:
            command += ["--second", "FACTORS=" + json.dumps(factors)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not report.exists():
            return done.returncode, done.stderr
        rows = json.loads(report.read_text())
        return done.returncode, {row["name"]: row for row in rows["rows"]}, [row["name"] for row in rows["slower"]], done.stdout

    def test_rows_of_both_builds_are_compared(self):
        status, rows, slower, out = self.run_script()
        self.assertEqual((status, slower), (0, []), out)
        self.assertEqual(set(rows), {"step", "view", "ops: add", "ops: sum"})
        self.assertAlmostEqual(rows["step"]["ratio"], 1)

    def test_who_is_slower_is_named(self):
        status, rows, slower, out = self.run_script(**{"view": 1.05, "sum": 1.03, "step": 1.01, "add": 0.5})
        self.assertEqual((status, slower), (1, ["view", "ops: sum"]), out)
        self.assertAlmostEqual(rows["view"]["ratio"], 1.05)
        self.assertAlmostEqual(rows["ops: add"]["ratio"], 0.5)
        self.assertEqual(self.run_script("--limit", "6", **{"view": 1.05})[0], 0)

    def test_noise_is_in_the_interval(self):
        status, rows, slower, out = self.run_script("--first", "NOISE=1", "--second", "NOISE=1", "--rounds", "9", view=1.5)
        self.assertEqual((status, slower), (1, ["view"]), out)
        low, high = rows["step"]["interval"]
        self.assertLess(low, rows["step"]["ratio"] * 0.995)
        self.assertGreater(high, rows["step"]["ratio"] * 1.005)
        low, high = rows["view"]["interval"]
        self.assertTrue(1.3 < low < high < 1.7, (low, high))

    def test_rows_can_be_chosen(self):
        self.assertEqual(set(self.run_script("--only", "view")[1]), {"view"})
        self.assertEqual(set(self.run_script("--only", "=view")[1]), {"view"})
        self.assertIn("no row has such a name", self.run_script("--only", "=vie")[1])
        self.assertEqual(set(self.run_script("--only", "ops: s,step")[1]), {"ops: sum", "step"})
        self.assertIn("no row has such a name", self.run_script("--only", "nothing")[1])

    def test_each_round_links_both_programs_with_another_gap(self):
        self.linked_anew = True
        for folder in self.builds[1::2]:
            # The linker: keeps how far the object it is given moves code, and puts the program where it is told.
            (Path(folder) / "link").write_text('#!/bin/sh\nsize -A "$3" | grep unlikely >> gaps; cp bin/bench "$2"\n')
            text = "rule link\n  command = : && sh link -o bin/bench && :\nbuild bench: link\n"
            (Path(folder) / "build.ninja").write_text(text)
        status, rows, slower, out = self.run_script("--rounds", "9", **{"view": 1.05})
        self.assertEqual((status, slower), (1, ["view"]), out)
        for folder in self.builds[1::2]:
            gaps = [int(line.split()[1]) for line in (Path(folder) / "gaps").read_text().splitlines()]
            self.assertEqual(len(gaps), 9 + 9)  # "view" is measured again
            self.assertTrue(all(0 < gap < 4096 and gap % 16 == 0 for gap in gaps), gaps)
            self.assertGreater(len(set(gaps)), 9)
        (Path(self.builds[1]) / "build.ninja").unlink()
        self.assertIn("give --as-linked", self.run_script()[1])

    def test_finished_rounds_are_not_taken_again(self):
        kept = Path(self.folder.name) / "rounds.jsonl"
        status, before, slower, out = self.run_script("--results", str(kept), view=1.05)
        self.assertEqual(len(kept.read_text().splitlines()), 1 + 3)
        # With other times, but what the file holds counts; the row that was slower is measured afresh.
        lines = kept.read_text().splitlines()
        kept.write_text("\n".join(line.replace('"view": [1.05', '"view": [1.5') for line in lines) + "\n")
        status, rows, slower, out = self.run_script("--results", str(kept), view=1.05)
        self.assertAlmostEqual(rows["view"]["ratio"], 1.5)
        self.assertAlmostEqual(rows["step"]["ratio"], before["step"]["ratio"])
        kept.write_text("\n".join(kept.read_text().splitlines()[:-1]) + "\n")  # interrupted in the third round
        self.run_script("--results", str(kept), view=1.05)
        self.assertEqual(len(kept.read_text().splitlines()), 1 + 3)
        self.assertIn("other programs or options", self.run_script("--results", str(kept), "--only", "view", view=1.05)[1])

    def test_what_is_wrong_is_said(self):
        self.builds = self.builds[:2]
        self.assertIn("expected --build twice", self.run_script()[1])
        self.builds += ["--build", "/nowhere"]
        self.assertIn("there is no /nowhere/bin/bench", self.run_script()[1])


if __name__ == "__main__":
    unittest.main()
