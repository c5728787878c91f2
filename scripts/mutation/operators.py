"""Small changes of a C++ file, found in its text: turned comparisons and signs, bounds off by one, dropped calls and waits.
`propose_waits` finds each wait of a stream or for a device, and each event that it would wait for, wherever in a statement it stands.

How: comments, strings, preprocessor lines and the texts of errors and logs are blanked out; what is left is searched with
patterns that rely on the layout of clang-format (binary operators stand between spaces, brackets of templates do not).
Invariant: what is proposed for a file depends on its text alone, and every change keeps the number of lines.
"""

import hashlib
import math
import re
from collections import Counter

from changes import Change, Edit

SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'"
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\bstatic_assert\s*\([^;]*;",
    re.DOTALL | re.MULTILINE,
)
TEXTS = re.compile(r"\b(?:TESSERA_ASSERT|UserError|BugError|fmt::format|fmt::print|logging::\w+|std::f?printf|expect_\w+)\(")
SAMPLES = re.compile(r"^.*(?:\bSample\b|\bsamples?\().*$", re.MULTILINE)  # what the registry's tests are fed with
CHECK = re.compile(r"\bTESSERA_CHECK\(")
LITERAL = re.compile(r"(?<![\w.\"'])(\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.'])")
CALL = re.compile(r"^[ ]+((?:[a-z_]\w*(?:::|\.|->))*([a-z_]\w*)\([^;{}=]*\);)$", re.MULTILINE)
WAITS = re.compile(r"wait|barrier|fsync|sync|join|fence|flush", re.IGNORECASE)
NO_CALLS = {"if", "for", "while", "switch", "return", "throw", "delete", "sizeof", "assert"}
# Without these a program is slower or says less, and no result is another.
NO_RESULT = re.compile(r"^(logging::|.*\b(reserve|shrink_to_fit|prefetch|posix_fadvise|madvise)\()")

SWAPS = [
    ("bound", r" < ", " <= "), ("bound", r" <= ", " < "), ("bound", r" > ", " >= "), ("bound", r" >= ", " > "),
    ("comparison", r" == ", " != "), ("comparison", r" != ", " == "),
    ("sign", r" \+ ", " - "), ("sign", r" - ", " + "), ("sign", r" \+= ", " -= "), ("sign", r" -= ", " += "),
    ("product", r"(?<=[\w)\]]) \* (?=[\w(])", " / "), ("product", r"(?<=[\w)\]]) / (?=[\w(])", " * "),
    ("product", r" \*= ", " /= "), ("product", r"(?<=[\w)]) % (?=[\w(])", " / "),
    ("logic", r" && ", " || "), ("logic", r" \|\| ", " && "),
    ("sign", r"(?<=return )-(?=[a-z(])", ""), ("sign", r"(?<=[(=,] )-(?=[a-z(])", ""),
    ("truth", r"\btrue\b", "false"), ("truth", r"\bfalse\b", "true"),
    ("extreme", r"\bstd::min\b", "std::max"), ("extreme", r"\bstd::max\b", "std::min"),
]  # fmt: skip
CONDITION = re.compile(r"\b(if|while) \((?!const auto|auto |int64_t |[\w:<>]+[&*]? [a-z_]\w* =)")
DEVICE_WAIT = "device wait"  # the operator of propose_waits
# How often each is drawn, beside the others: literals are many and say little.
WEIGHTS = {"constant": 0.4, "wait": 3.0, "call": 1.0, "condition": 0.7, "logic": 1.0, "bound": 1.0, "sign": 1.0}


def blank(text):
    """`text` with everything that is no code replaced by spaces of the same extent."""

    def spaces(s):
        return re.sub(r"[^\n]", " ", s)

    text = SAMPLES.sub(lambda m: spaces(m[0]), SKIPPED.sub(lambda m: spaces(m[0]), text))
    out = list(text)
    for pattern, first in ((TEXTS, True), (CHECK, False)):
        for match in pattern.finditer(text):
            begin, end = match.end(), closing(text, match.end() - 1)
            if not first:
                begin = argument_end(text, begin, end)
            out[begin:end] = spaces(text[begin:end])
    return "".join(out)


