"""A copy of the tree below build/, in which changes are made, built and tested; the tree itself is never touched.

How: files that git knows or does not ignore are copied where they differ, then built with the compilers' cache (ccache) as
the tree is. The objects and test programs of the unchanged copy are the baseline: a change counts when it alters the bytes
of an object, and only tests that pass without it can kill it.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from changes import KILLED, SAME, SURVIVED, UNBUILT

SLOWER = 5  # a test that takes this many times as long as without the change, and `patience` more, is ended


def last_error(output):
    found = re.findall(r"error: [^\n]*", output)
    return found[0][:160] if found else ""


class BaselineError(Exception):
    """The unchanged copy does not build, or one of its tests fails."""


def end_group(process, number):
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class WorkCopy:
    def __init__(self, root, folder, core, jobs, patience, say):
        self.root, self.tree, self.jobs, self.patience, self.say = root, folder / "tree", jobs, patience, say
        # Tests of two copies at once keep to a core each: ranks that find a core of their own poll on it for their peers.
        self.pinned = ["taskset", "-c", str(core)]
        self.build = self.tree / "build"
        self.state_file = folder / "baseline.json"
        self.entries, self.seconds = {}, {}  # seconds: of the tests whose baseline was looked at by this run
        self.passed, self.objects = {}, {}  # test -> [state of its objects, seconds]; object -> [time, digest]
        self.process, self.stopped = None, False
        self.chosen = ""  # of the changes that are built in, the one whose tests run
        self.environment = dict(os.environ)

    # -- the copy

    def prepare(self):
        """Copies what differs and configures; what an interrupted run changed is as it was again."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.root, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        wanted = sorted(p for p in listed.split("\0") if p and (self.root / p).is_file())
        for path in wanted:
            self.copy(path)
        known = set(wanted)
        for path in self.tree.rglob("*"):
            relative = path.relative_to(self.tree)
            if path.is_file() and relative.parts[0] != "build" and str(relative) not in known:
                path.unlink()
        if not (self.build / "build.ninja").is_file():
            command = ["cmake", "-S", str(self.tree), "-B", str(self.build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
            done = self.run(command, timeout=None)
            if done.status != 0:
                raise BaselineError(f"the copy cannot be configured:\n{done.output}")
        # What tests read and builds do not: a baseline holds as long as it and the objects are what they were.
        data = [p for p in wanted if not p.endswith((".md", ".cpp", ".def", ".h")) and not p.startswith("scripts/")]
        self.data = hashlib.sha256("".join(f"{p}\0{digest(self.root / p)}\0" for p in data).encode()).hexdigest()
        if self.state_file.is_file():
            state = json.loads(self.state_file.read_text())
            self.passed, self.objects = state["passed"], state["objects"]

    def copy(self, path):
        source, target = self.root / path, self.tree / path
        if target.is_file() and target.read_bytes() == source.read_bytes():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)

    def write_state(self):
        state = {"passed": self.passed, "objects": self.objects}
        beside = self.state_file.with_suffix(".new")
        beside.write_text(json.dumps(state))
        beside.replace(self.state_file)

    # -- commands

    class Done:
        def __init__(self, status, output, seconds):
            self.status, self.output, self.seconds = status, output, seconds

    def run(self, command, timeout, environment=None, cwd=None):
        """Ends the whole process group when time is up (status None); raises KeyboardInterrupt once `stop` was called."""
        begin = time.monotonic()
        self.process = process = subprocess.Popen(
            command, cwd=cwd or self.tree, env=environment or self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if self.stopped:
            self.stop()
        try:
            output, _ = process.communicate(timeout=timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            status, output = None, ""
        except KeyboardInterrupt:  # while the copy is prepared: later, commands run in another thread, which `stop` ends
            self.stop()
            raise
        finally:
            end_group(process, signal.SIGKILL)  # what a test left behind, too
            process.stdout.close()
            process.wait()
        if self.stopped:
            raise KeyboardInterrupt
        return self.Done(status, output, time.monotonic() - begin)

    def stop(self):
        """Ends the command that runs, and the verdict that another thread waits for."""
        self.stopped = True
        if self.process and self.process.poll() is None:
            end_group(self.process, signal.SIGTERM)  # builders remove what they have half written
            time.sleep(0.5)

    def make(self, targets):
        return self.run(["cmake", "--build", str(self.build), "-j", str(self.jobs), "--target", *targets], timeout=None)

    def find_tests(self):
        """Name -> (command, environment, folder) of what ctest would run."""
        done = subprocess.run(
            ["ctest", "--test-dir", str(self.build), "-C", "Mutation", "--show-only=json-v1"], capture_output=True, text=True, check=True
        )
        for test in json.loads(done.stdout)["tests"]:
            if "command" not in test:
                continue  # a program that is not built yet is found by its name below
            properties = {p["name"]: p["value"] for p in test.get("properties", [])}
            environment = dict(self.environment)
            environment.update(e.split("=", 1) for e in properties.get("ENVIRONMENT", []))
            self.entries[test["name"]] = (test["command"], environment, properties.get("WORKING_DIRECTORY"))

    # -- tests

    def test(self, name, filters, timeout):
        if name not in self.entries:
            self.find_tests()
        command, environment, folder = self.entries[name]
        flags = ["--gtest_fail_fast", "--gtest_brief=1", "--gtest_shuffle=0"]
        flags += [f"--gtest_filter={filters}"] if filters else []
        environment = {"OMP_NUM_THREADS": "2", **environment, "TESSERA_CHANGE": self.chosen}  # loops are shared among threads all the same
        return self.run([*self.pinned, *command, *flags], timeout, environment, folder)

    def baseline(self, step):
        """Builds the step's programs of the unchanged copy and runs its test, unless it passed with the same objects."""
        if step.label in self.seconds:
            return
        done = self.make(step.targets)
        if done.status != 0:
            raise BaselineError(f"{' '.join(step.targets)} cannot be built without a change:\n{done.output[-4000:]}")
        parts = [self.data, *self.pinned, *self.record_objects(step.targets)]
        state = hashlib.sha256("".join(parts).encode()).hexdigest()
        if self.passed.get(step.label, [None])[0] != state:
            self.say(f"baseline of {step.label}")
            self.find_tests()
            if step.test not in self.entries:
                raise BaselineError(f"ctest knows no {step.test}")
            done = self.test(step.test, step.filters, 900)
            if done.status != 0:
                said = re.sub(r"[^\n]*: Skipped\n+", "", done.output)  # what --gtest_fail_fast says of the tests after it
                raise BaselineError(f"{step.label} fails without a change:\n{said[-4000:]}")
            self.passed[step.label] = [state, done.seconds]
            self.write_state()
        self.seconds[step.label] = self.passed[step.label][1]

    def object_files(self):
        return {str(p.relative_to(self.build)): p for p in self.build.rglob("*.o")}

    def record_objects(self, targets):
        """Digests of the objects of these targets, which were just built from the unchanged copy."""
        listed = self.run(["ninja", "-C", str(self.build), "-t", "inputs", *targets], timeout=None).output
        names = sorted(line for line in listed.splitlines() if line.endswith(".o"))
        for name in names:
            stamp = (self.build / name).stat().st_mtime_ns
            if self.objects.get(name, [None])[0] != stamp:
                self.objects[name] = [stamp, digest(self.build / name)]
        return [self.objects[name][1] for name in names]

    def stamps(self):
        return {name: path.stat().st_mtime_ns for name, path in self.object_files().items()}

    def altered(self, before):
        """(objects made since `before`, those of them whose bytes are not the baseline's)."""
        made = [name for name, stamp in self.stamps().items() if before.get(name) != stamp]
        different = [name for name in made if self.objects.get(name, [0, None])[1] != digest(self.build / name)]
        return len(made), len(different)

    def verdict(self, change, steps):
        """(verdict, what killed it). Leaves the text of the copy as it was."""
        texts = change.texts(self.tree)
        originals = {path: (self.tree / path).read_text(encoding="utf-8") for path in texts}
        self.baseline(steps[0])
        before, counted = self.stamps(), False
        try:
            for step in steps:
                if step.label not in self.seconds:
                    self.write(originals)
                    self.baseline(step)
                    before = self.stamps()
                self.write(texts)
                done = self.make(step.targets)
                if done.status != 0:
                    return UNBUILT, last_error(done.output)
                made, different = self.altered(before)
                if made and not different and not counted:
                    return SAME, ""
                counted = counted or different > 0
                found = self.failure(step)
                if found:
                    return KILLED, found
            return (SURVIVED, "") if counted else (SAME, "")
        finally:
            self.write(originals)

    def verdict_by_switch(self, change, steps, texts):
        """As verdict, of one of the changes that `texts` (file -> text) have all in them: they are built once for all of these."""
        self.write(texts)
        for step in steps:
            self.baseline(step)
            self.chosen = change.name
            try:
                found = self.failure(step)
            finally:
                self.chosen = ""
            if found:
                return KILLED, found
        return SURVIVED, ""

    def write(self, texts):
        for path, text in texts.items():
            target = self.tree / path
            if target.read_text(encoding="utf-8") != text:
                target.write_text(text, encoding="utf-8")

    def failure(self, step):
        """What says that the changed program is wrong, or nothing. What fails once only, alone and together, says nothing:
        on a busy machine tests of times do."""
        limit = SLOWER * self.seconds[step.label] + self.patience
        for turn in range(2):
            done = self.test(step.test, step.filters, limit)
            if done.status is None:
                return f"{step.label}: timeout"
            if done.status == 0:
                return ""
            failed = re.findall(r"^\[  FAILED  \] ([\w./]+)", done.output, re.MULTILINE)
            what = f"{step.label}: {failed[0] if failed else f'exit status {done.status}'}"
            if turn == 1 or (failed and self.test(step.test, failed[0], limit).status != 0):
                return what
        return ""
