#!/usr/bin/env python3
"""scripts/check_op_lists.py finds lists of op names above the ops, and nothing else."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "check_op_lists.py"
OPS = {
    "core/ops/a.cpp": 'const OpInfo kOps[] = {{"sum", {OpKind::kReduce, Precision::kWide, 1}},\n'
                      '                        {"prod", {OpKind::kReduce, Precision::kWide, 1}},\n'
                      '                        {"amax", {OpKind::kReduce, Precision::kAsGiven, 1}}};\n',
    "core/ops/a.def": "TESSERA_OP1(exp, fn::exp(x), kFloat, kWide, 12, , , , )\n",
    "core/dispatch/copy.cpp": 'static inline const OpInfo kOp{\n    "copy",\n    {.kind = OpKind::kOther}};\nauto text = "exact";\n',
}


class CheckOpLists(unittest.TestCase):
    def findings(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            out = subprocess.run([sys.executable, SCRIPT, "--root", root], capture_output=True, text=True)
            self.assertEqual(out.returncode, 1 if out.stdout else 0, out.stderr)
            return out.stdout.splitlines()

    def finds(self, files, text):
        found = self.findings(OPS | files)
        self.assertEqual(len(found), 1, found)
        self.assertIn(text, found[0])

    def test_the_tree_is_sound(self):
        out = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
        self.assertEqual(out.stdout, "")

    def test_a_list(self):
        self.finds({"compile/a.cpp": '\nauto dear = {"sum", "exp",\n             "copy"};\n'},
                   "compile/a.cpp:2: a list of ops (copy, exp, sum)")

    def test_comparisons_below_each_other(self):
        self.finds({"core/nn/a.cpp": 'bool f = op == "sum" ||\n         op == "prod" ||\n         op == "exp";\n'},
                   "core/nn/a.cpp:1: a list of ops (exp, prod, sum)")

    def test_one_list_is_one_finding(self):
        self.finds({"core/nn/a.cpp": '"sum",\n"prod",\n"exp",\n"copy",\n"sum",\n"prod",\n"exp",\n'}, "core/nn/a.cpp:1")

    def test_single_names_tests_comments_and_other_words(self):
        self.assertEqual(self.findings(OPS | {
            "compile/a.cpp": 'if (op == "sum" || op == "prod") f();\n// "exp"\nauto t = {"exact", "add"};\n\n\nif (op == "exp") g();\n',
            "compile/b.cpp": 'f("sum"), f("sum"), f("prod"), f("sum");\n',
            "tests/a.cpp": 'auto all = {"sum", "prod", "exp", "copy"};\n',
        }), [])

    def test_rules_that_are_none_any_more(self):
        self.finds({"dtensor/rules.cpp": 'f("sum");\n'}, "dtensor/rules.cpp:1: has no list of ops any more")

    def test_definitions_of_another_form(self):
        found = self.findings({"core/ops/a.cpp": 'define("sum");\n'})
        self.assertIn("no definition of an op is found", found[0])


if __name__ == "__main__":
    unittest.main()