def closing(text, at):
    """Where the bracket that opens at `at` closes, or the end."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text)


def argument_end(text, begin, end):
    depth = 0
    for i in range(begin, end):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0 and text[i] == ",":
            return i
    return end


def other_literal(literal):
    """A number near this one."""
    if re.fullmatch(r"\d+", literal):
        return str(int(literal) + 1)
    return repr(float(literal) * 1.5 + (0.5 if float(literal) == 0 else 0))


def places(text):
    """(operator, begin, end, replacement) of everything that may be changed."""
    code = blank(text)
    for operator, pattern, new in SWAPS:
        for match in re.finditer(pattern, code):
            if '"' not in (text[match.start() - 1], text[match.end()]):  # of texts there is no difference
                yield operator, match.start(), match.end(), new
    for match in LITERAL.finditer(code):
        if not re.search(r"\b(case|alignas\(|template <[^>]*)\s*$", code[max(0, match.start() - 40) : match.start()]):
            yield "constant", match.start(), match.end(), other_literal(match[1])
    for match in CONDITION.finditer(code):
        open_at = match.end() - 1
        close_at = closing(code, open_at)
        inside = text[open_at + 1 : close_at]
        if close_at < len(text) and "\n" not in inside and ";" not in inside:
            yield "condition", open_at, close_at + 1, f"(!({inside}))"
    for match in CALL.finditer(code):
        if match[2] not in NO_CALLS and not NO_RESULT.match(match[1]):
            operator = "wait" if WAITS.search(match[2]) else "call"
            yield operator, match.start(1), match.end(1), "(void)0;" + "\n" * text[match.start(1) : match.end(1)].count("\n")


def unique_edit(path, text, begin, end, new):
    """The change as whole lines, with as many around it as make the old text unique."""
    first = text.rfind("\n", 0, begin) + 1
    last = text.find("\n", end)
    last = len(text) if last < 0 else last
    while text.count(text[first:last]) > 1:
        if first > 0:
            first = text.rfind("\n", 0, first - 1) + 1
        if text.count(text[first:last]) > 1:
            after = text.find("\n", last + 1)
            last = len(text) if after < 0 else after
    return Edit(path, text[first:last], text[first:begin] + new + text[end:last])


def propose(path, text, origin, lines=None):
    """All changes of a file; `lines`: of these lines only (from 1)."""
    out, seen = [], Counter()
    for operator, begin, end, new in sorted(places(text), key=lambda p: (p[1], p[0])):
        number = text.count("\n", 0, begin) + 1
        if lines is not None and number not in lines:
            continue
        edit = unique_edit(path, text, begin, end, new)
        seen[operator] += 1
        name = f"{path}:{operator}-{seen[operator]}"
        out.append(Change(name=name, edits=[edit], operator=operator, origin=origin))
    return out


# What orders the work of devices: waits of streams and of the host, events, and the lists that carry these.
DEVICE_WAITS = re.compile(
    r"\b(wait_on|wait_ready|wait_writable|wait_for_users|wait_for|stream_wait_event|event_record|record|used_on|note_use|add_reader"
    r"|set_ready|wait|synchronize|stream_synchronize|event_synchronize|push_back|append)\("
)
CARRIES_EVENTS = re.compile(r"pending|users|\bto\.")  # the lists that push_back and append add to
EVENT_LISTS = re.compile(r"std::exchange\(\w+\.pending, Pending\(\)\)|(?<=  )[\w.\[\]]*\.pending = [\w.]+(?=;)")
# Where these stand. Headers are left out: what they call stands in a .cpp file, and they rebuild everything.
DEVICE_FOLDERS = ("core/tensor/", "core/dispatch/", "core/backend/cuda/", "compile/run/", "collectives/device_group.cpp")


# Once in a unit, which may have several of the files.
SWITCH = """#ifndef TESSERA_CHANGED
#define TESSERA_CHANGED
#include <cstdlib>
#include <string_view>
static inline bool tessera_changed(std::string_view name) {
  static const char* const chosen = std::getenv("TESSERA_CHANGE");
  return chosen && name == chosen;
}
#endif
"""


def expression_begin(code, at):
    """Where the expression begins of which the name at `at` is the last part: objects, calls and scopes before it."""
    while True:
        link = next((link for link in ("->", "::", ".") if code.endswith(link, 0, at)), None)
        if not link:
            return at
        at -= len(link)
        while at > 0 and code[at - 1] in ")]>":
            close, depth = at - 1, 0
            for at in range(close, -1, -1):
                depth += (code[at] in ")]>") - (code[at] in "([<")
                if depth == 0:
                    break
        while at > 0 and (code[at - 1].isalnum() or code[at - 1] == "_"):
            at -= 1


def wait_places(path, text):
    """(begin, end, what stands there instead) of each: a call of a statement is not made, an event is none, a list is empty."""
    code, out = blank(text), []
    for match in DEVICE_WAITS.finditer(code):
        begin, end = expression_begin(code, match.start()), closing(code, match.end() - 1) + 1
        before, expression = code[:begin].rstrip(), text[begin:end]
        on_host = match[1] in ("wait", "synchronize", "stream_synchronize", "event_synchronize")
        if match[1] in ("push_back", "append") and not CARRIES_EVENTS.search(expression):
            continue
        # Of the host where no stream is named: tests of the CPU are there for it.
        if expression.endswith(("wait_ready()", "wait_writable()", "set_ready(nullptr)")) or on_host and "/cuda/" not in path:
            continue
        if match[1] == "record" and re.search(r"(\breturn|[=(,:?])$", before):
            out.append((begin, end, "Ref<Event>()"))
        elif re.search(r"(\belse|[;{}),:?])$", before):  # else it is a declaration
            out.append((begin, end, "(void)0"))
    for match in EVENT_LISTS.finditer(code):
        out.append((*match.span(), "Pending()" if match[0].startswith("std::exchange") else "(void)0"))
    return sorted(out)


def propose_waits(path, text, origin):
    """A change for each place of `wait_places`."""
    edits = [unique_edit(path, text, *place) for place in wait_places(path, text)]
    return [
        Change(name=f"{path}:device-wait-{n}", edits=[edit], operator=DEVICE_WAIT, origin=origin) for n, edit in enumerate(edits, 1)
    ]


def with_switches(path, text):
    """The text with all changes of propose_waits in it, of which TESSERA_CHANGE=NAME in the environment chooses one."""
    for number, (begin, end, new) in reversed(list(enumerate(wait_places(path, text), 1))):
        old = f"(void)({text[begin:end]})" if new == "(void)0" else text[begin:end]
        text = f'{text[:begin]}(::tessera_changed("{path}:device-wait-{number}") ? {new} : {old}){text[end:]}'
    return SWITCH + text


def drawn(changes, seed):
    """The changes in an order that the seed and each change's own text decide; no change moves another's place."""

    def rank(change):
        edit = change.edits[0]
        digest = hashlib.sha256("\0".join((str(seed), edit.file, edit.old, edit.new)).encode()).digest()
        uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
        return -math.log(uniform) / WEIGHTS.get(change.operator, 1.0)

    return sorted(changes, key=rank)
