#!/usr/bin/env python3
"""scripts/cmake/check_headers.cmake finds installed headers that are neither public nor marked, and nothing else."""
import pathlib
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "cmake" / "check_headers.cmake"
LIST = "scripts/cmake/public_headers.txt"
MARK = "// Internal: not part of the public interface.\n"


class CheckHeaders(unittest.TestCase):
    def findings(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                path = pathlib.Path(folder) / path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            out = subprocess.run(["cmake", f"-DROOT={folder}", "-P", SCRIPT], capture_output=True, text=True)
            found = out.stderr.split("CMake Error")[0].splitlines()
            self.assertEqual(out.returncode, 1 if found else 0, out.stderr)
            return found

    def finds(self, files, text):
        found = self.findings(files)
        self.assertEqual(len(found), 1, found)
        self.assertIn(text, found[0])

    def test_sound(self):
        self.assertEqual(self.findings({
            LIST: "# a comment\na/all.h\na/b_*.h\n",
            "a/all.h": '#include "a/exported.h"  // IWYU pragma: export\n#include "a/internal.h"\n#include "zlib.h"\n',
            "a/b_1.h": '#include "a/all.h"\n',
            "a/exported.h": "",
            "a/internal.h": f'{MARK}#include "a/deeper.h"\n#include "a/rows.def"\n',
            "a/deeper.h": MARK,
            "a/rows.def": MARK,
            "a/not_installed.h": '#include "a/all.h"\n',
        }), [])

    def test_included_by_a_public_header(self):
        self.finds({LIST: "a.h\n", "a.h": '#include "b.h"\n', "b.h": ""}, "b.h: is installed")

    def test_included_by_an_internal_header(self):
        self.finds({LIST: "a.h\n", "a.h": '#include "b.h"\n', "b.h": f'{MARK}#  include "c.h"\n', "c.h": ""}, "c.h: is installed")

    def test_internal_headers_export_nothing(self):
        self.finds({LIST: "a.h\n", "a.h": '#include "b.h"\n', "b.h": f'{MARK}#include "c.h"  // IWYU pragma: export\n', "c.h": ""},
                   "c.h: is installed")

    def test_public_header_with_the_mark(self):
        self.finds({LIST: "a.h\n", "a.h": MARK}, "a.h: is public")

    def test_row_that_names_nothing(self):
        self.finds({LIST: "a.h\nb_*.h\n", "a.h": ""}, "b_*.h: no such file")


if __name__ == "__main__":
    unittest.main()
