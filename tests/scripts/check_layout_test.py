#!/usr/bin/env python3
"""scripts/check_layout.py finds what it is there to find, and nothing else."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "check_layout.py"


class CheckLayout(unittest.TestCase):
    def findings(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            subprocess.run(["git", "init", "-q", root], check=True)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            for path in [] if any(f.endswith("README.md") for f in files) else files:
                for parent in pathlib.PurePath(path).parents:
                    if str(parent) != ".":
                        (root / parent / "README.md").write_text("What it is for.\n")
            out = subprocess.run([sys.executable, SCRIPT, "--root", root], capture_output=True, text=True)
            self.assertEqual(out.returncode, 1 if out.stdout else 0, out.stderr)
            return out.stdout.splitlines()

    def finds(self, files, text):
        found = self.findings(files)
        self.assertEqual(len(found), 1, found)
        self.assertIn(text, found[0])

    def test_sound(self):
        self.assertEqual(self.findings({
            "core/ops/a.cpp": '#include "core/dispatch/dispatch.h"\n#include <vector>\n',
            "core/data/a.cpp": '#include "core/io/file.h"\n',
            "core/backend/cpu/kernels/a.cpp": '#include "core/ops/functors/math.h"\n#include <immintrin.h>\n',
            "examples/a.cpp": '#include "parallel/ddp.h"\n#include "compile/ir/graph.h"\n',
        }), [])

    def test_upward_include(self):
        self.finds({"core/tensor/a.h": '\n#include "core/ops/views.h"\n'}, "core/tensor/a.h:2: core/tensor may not include core/ops")

    def test_backends_are_leaves(self):
        self.finds({"core/nn/a.cpp": '#include "core/backend/cpu/gemm.h"\n'}, "core/nn may not include core/backend/cpu")

    def test_compile_and_parallel_do_not_meet(self):
        self.finds({"parallel/a.cpp": '#include "compile/ir/graph.h"\n'}, "parallel may not include compile")
        self.finds({"compile/a.cpp": '#include "dtensor/mesh.h"\n'}, "compile may not include dtensor")

    def test_loops_over_threads_have_names(self):
        self.finds({"core/backend/cpu/a.cpp": "\nparallel_ranges(n, 1, f);\n"}, "core/backend/cpu/a.cpp:2: a loop over threads without a name")

    def test_programs_may_be_executed(self):
        self.finds({"scripts/a.py": "#!/usr/bin/env python3\n"}, "scripts/a.py:1: begins as a program does, but may not be executed")

    def test_launcher_sees_store_only(self):
        self.assertEqual(self.findings({"launcher/a.cpp": '#include "collectives/store/store.h"\n'}), [])
        self.finds({"launcher/a.cpp": '#include "collectives/plan.h"\n'}, "launcher may not include collectives")

    def test_functors_include_nothing(self):
        self.finds({"core/ops/functors/a.h": "#include <cmath>\n"}, "compiled for several targets")

    def test_kernels_include_tables_only(self):
        self.finds({"core/backend/cpu/kernels/a.cpp": "#include <vector>\n"}, "may not include vector")

    def test_relative_include(self):
        self.finds({"core/ops/a.cpp": '#include "views.h"\n'}, "from the repository root")

    def test_long_file(self):
        self.assertEqual(self.findings({"core/ops/a.cpp": "\n" * 600}), [])
        self.finds({"core/ops/a.cpp": "\n" * 601}, "601 lines")

    def test_constants_of_kernels(self):
        self.assertEqual(self.findings({
            "core/backend/cpu/a.cpp": 'constexpr int64_t kTile = limit("a.tile"), kNone = -1, kAlso = kTile;\n'
                                      "constexpr int64_t kGrain = 1 << 14, kMostBytes = 4 << 20;\n",
            "core/backend/cpu/gemm.h": "inline constexpr int kMaxBatch = 6;\n",
            "core/ops/a.cpp": "constexpr int64_t kMost = 7;\n",
        }), [])
        self.finds({"core/backend/cpu/a.cpp": "\nconstexpr int64_t kTile = 48;\n"}, "core/backend/cpu/a.cpp:2: kTile is a number")
        self.finds({"core/backend/cpu/kernels/a.h": 'constexpr int kTile = limit("a.tile"),\n    kPanel = 4 * kTile;\n'}, "kPanel")
        self.finds({"compile/codegen/a.cpp": "static constexpr size_t kPieces = size_t(1) << 20;\n"}, "kPieces")
        self.finds({"core/backend/cpu/gemm.cpp": "template <class T>\nconstexpr int64_t kMaxBatch<T> = 6;\n"}, "kMaxBatch")

    def test_missing_readme(self):
        self.finds({"core/README.md": "", "core/ops/a.cpp": ""}, "core/ops/README.md:1: missing")

    def test_unfinished(self):
        self.finds({"core/ops/a.cpp": "// TO" + "DO: the rest\n"}, "unfinished")


if __name__ == "__main__":
    unittest.main()
