#!/usr/bin/env python3
"""Looks for lists of op names above the ops: a fact about an op is stated where the op is defined (core/primitive/traits.h), and
other parts ask the op. Names come from the definitions in core/ops and core/dispatch (OpInfo, and the lines of pointwise.def).

See findings.py for what is printed.
"""
import re
import sys

import findings

DEFINED_IN = ("core/ops", "core/dispatch")
SEARCHED = ("core", "collectives", "dtensor", "parallel", "compile", "launcher", "examples")
# A list is so many names of ops within so many lines.
NAMES, LINES = 3, 3
# Files and folders with a function or an expression for each op, which are rules and no facts, or where such words name other
# things; why.
RULES = {
    "core/ops/": "the ops",
    "core/backend/": "a kernel for each op",
    "core/autograd/batching_rules.cpp": "a function for each op that axes do not batch",
    "compile/codegen/expressions.cpp": "an expression for each op",
    "compile/codegen/prologue.cpp": "functions of libm",
    "compile/codegen/samples.h": "bodies to try",
    "compile/passes/decompose.cpp": "a function for each op that is taken apart",
    "compile/passes/fold_constants.cpp": "what each op does with 0 and 1",
    "compile/passes/join_epilogues.cpp": "a function for each op that products compute beside themselves",
    "compile/passes/join_norms.cpp": "what each op of a batch-norm is of it",
    "compile/quantization/layers.cpp": "how each op changes a layer's scale and shift",
    "dtensor/rules.cpp": "a function for each op that axes do not shard",
    "examples/bench/": "what is measured",
}
DEFINITION = re.compile(r"\bOpInfo\s+\w+[^;()]*\{[^;]*;")
ROW = re.compile(r"^TESSERA_[A-Z]+\d?\((\w+),", re.MULTILINE)  # of a table
LITERAL = re.compile(r'"(\w+)"')


def sources(root, folders):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".def", ".cpp") and path.is_file():
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def names_of_ops(root):
    names = set()
    for _, text in sources(root, DEFINED_IN):
        names.update(ROW.findall(text))
        for definition in DEFINITION.findall(text):
            names.update(LITERAL.findall(definition))
    return names


def lists_in(lines, ops):
    """First lines of stretches with NAMES different names."""
    found = [set(LITERAL.findall(line.split("//")[0])) & ops for line in lines]
    number = 0
    while number < len(found):
        together = set().union(*found[number:number + LINES])
        if found[number] and len(together) >= NAMES:
            yield number + 1, sorted(together)
            number += LINES
            while number < len(found) and found[number]:  # the rest of the same list
                number += 1
        else:
            number += 1


def check(root):
    ops = names_of_ops(root)
    if not ops:
        yield "core/ops:1: no definition of an op is found; has its form changed? See DEFINITION in scripts/check_op_lists.py"
    hit = set()
    for path, text in sources(root, SEARCHED):
        rule = next((r for r in RULES if path == r or (r.endswith("/") and path.startswith(r))), None)
        for number, names in lists_in(text.splitlines(), ops):
            hit.add(rule)
            if rule is None:
                yield (f"{path}:{number}: a list of ops ({', '.join(names)}); state the fact in core/primitive/traits.h and ask the "
                       "op, or, where it is a rule for each op, name the file in RULES of scripts/check_op_lists.py")
    for rule in RULES:
        if (root / rule).exists() and rule not in hit:
            yield f"{rule}:1: has no list of ops any more; take it out of RULES in scripts/check_op_lists.py"


if __name__ == "__main__":
    sys.exit(findings.report(__doc__, check))
