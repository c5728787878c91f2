"""What a change is, the lists of them that are checked in, and the table of verdicts.

A list (known.txt, explained.txt) is a sequence of entries, which find their place by text and never by line numbers:

    == name
    why: what is wrong then, or why no test can fail (may go on over several lines, indented)
    -- path/of/file.cpp
    << old text, which stands in the file once
    >> new text

`<<` and `>>` may be repeated: each line of the text has its own. An entry with several changes has several `--` parts.
`equivalent: reason` beside `why:` says that no test can tell the changed program from the original; `caught by: TEST(FILTER)`
says which test is there to fail, and is run before those of tests.txt.
Invariant: the key of a change depends on the file's text and on the change alone, so that a finished one is known again.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ("key", "origin", "name", "file", "change", "verdict", "by", "seconds")
KILLED, SURVIVED, UNBUILT, SAME = "killed", "survived", "does not build", "same code"
COUNTED = (KILLED, SURVIVED)


class ListError(Exception):
    """A list of changes that cannot be read, or that does not fit the tree."""


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str

    def apply(self, text):
        found = text.count(self.old)
        if found != 1:
            raise ListError(f"{self.file}: the text to change stands there {found} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass
class Change:
    name: str
    edits: list
    why: str = ""
    equivalent: str = ""
    caught_by: str = ""
    operator: str = ""
    origin: str = ""
    key: str = field(default="", compare=False)

    @property
    def file(self):
        return self.edits[0].file

    def texts(self, root):
        """File -> text after the change; sets the key."""
        out, digest = {}, hashlib.sha256()
        for edit in self.edits:
            path = root / edit.file
            if not path.is_file():
                raise ListError(f"{self.name}: there is no {edit.file}")
            before = out.get(edit.file) or path.read_text(encoding="utf-8")
            out[edit.file] = edit.apply(before)
            for part in (edit.file, before, edit.old, edit.new):
                digest.update(part.encode() + b"\0")
        self.key = digest.hexdigest()[:16]
        return out

    def summary(self):
        """The lines that differ, on one line of a table."""
        return "; ".join(f"{shortened(e.old, e.new)} -> {shortened(e.new, e.old)}" for e in self.edits)

    def same_as(self, other):
        """Whether both say the same change of the same file, spaces aside."""
        return [(e.file, squeezed(e.old), squeezed(e.new)) for e in self.edits] == [
            (e.file, squeezed(e.old), squeezed(e.new)) for e in other.edits
        ]


def squeezed(text):
    return " ".join(text.split())


def shortened(text, other):
    """The lines of `text` from the first to the last that `other` has not in their place."""
    mine, others = text.split("\n"), other.split("\n")
    while mine and others and mine[0] == others[0]:
        mine, others = mine[1:], others[1:]
    while mine and others and mine[-1] == others[-1]:
        mine, others = mine[:-1], others[:-1]
    return squeezed(" ".join(mine)) or "(nothing)"


def read_list(path, origin):
    """The changes of a list; raises ListError where a line is none of its format."""
    changes, parts, current = [], [], ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark, _, rest = line.partition(" ")
        if mark == "==":
            changes.append(Change(name=rest.strip(), edits=[], origin=origin))
        elif not changes and (not line.strip() or mark.startswith("#")):
            continue
        elif not changes:
            raise ListError(f"{path.name}: line {number} stands before the first `== name`: {line}")
        elif mark in ("why:", "equivalent:"):
            current = mark[:-1]
            setattr(changes[-1], current, rest.strip())
        elif line.startswith("caught by: "):
            changes[-1].caught_by = line.removeprefix("caught by: ").strip()
        elif mark == "--":
            parts = [rest.strip(), [], []]
            changes[-1].edits.append(parts)
        elif mark in ("<<", ">>") and changes[-1].edits:
            parts[1 if mark == "<<" else 2].append(rest)
        elif line.startswith("  ") and current and not changes[-1].edits:
            setattr(changes[-1], current, f"{getattr(changes[-1], current)} {line.strip()}")
        elif line.strip() and not mark.startswith("#"):
            raise ListError(f"{path.name}: line {number} is no part of an entry: {line}")
    for change in changes:
        change.edits = [Edit(file, "\n".join(old), "\n".join(new)) for file, old, new in change.edits]
        if not change.edits or not all(e.old for e in change.edits):
            raise ListError(f"{path.name}: {change.name} says no file or no text to change")
    names = [change.name for change in changes]
    for name in names:
        if names.count(name) > 1:
            raise ListError(f"{path.name}: two entries are named {name}")
    return changes


def entry(change):
    """The change as an entry of a list."""
    out = [f"== {change.name}", f"why: {change.why}"]
    out += [f"equivalent: {change.equivalent}"] if change.equivalent else []
    out += [f"caught by: {change.caught_by}"] if change.caught_by else []
    for edit in change.edits:
        out.append(f"-- {edit.file}")
        out += [f"<< {line}".rstrip() for line in edit.old.split("\n")]
        out += [f">> {line}".rstrip() for line in edit.new.split("\n")]
    return "\n".join(out) + "\n"


class Table:
    """The verdicts, one line each; a line is written as soon as its change is finished."""

    def __init__(self, path):
        self.path = Path(path)
        self.rows = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines()[1:]:
                values = line.split("\t")
                if len(values) == len(COLUMNS):  # a line that an interruption cut is left out
                    row = dict(zip(COLUMNS, values))
                    self.rows[row["key"]] = row

    def add(self, change, verdict, by, seconds):
        values = (change.key, change.origin, change.name, change.file, change.summary(), verdict, by, f"{seconds:.1f}")
        row = dict(zip(COLUMNS, (value.replace("\t", " ").replace("\n", " ") for value in values)))
        self.rows.pop(change.key, None)
        self.rows[change.key] = row
        self.write()
        return row

    def write(self):
        lines = ["\t".join(COLUMNS)] + ["\t".join(row[c] for c in COLUMNS) for row in self.rows.values()]
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside.replace(self.path)
