#!/bin/sh
# Checks the scalar functions of core/ops/functors on all 2^32 floats; about three minutes per function and core.
# Usage: scripts/check_math_all.sh [NAME...]   (default: all unary functions; MARCH=x86-64-v3 chooses the target)
set -eu
cd "$(dirname "$0")/.."
march=${MARCH:-x86-64-v3}
program=$(mktemp)
trap 'rm -f "$program"' EXIT
${CXX:-c++} -std=c++20 -O3 -march="$march" -ffp-contract=off -fno-math-errno -fno-trapping-math -I. \
  tests/core/ops/math_test.cpp -o "$program" -lgtest -lgtest_main -pthread
filter='*UnaryTest*'
if [ $# -gt 0 ]; then
  filter=
  for name in "$@"; do filter="$filter:*/$name"; done
fi
TESSERA_MATH_STRIDE=1 "$program" --gtest_brief=1 --gtest_filter="${filter#:}"
