#!/usr/bin/env python3
"""Checks of the text of the tree: directions of includes, sizes of files, a README in each folder, unfinished places.

The tables below are the rules. See findings.py for what is printed.
"""
import os
import re
import subprocess
import sys

import findings

# Module -> modules it may include besides itself. A file belongs to the longest module that starts its path.
BASE = ["core/base"]
TENSOR = BASE + ["core/tensor"]
PRIMITIVE = TENSOR + ["core/primitive"]
DISPATCH = PRIMITIVE + ["core/dispatch"]
OPS = DISPATCH + ["core/ops", "core/ops/functors"]
AUTOGRAD = OPS + ["core/autograd"]
CORE = AUTOGRAD + ["core/nn", "core/optim", "core/data", "core/io"]
STORE = BASE + ["collectives/store"]
COLLECTIVES = CORE + ["collectives/store", "collectives"]
MAY_INCLUDE = {
    "core": CORE,                                 # core.h: all of it
    "core/base": [],
    "core/tensor": BASE,
    "core/primitive": TENSOR,
    "core/dispatch": PRIMITIVE,
    "core/ops": DISPATCH + ["core/ops/functors"],
    "core/ops/functors": [],
    "core/autograd": OPS,
    "core/nn": AUTOGRAD,
    "core/optim": AUTOGRAD,
    "core/io": AUTOGRAD,
    "core/data": AUTOGRAD + ["core/io"],
    "core/backend": OPS + ["core/backend/cpu", "core/backend/cuda", "core/backend/cuda/ops"],   # register.cpp: what is linked in
    "core/backend/cpu": OPS + ["core/backend/cpu/kernels"],
    "core/backend/cuda": TENSOR + ["core/io", "core/backend/cuda/kernels"],
    "core/backend/cuda/kernels": OPS,
    "core/backend/cuda/ops": OPS + ["core/backend/cuda", "core/backend/cuda/kernels"],
    "collectives/store": BASE,
    "collectives": CORE + ["collectives/store", "collectives/nccl"],
    "collectives/nccl": COLLECTIVES + ["core/backend/cuda"],
    "dtensor": COLLECTIVES,
    "parallel": COLLECTIVES + ["dtensor"],
    # The stages of the compiler: a step is recorded, passes rewrite its graph, code is generated, an executor runs it. None
    # of record, passes and run includes another, and none includes the front (compile/*.h), which uses them all.
    "compile": COLLECTIVES + ["compile/ir", "compile/record", "compile/passes", "compile/codegen", "compile/run"],
    "compile/ir": COLLECTIVES,
    "compile/record": COLLECTIVES + ["compile/ir"],
    "compile/codegen": COLLECTIVES,
    "compile/passes": COLLECTIVES + ["compile/ir", "compile/codegen"],
    "compile/run": COLLECTIVES + ["compile/ir", "compile/codegen"],
    "compile/quantization": COLLECTIVES + ["compile/ir", "compile/record", "compile/passes", "compile/run"],
    "compile/debug": COLLECTIVES + ["compile/ir", "compile/record", "compile/passes", "compile/codegen"],  # a library of its own
    "launcher": STORE,
    "examples": None,                             # None: anything
    "examples/models": COLLECTIVES + ["dtensor", "parallel"],  # a library: tessera::models
    "tests": None,
    "scripts": None,
}
# Projects of their own, and texts that are compiled where no tree is.
OWN_INCLUDES = ("tests/devices/", "tests/vgpu/device/")
# Files compiled several times, for other instruction sets or devices: nothing with inline functions may come in.
MAY_INCLUDE_FILES = {
    "core/ops/functors": ["core/ops/pointwise.def"],
    "core/backend/cpu/kernels": [
        "core/backend/cpu/kernels/*", "core/backend/cpu/isa.h", "core/base/boundaries.h", "core/ops/functors/*",
        "core/ops/pointwise.def", "core/ops/pointwise_columns.h", "core/tensor/philox.h",
        "immintrin.h", "cstddef", "cstdint", "type_traits",
    ],
    "collectives/kernels": ["collectives/kernels/*", "core/base/boundaries.h", "core/ops/functors/*", "cstdint", "type_traits"],
}
CODE = (".h", ".def", ".cpp", ".cu", ".cuh")
MAX_LINES = 600
COUNTED = CODE + (".py", ".sh", ".cmake")
# Folders that need a README: each top folder and the folders of core, except these.
NO_README = {".ci", "scripts/cmake"}
README_BELOW = ("core",)  # READMEs of other folders speak for what is below
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|/(home|root)/\w|\bnot implemented\b", re.IGNORECASE)
UNFINISHED_IN = CODE + (".py", ".sh", ".cmake", ".md", ".txt", ".json")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')

