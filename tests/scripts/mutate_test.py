#!/usr/bin/env python3
"""scripts/mutate tells changes that tests notice from those that they do not, on a project of two files."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS / "mutation"))

import changes  # noqa: E402
import operators  # noqa: E402

FILES = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.20)
project(Toy CXX)
enable_testing()
add_executable(test_toy tests/toy_test.cpp core/toy.cpp)
target_compile_options(test_toy PRIVATE -Wall -Werror)
add_test(NAME test_toy COMMAND test_toy)
set_tests_properties(test_toy PROPERTIES ENVIRONMENT "TOY=1")
""",
    "core/toy.cpp": """int tested(int a) {
  int sum = 0;
  for (int i = 0; i < a; ++i) sum += i;
  return sum;
}
int untested(int a) { return a + 3; }
int same() { return 2 + 2; }
""",
    "tests/toy_test.cpp": """#include <cstdio>
#include <cstdlib>
int tested(int);
int main() {
  if (tested(3) == 3 && std::getenv("TOY")) return 0;
  std::puts("[  FAILED  ] Toy.Sum");
  return 1;
}
""",
    "scripts/mutation/tests.txt": "core test_toy\n",
    "scripts/mutation/known.txt": """# A list.
== bound
why: one term
  too many
-- core/toy.cpp
<<   for (int i = 0; i < a; ++i) sum += i;
>>   for (int i = 0; i <= a; ++i) sum += i;
== unnoticed
why: nobody calls it
-- core/toy.cpp
<< int untested(int a) { return a + 3; }
>> int untested(int a) { return a - 3; }
== unbuilt
why: there is no b
-- core/toy.cpp
<<   return sum;
>>   return b;
== same
why: other text, one value
-- core/toy.cpp
<< int same() { return 2 + 2; }
>> int same() { return 3 + 1; }
== endless
why: it never ends
-- core/toy.cpp
<<   int sum = 0;
>>   int sum = 0; for (volatile int go = 1; go;) sum = a;
""",
    ".gitignore": "/build*/\n",
}


