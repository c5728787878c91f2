// tckpt as a user runs it: exit status, one line of error, and the damage that it finds.
#include <sys/wait.h>

#include <array>
#include <cstdio>

#include "core/io/safetensors.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct Outcome {
  int status = -1;
  std::string text;  // stdout and stderr
};

class Tckpt : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("TESSERA_BIN");
    if (!folder || !std::filesystem::exists(std::string(folder) + "/tckpt"))
      GTEST_SKIP() << "TESSERA_BIN has no tckpt";
    program_ = std::string(folder) + "/tckpt";
    std::vector<io::NamedTensor> t{{"wte.weight", from_values<float>({1, 2, 3, 4, 5, 6}, {2, 3})},
                                   {"evil\x1b[31mname", from_values<int64_t>({7}, {1})}};
    io::save_safetensors(dir_ / "good", t, {{"step", "2000"}});
  }
  Outcome run(const std::string& arguments) {
    Outcome out;
    FILE* pipe = popen(("(" + program_ + " " + arguments + ") 2>&1").c_str(), "r");
    std::array<char, 4096> chunk;
    while (size_t n = fread(chunk.data(), 1, chunk.size(), pipe)) out.text.append(chunk.data(), n);
    int status = pclose(pipe);
    out.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return out;
  }
  void refused(const std::string& arguments, int status, const std::string& part) {
    Outcome o = run(arguments);
    EXPECT_EQ(o.status, status) << o.text;
    EXPECT_EQ(std::count(o.text.begin(), o.text.end(), '\n'), 1) << o.text;
    EXPECT_EQ(o.text.rfind("tckpt", 0), 0u) << o.text;
    expect_contains(o.text, part);
  }
  TempFolder dir_;
  std::string program_;
};

TEST_F(Tckpt, Inspect) {
  Outcome o = run("inspect " + (dir_ / "good"));
  EXPECT_EQ(o.status, 0);
  expect_contains(o.text, "wte.weight");
  expect_contains(o.text, "[2, 3]");
  expect_contains(o.text, "2 tensors, 7 elements, 32 bytes");
  expect_contains(o.text, "metadata step = 2000");
  EXPECT_EQ(o.text.find('\x1b'), std::string::npos);
}

TEST_F(Tckpt, VerifyFindsDamage) {
  Outcome o = run("verify " + (dir_ / "good"));
  EXPECT_EQ(o.status, 0);
  expect_contains(o.text, "sound, 2 tensors");
  expect_contains(o.text, "as stored");
  std::string bytes = dir_.read("good");
  std::string flipped = bytes;
  flipped.back() ^= 1;
  refused("verify " + dir_.write("flipped", flipped), 1, "the data hash to");
  refused("verify " + dir_.write("short", bytes.substr(0, bytes.size() - 1)), 1, "truncated");
  refused("verify " + dir_.write("text", "not a safetensors file at all"), 1,
          "is it a safetensors file?");
  refused("verify " + dir_.write("empty", ""), 1, "cannot hold");
}

// Other programs write such files: nothing says what the bytes were.
TEST_F(Tckpt, VerifyOfAFileWithoutAHashIsNoProof) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  std::string bytes(8, '\0');
  bytes[0] = char(header.size());
  refused("verify " + dir_.write("plain", bytes + header + std::string(4, 'x')), 2,
          "readable, 1 tensor, no params_xxh128 stored: bytes not verified");
}

TEST_F(Tckpt, VerifyReadsAFolderOfShards) {
  std::filesystem::create_directories(dir_ / "m");
  std::filesystem::copy_file(dir_ / "good", dir_ / "m/p1.safetensors");
  dir_.write("m/model.safetensors.index.json", R"({"weight_map":{"wte.weight":"p1.safetensors"}})");
  EXPECT_EQ(run("verify " + (dir_ / "m")).status, 0);
}

TEST_F(Tckpt, BadCommandLines) {
  refused("", 1, "tckpt: no command is given; see tckpt --help");
  refused("inspekt x", 1, "there is no command \"inspekt\" (is inspect meant?)");
  refused("inspect", 1, "tckpt inspect: FILE is required; see tckpt inspect --help");
  refused("inspect a b", 1, "\"b\" is neither a flag nor the value of one");
  refused("inspect ''", 1, "FILE: is empty");
  refused("consolidate a --to --prefix b", 1, "--to: \"--prefix\" is a flag, not its value");
  refused("convert a b --max_shard_bytes=1 --step=", 1, "--step: is empty");
  refused("verify " + (dir_ / "absent"), 1, "No such file");
  for (const char* rest : {"verify {}", "inspect {}", "convert {} x", "consolidate {} --to x"})
    refused(fmt::format(fmt::runtime(rest), dir_.str()), 1,
            fmt::format(": folder '{}' holds no saved step (latest, step-N, manifest.json) and no "
                        "weights",
                        dir_.str()));
  refused("convert a", 1, "TO is required");
  refused("convert a b", 1, "No such file");
  refused("consolidate a --to b", 1, "no checkpoint");
  refused("convert a b --max-shard-bytes many", 1, "--max-shard-bytes");
  refused("inspect " + (dir_ / "good") + " > /dev/full", 1, "cannot write");
}

TEST_F(Tckpt, HelpAndVersion) {
  EXPECT_EQ(run("--help").status, 0);
  Outcome o = run("--version");
  EXPECT_EQ(o.status, 0);
  expect_contains(o.text, "tckpt (Tessera) ");
}

}  // namespace
}  // namespace tessera