# Where a constant may be a limit at which a kernel cuts its work. It has a row of core/base/boundaries.h then, so that tests go
# beside it; or its name says that it is the grain of a loop over threads (which has a row), a number of bytes or a distance of
# prefetches; or it is one of these, which lead to no other loop or path: shapes that all calls have in common, bounds of caches,
# how many pieces there are at most, what only chooses between kernels.
KERNELS = ("core/backend/", "collectives/kernels/", "compile/codegen/", "compile/passes/")
NAMED = re.compile(r"kGrain|k\w*Bytes|k\w*Ahead")
NOT_LIMITS = {
    "compile/codegen/device_kernels.cpp": "kKernelsPerText",
    # Those of cards: tests/compile/codegen/cuda_test.cpp has bodies on both sides of each.
    "compile/codegen/gpu_layout.cpp": "kWarpThreads kWarpColumns kMostWidth kMostHeld kLeastRows kMostUnitsOfRows kMostRows kMostRowsOfTotals kOneRow "
                                      "kPacksOfTotals kAlign kWidest",
    "compile/codegen/gpu_layout.h": "kFinishColumns kFinishGroups",
    "compile/codegen/generate.cpp": "kKernelsPerFile",
    "compile/passes/join_epilogues.cpp": "kAuxMultiple",
    "compile/run/step_ranges.cpp": "kFewest",
    "compile/run/captured_steps.cpp": "kMostMoves",
    "compile/run/program.cpp": "kAlign",
    "core/backend/cuda/capture.cpp": "kMostTimes",
    # tests/cuda/kernels_matmul_test.cpp has tiles that are full and tiles that are not.
    "core/backend/cuda/kernels/attention.cpp": "kUnitRows",
    "core/backend/cuda/kernels/attention_tiles.h": "kDeltaRows",
    "compile/codegen/loops.cpp": "kMerged",
    "compile/codegen/prologue.h": "kWidth kLine",
    "compile/codegen/schedule.cpp": "kRowBuffers kChunk kChunksOfArrays kChunksOfScalars kLongRow kRowsBeside kChunksBeside "
                                    "kFetched kWorkBeside kWorthKeeping kPage kNear",
    "compile/codegen/sized.cpp": "kKernelsPerFile",
    "compile/codegen/softmax.cpp": "kLeastPiece kMostPiece kPage",
    "compile/codegen/toolchain.cpp": "kShown",
    "compile/passes/kernel_name.cpp": "kMaxOps",
    "compile/passes/recompute.cpp": "kMostNodes",
    "core/backend/cpu/batch_norm.cpp": "kPieceElements",
    "core/backend/cpu/kernels/random.cpp": "kLongs kVectors",  # tests/core/tensor/philox_test.cpp has parts of each
    "core/backend/cuda/ops/reduce.cpp": "kThreads kWordsOfAThread kMostBlocks",  # tests/cuda/kernels_bits_hash_test.cpp has any number
    "core/backend/cuda/refusals.cpp": "kMostWords",  # tests/cuda/refusals_test.cpp has more
    "core/backend/cpu/conv/conv.cpp": "kMost",
    "core/backend/cpu/conv/dot_rows.cpp": "kMostPointers",
    "core/backend/cpu/conv/dot_weight.cpp": "kLineUnits",
    "core/backend/cpu/conv/product.cpp": "kBlock kDeep",
    "core/backend/cpu/conv/winograd.cpp": "kIn kLeastGroups kMost",
    "core/backend/cpu/conv/winograd_weight.cpp": "kRows kApart kFloats kLeast kMost",
    "core/backend/cpu/elementwise.h": "kMaxWalked",
    "core/backend/cpu/gemm.h": "kMaxBatch",
    "core/backend/cpu/kernels/attention_bf16.cpp": "kStep",
    "core/backend/cpu/kernels/conv_dot.cpp": "kLanes",
    "core/backend/cpu/kernels/conv_winograd.cpp": "kPairs kIn kLanes",
    "core/backend/cpu/kernels/conv_winograd_table.h": "kWinogradTile",
    "core/backend/cpu/kernels/cross_entropy.cpp": "kLine",
    "core/backend/cpu/kernels/microgemm.h": "kLine kTileRows kTileVectors",
    "core/backend/cpu/kernels/packed_gemm.cpp": "kGroupRows kLine kAtOnce",
    "core/backend/cpu/kernels/pointwise.cpp": "kGroup",
    "core/backend/cpu/kernels/sparse.cpp": "kFour",
    "core/backend/cpu/kernels/vector.h": "kGroup",
    "core/backend/cpu/linalg.cpp": "kBlock",
    "core/backend/cpu/onednn_scaling.h": "kMost",
    "core/backend/cpu/packed_gemm.cpp": "kFit",
    "core/backend/cuda/caching_allocator.cpp": "kClassesPerDoubling kChunksOfCard",
    "core/backend/cuda/caching_allocator.h": "kSizeClasses",
    "core/backend/cuda/kernels/device.h": "kPack",
    "core/backend/cuda/kernels/draws.h": "kRandomThreads",
    "core/backend/cuda/kernels/indexing.cpp": "kRun",
    "core/backend/cuda/kernels/matmul.cpp": "kMaxBlocks kFewTiles kPart kMost",
    "core/backend/cuda/kernels/parameters.h": "kWalkDims kWalkOperands kMatmulLevels kRandomSteps kScanItems",
    "core/backend/cuda/kernels/pointwise.cpp": "kCheap kSteps",
    "core/backend/cuda/kernels/random.h": "kUpdatePiece",
    "core/backend/cuda/kernels/reduce.cpp": "kRowPiece kColumnPiece kWarpRow kMaxPieces",
    "core/backend/cuda/kernels/rows.cpp": "kSumRows kGradRows kMostRows kGradThreads kProcessors",
    "core/backend/cuda/kernels/scan.cpp": "kShort kManyLines kNormPiece",
    "core/backend/cuda/kernels/transpose.cpp": "kShortest kCountable",
    "core/backend/cuda/kernels/walk.cpp": "kCountable",
    "core/backend/cuda/launch.h": "kRemembered",
    "core/backend/cuda/ops/attention.cpp": "kMost kPack",
    "core/backend/cuda/ops/graphs.cpp": "kAlignment kMostScratch",
    "core/backend/cuda/ops/indexing.cpp": "kManyLines kShortLine",
    "core/backend/cuda/cublaslt.cpp": "kOldest",
    "core/backend/cuda/cudnn.cpp": "kOldest",
    "core/backend/cuda/cudnn/engine_choice.cpp": "kMostTimed kTimedRuns",
    "core/backend/cuda/cudnn/graph.cpp": "kMostKnobs",
    "core/backend/cuda/cudnn/graphs.cpp": "kWidest kPack kTile kLastWrong",
    "core/backend/cuda/cudnn/plans.cpp": "kMostPlans",
    "core/backend/cuda/library.cpp": "kOldestDriver",
    "core/backend/cuda/memory_ledger.cpp": "kShownHolders",
    "core/backend/cuda/ops/contract.cpp": "kEightBitMultiple",  # tests/cuda/scaled_matmul_test.cpp has both sides
    # tests/cuda/products_test.cpp has batches on both sides of kMostCalls, and rows that GELU may keep and may not.
    "core/backend/cuda/ops/products.cpp": "kPack kMostCalls kMostProducts kMostSuggestions kAuxMultiple kAuxAlignment",
    "core/backend/cuda/product_choice.cpp": "kTimedRuns",
    "core/backend/cuda/virtual_range.cpp": "kReservedPerByte",
}
CONSTANTS = re.compile(r"\bconstexpr\s+(?:u?int(?:\d+_t)?|size_t|long)\s+(k[A-Z][^;{}()]*?=[^;]*);")
NUMBER = re.compile(r"(?<![\w.])\d")
UNNAMED_LOOP = re.compile(r"\bparallel_ranges\(")


