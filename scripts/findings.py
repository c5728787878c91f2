"""What checks of the text of the tree have in common: they print findings, `path:line: what is wrong`, and fail when there is any."""
import argparse
import pathlib


def report(description, check):
    """Prints what `check(root)` yields, one line per finding. Returns the exit status: 1 when there is any. `--root DIR` on the
    command line checks another tree, which the tests of the checks do."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    found = list(check(parser.parse_args().root))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0
