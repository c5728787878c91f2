// Invalid flags of bench: each gives one line, before anything is measured.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(BenchFlags, WhatCannotBeIsToldAtOnceInOneLine) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "bench: no command is given; see bench --help"},
      {"trian", "bench: there is no command \"trian\" (is train meant?); see bench --help"},
      {"--version=3 trian", "bench: there is no command \"trian\""},
      {"train 3 --warmpu", "bench train: there is no flag --warmpu (is --warmup meant?)"},
      {"train --batch-size", "bench train: --batch-size expects a value; see bench train --help"},
      {"train --cpu_time --batch_size= --cpu 1", "bench train: --batch-size: is empty"},
      {"train --json --cpu-time", "bench train: --json: \"--cpu-time\" is a flag, not its value"},
      {"train --json a --json b", "bench train: --json is given twice"},
      {"train --model resnet500", "bench: unknown model \"resnet500\" (is resnet50 meant?)"},
      {"train --model resnet18 --seq-len 8", "--seq-len 8: resnet18 has no sequences"},
      {"train --cpu 1x", "bench train: --cpu: \"1x\" is no whole number"},
      {"train --cpu 99999999999", "bench train: --cpu = 99999999999 is no value that it takes"},
      {"train --batch-size 99999999999999999999", "--batch-size: 99999999999999999999 is out of"},
      {"train --threads 100000", "--threads 100000: expected 1 to 1024"},
      {"train --warmup -1", "--warmup -1: expected at least 0"},
      {"scaling --nproc 2,x", "bench scaling: --nproc: \"x\" is no whole number"},
      {"scaling --plot /none/x.svg", "--plot /none/x.svg: cannot write it: No such file"},
      {"passes --samples 0", "bench passes: --samples 0: a median takes at least 9"},
      {"collectives --seconds -1", "--seconds -1: expected at least 0"},
      {"checkpoint --tensors 0", "bench checkpoint: --tensors 0 --steps 50"},
      {"roofline --json /none/x.json", "bench: --json /none/x.json: cannot write it: No such file"},
  };
  for (const auto& [arguments, expected] : cases) {
    const Outcome o = run("timeout 20 " + bin("bench") + " " + arguments);
    EXPECT_EQ(o.status, 1) << arguments << "\n" << o.output;
    EXPECT_EQ(std::count(o.output.begin(), o.output.end(), '\n'), 1) << o.output;
    expect_contains(o.output, expected);
  }
}

TEST(BenchFlags, ANameThatNothingHasIsToldAtOnceWithThoseThereAre) {
  struct Command {
    const char *name, *one, *another;
  };
  for (auto [name, one, another] :
       {Command{"ops", "mul_number over", "softmax [64, 1024]"},
        Command{"collectives", "barrier", "reduce_scatter"},
        Command{"kernels", "softmax [rows, 1024]", "masked_softmax [rows, 1024]"}}) {
    const Outcome o = run(bin("bench") + " " + name + " --only no-such-name");
    EXPECT_EQ(o.status, 1) << o.output;
    EXPECT_TRUE(o.output.starts_with("bench " + std::string(name) + ": --only no-such-name: "))
        << o.output;
    EXPECT_EQ(std::count(o.output.begin(), o.output.end(), '\n'), 1) << o.output;
    expect_contains(o.output, one);
    expect_contains(o.output, another);
  }
}

}  // namespace
}  // namespace tessera