def longest(path, modules):
    found = [m for m in modules if path.startswith(m + "/")]
    return max(found, key=len, default=None)


def allowed_file(included, allowed):
    return any(included == a or (a.endswith("/*") and included.startswith(a[:-1])) for a in allowed)


def check_includes(path, lines):
    module = longest(path, MAY_INCLUDE)
    only = longest(path, MAY_INCLUDE_FILES)
    if module is None:
        yield f"{path}:1: in no module; give its folder a row in scripts/check_layout.py"
        return
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, included = match[1] == '"', match[2]
        if only is not None:
            if not allowed_file(included, MAY_INCLUDE_FILES[only]):
                yield f"{path}:{number}: {only} may not include {included}; it is compiled for several targets"
        elif quoted and not path.startswith(OWN_INCLUDES):
            target = longest(included, MAY_INCLUDE)
            if target is None:
                yield f"{path}:{number}: {included}: write includes from the repository root"
            elif MAY_INCLUDE[module] is not None and target != module and target not in MAY_INCLUDE[module]:
                yield f"{path}:{number}: {module} may not include {target} ({included})"


def check_constants(path, lines):
    """Constants of kernels that are numbers, without a name in the table of limits."""
    text = "\n".join(line.split("//")[0] for line in lines)
    for found in CONSTANTS.finditer(text):
        for name, value in re.findall(r"(k[A-Z]\w*)(?:<[^=]*>)?\s*=\s*((?:[^,(]|\([^)]*\))+)", found[1]):
            named = "limit(" in value or NAMED.fullmatch(name) or name in NOT_LIMITS.get(path, "").split()
            if NUMBER.search(value) and value.strip() not in ("-1", "0", "1") and not named:
                number = text[:found.start()].count("\n") + 1
                yield (f"{path}:{number}: {name} is a number; if another loop or path begins there, give it a row in "
                       "core/base/boundaries.h, else a place in NOT_LIMITS of scripts/check_layout.py")