class Project(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name)
        for path, text in FILES.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)
        for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "A toy"]):
            names = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
            subprocess.run(["git", *names, *command], cwd=self.root, check=True)

    def tearDown(self):
        self.folder.cleanup()

    def command(self, *flags):
        return [sys.executable, SCRIPTS / "mutate", "--root", self.root, "--patience", "0.5", *flags]

    def mutate(self, *flags, status=0):
        done = subprocess.run(self.command(*flags), capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def verdicts(self):
        table = changes.Table(self.root / "scripts/mutation/results.tsv")
        return {row["name"]: (row["verdict"], row["by"]) for row in table.rows.values()}

    def test_verdicts(self):
        out = self.mutate("--known", status=1)
        seen = self.verdicts()
        self.assertEqual(seen["bound"], ("killed", "test_toy: Toy.Sum"))
        self.assertEqual(seen["unnoticed"], ("survived", ""))
        self.assertEqual(seen["unbuilt"][0], "does not build")
        self.assertIn("b", seen["unbuilt"][1])
        self.assertEqual(seen["same"], ("same code", ""))
        self.assertEqual(seen["endless"], ("killed", "test_toy: timeout"))
        self.assertIn("2 of 3 killed", out)
        self.assertIn("survived: unnoticed", out)
        self.assertEqual((self.root / "core/toy.cpp").read_text(), FILES["core/toy.cpp"])
        self.assertNotIn("baseline", self.mutate("--known", status=1))  # nothing is run twice
        out = self.mutate("--report", status=1)
        entry = textwrap.dedent(out[out.index("    == unnoticed") :])  # as it is printed for this
        (self.root / "scripts/mutation/explained.txt").write_text(entry)
        self.assertIn("survived, explained: unnoticed", self.mutate("--report"))
        (self.root / "scripts/mutation/explained.txt").write_text(entry.replace("why:", "equivalent:"))
        out = self.mutate("--report")
        self.assertIn("survived, equivalent: unnoticed", out)
        self.assertRegex(out, "all +2 of 3 killed, 1 of the others equivalent: 100.0 % of the rest")
        self.assertNotIn(" s\n", self.mutate("--only", "unnoticed", "--again"))  # what is explained is not run again

    def test_code_that_this_cpu_does_not_run_gets_no_verdict(self):
        row = self.root / "scripts/mutation/tests.txt"
        row.write_text(FILES["scripts/mutation/tests.txt"] + "? sixty_four_hands core/toy\n")
        for flags in (["--only", "bound"], ["--draw", "1", "--per-folder", "0", "--folders", "core"]):
            out = self.mutate(*flags, status=1)
            self.assertRegex(out, r"no verdict on this CPU: .* \(needs sixty_four_hands\)\n$")
            self.assertEqual(out.count("no verdict"), 1)
            self.assertEqual(self.verdicts(), {})

    def test_a_reason_for_a_change_that_stands_nowhere_is_an_error(self):
        (self.root / "scripts/mutation/explained.txt").write_text("== gone\nwhy: -\n-- core/toy.cpp\n<< not there\n>> there\n")
        done = subprocess.run(self.command("--known", "--list"), capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "mutate: core/toy.cpp: the text to change stands there 0 times, not once:\nnot there\n")

    def test_a_survivor_is_run_again_with_another_test(self):
        self.mutate("--only", "unnoticed", status=1)
        test = self.root / "tests/toy_test.cpp"
        text = test.read_text().replace("int main", "int untested(int);\nint main")
        test.write_text(text.replace("tested(3) == 3 &&", "tested(3) == 3 && untested(1) == 4 &&"))
        self.mutate("--only", "unnoticed", status=1)
        self.mutate("--only", "unnoticed", "--again")
        self.assertEqual(self.verdicts()["unnoticed"][0], "killed")

    def test_what_fails_only_once_kills_nothing(self):
        test = self.root / "tests/toy_test.cpp"
        once = "  if (std::getenv(\"ONCE\") && !fopen(std::getenv(\"ONCE\"), \"r\")) return fopen(std::getenv(\"ONCE\"), \"w\"), 1;\n"
        test.write_text(test.read_text().replace("  if (tested", once + "  if (tested"))
        self.mutate("--only", "unnoticed", status=1)  # its baseline
        os.environ["ONCE"] = str(self.root / "build-once")
        try:
            self.mutate("--only", "unnoticed", "--again", status=1)
        finally:
            del os.environ["ONCE"]
        self.assertTrue((self.root / "build-once").is_file())
        self.assertEqual(self.verdicts()["unnoticed"][0], "survived")

    def test_an_interrupted_run_goes_on(self):
        run = subprocess.Popen(self.command("--known"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        table, deadline = self.root / "scripts/mutation/results.tsv", time.monotonic() + 60
        while not table.is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        self.assertIn("interrupted", run.communicate()[1])
        before = table.read_text().splitlines()
        self.assertLess(len(before), 6)
        out = self.mutate("--known", status=1)
        self.assertIn("2 of 3 killed", out)
        after = table.read_text().splitlines()
        self.assertEqual(after[: len(before)], before)
        self.assertEqual(len(after), 6)

    def test_a_test_that_fails_without_a_change_is_refused(self):
        path = self.root / "core/toy.cpp"
        path.write_text(path.read_text().replace("sum += i", "sum -= i"))
        done = subprocess.run(self.command("core/toy.cpp"), capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("test_toy fails without a change", done.stderr)

    def test_one_change_of_a_file_by_its_name(self):
        line = self.mutate("core/toy.cpp", "--list").splitlines()[-1]
        self.assertEqual(self.mutate("core/toy.cpp", "--list", "--only", line.split(": ")[0]).splitlines(), [line])
        done = subprocess.run(self.command("core/toy.cpp", "--only", "other"), capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (1, "mutate: core/toy.cpp has no change other\n"))

    def test_changed_lines_only(self):
        path = self.root / "core/toy.cpp"
        path.write_text(path.read_text().replace("return a + 3;", "return a + 4;"))
        listed = self.mutate("--changed", "--list").splitlines()
        self.assertEqual(len(listed), 2, listed)
        self.assertTrue(all("a + 4" in line for line in listed), listed)

    def test_waits_are_a_kind_with_rows_of_their_own(self):
        folder = self.root / "core/tensor"
        folder.mkdir()
        (folder / "wait.h").write_text("void on(int);\n")
        (folder / "wait.cpp").write_text('#include "wait.h"\nvoid wait_on(int);\nvoid on(int e) {\n  if (e) wait_on(e);\n}\n')
        subprocess.run(["git", "add", "."], cwd=self.root, check=True)
        rows = self.root / "scripts/mutation/tests.txt"
        rows.write_text(FILES["scripts/mutation/tests.txt"] + "wait core/tensor waits(A*)\nwaits= test_toy\n")
        listed = self.mutate("--kind", "wait", "--list")
        self.assertEqual(
            listed,
            "core/tensor/wait.cpp:device-wait-1: if (e) wait_on(e); -> if (e) (void)0;\n",
        )
        done = subprocess.run(self.command("--kind", "wait"), capture_output=True, text=True)
        self.assertIn("ctest knows no waits", done.stderr)  # test_toy was built for it
        # One build has all changes: the program below fails where one is chosen by its name.
        (self.root / "tests/toy_test.cpp").write_text(
            "#include <cstdio>\nvoid on(int);\nint waited = 0;\nvoid wait_on(int) { ++waited; }\n"
            'int main() {\n  on(1);\n  if (!waited) std::puts("[  FAILED  ] Toy.Waits");\n  return !waited;\n}\n'
        )
        cmake = self.root / "CMakeLists.txt"
        cmake.write_text(
            cmake.read_text().replace("core/toy.cpp", "core/tensor/wait.cpp") + "add_test(NAME waits CONFIGURATIONS Mutation COMMAND test_toy)\n"
        )
        self.assertIn("1 of 1 killed", self.mutate("--kind", "wait"))
        self.assertEqual(self.verdicts()["core/tensor/wait.cpp:device-wait-1"], ("killed", "waits(A*): Toy.Waits"))
        self.assertEqual(len(self.mutate("--report").splitlines()), 2)

    def test_draws_are_the_same_for_a_seed(self):
        draw = ["--draw", "4", "--folders", "core", "--per-folder", "2", "--list"]
        self.assertEqual(self.mutate(*draw), self.mutate(*draw))
        self.assertNotEqual(self.mutate(*draw), self.mutate(*draw, "--seed", "2"))
        self.assertEqual(len(self.mutate(*draw).splitlines()), 4)


class Operators(unittest.TestCase):
    def changed(self, text):
        """operator -> the texts after each change."""
        out = {}
        for change in operators.propose("a.cpp", text, ""):
            out.setdefault(change.operator, []).append(change.edits[0].apply(text))
        return out

    def test_what_is_changed(self):
        found = self.changed("void f() {\n  if (a < b && c) x = std::min(y, 3) - 1.5;\n  g->wait();\n  h(true);\n}\n")
        line = "  if (a {} b && c) x = std::min(y, 3) - 1.5;"
        self.assertIn(line.format("<="), found["bound"][0])
        self.assertIn("a < b || c", found["logic"][0])
        self.assertIn("if (!(a < b && c))", found["condition"][0])
        self.assertIn("std::max(y, 3)", found["extreme"][0])
        self.assertIn("std::min(y, 4) - 1.5", found["constant"][0])
        self.assertIn("std::min(y, 3) - 2.25", found["constant"][1])
        self.assertIn("(y, 3) + 1.5", found["sign"][0])
        self.assertIn("\n  (void)0;\n", found["wait"][0])
        self.assertIn("h(false)", found["truth"][0])

    def test_what_is_left_alone(self):
        text = '#include "a < b"\n// a < b\nconst char* s = "a < b";\nstatic_assert(a < b);\nthrow UserError("x", a - 1);\n'
        text += '  logging::warn("{}", a + 1);\n  list.reserve(n);\n'
        self.assertEqual(self.changed(text), {})
        found = self.changed('TESSERA_CHECK(a < b, "f: {}", a - 1);\n')
        self.assertEqual(list(found), ["bound"])

    def test_waits_for_devices(self):
        text = """void S::wait_on(const Stream& s) {
  for (auto& e : users) e->wait_on(s);
  make_ref<E>(f(a.b))->wait_on(s);
  a.wait_ready(s), b.wait_writable(s);
  Ref<Event> e = home ? nullptr : runtime_of(d).record(s);
  cpu ? t->wait_ready() : t->wait_ready(s);
  block.pending.append(p.begin(), p.end());
  rest.pending = block.pending;
  return {at, std::exchange(block.pending, Pending())};
}
Ref<Event> record(const Stream& s) override;
names.push_back(n);
"""
        found = [c.edits[0] for c in operators.propose_waits("core/tensor/a.cpp", text, "")]
        self.assertEqual(
            [changes.shortened(e.new, e.old) for e in found],
            [
                "for (auto& e : users) (void)0;",
                "(void)0;",
                "(void)0, b.wait_writable(s);",
                "a.wait_ready(s), (void)0;",
                "Ref<Event> e = home ? nullptr : Ref<Event>();",
                "cpu ? t->wait_ready() : (void)0;",
                "(void)0;",
                "(void)0;",
                "return {at, Pending()};",
            ],
        )

    def test_a_change_finds_its_place_among_equal_lines(self):
        text = "f(a < b);\nx;\nf(a < b);\ny;\n"
        for change in operators.propose("a.cpp", text, ""):
            self.assertNotEqual(change.edits[0].apply(text), text)


if __name__ == "__main__":
    unittest.main()