def check_loops(path, lines):
    """Loops over threads that no row of the table of limits stands for."""
    for number, line in enumerate(lines, 1):
        if UNNAMED_LOOP.search(line.split("//")[0]):
            yield f"{path}:{number}: a loop over threads without a name; call parallel_for with a row of core/base/boundaries.h"


def check_readmes(files):
    folders = set()
    for path in files:
        parts = path.split("/")[:-1]
        if parts:
            folders.add(parts[0])
        if len(parts) > 1 and parts[0] in README_BELOW:
            folders.add("/".join(parts[:2]))
    for folder in sorted(folders - NO_README):
        if folder + "/README.md" not in files:
            yield f"{folder}/README.md:1: missing; say what the folder is for, its one idea, where to start reading"


def check(root):
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=True,
                            capture_output=True, text=True).stdout
    files = sorted(path for path in listed.split("\0") if path and (root / path).is_file())
    for path in files:
        if not path.endswith(tuple(set(COUNTED + UNFINISHED_IN))) or path.startswith("tests/golden/"):
            continue
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        if path.endswith(CODE):
            yield from check_includes(path, lines)
        if path.endswith((".h", ".cpp")) and path.startswith(KERNELS):
            yield from check_constants(path, lines)
            yield from check_loops(path, lines)
        if lines and lines[0].startswith("#!") and not os.access(root / path, os.X_OK):
            yield f"{path}:1: begins as a program does, but may not be executed; chmod +x"
        if path.endswith(COUNTED) and len(lines) > MAX_LINES:
            yield f"{path}:{len(lines)}: {len(lines)} lines, at most {MAX_LINES}; split it along an idea"
        if path != "scripts/check_layout.py":
            for number, line in enumerate(lines, 1):
                if UNFINISHED.search(line):
                    yield f"{path}:{number}: unfinished, or a path of one machine: {line.strip()[:80]}"
    yield from check_readmes(set(files))


if __name__ == "__main__":
    sys.exit(findings.report(__doc__, check))
