// Files that are changed while a run reads them: the run ends with an error that names the file and
// what happened to it, on one rank and on several, whichever thread was reading.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tests/examples/command.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class TrainChangedData : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
  }
  // Runs `command`, which writes metrics.jsonl, and calls `change` after some of its steps.
  Outcome changed(const std::string& command, const std::function<void()>& change) const {
    const std::string metrics = folder_ / "metrics.jsonl", output = folder_ / "out.txt";
    fs::remove(metrics);
    const std::string line =
        "exec timeout 60 " + command + " --metrics " + metrics + " > " + output + " 2>&1";
    const pid_t child = fork();
    if (child == 0) {
      execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      _exit(127);
    }
    for (int i = 0, lines = 0; i < 30000 && lines < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::ifstream in(metrics);
      lines = int(std::count(std::istreambuf_iterator<char>(in), {}, '\n'));
    }
    change();
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            folder_.read("out.txt")};
  }
  std::string on_tokens(const std::string& path) const {
    return bin("train") + " --data tokens:" + path +
           " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 --steps 1000000";
  }
  TempFolder folder_;
};

TEST_F(TrainChangedData, TokensThatAreCutOff) {
  const std::string path = folder_.write("k.bin", std::string(4000000, '\0'));
  const Outcome o = changed(on_tokens(path), [&] { fs::resize_file(path, 4096); });
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "data: '" + path + "' was truncated from 4000000 to 4096 bytes");
  expect_contains(o.output, "Put the file back as it was");
}

TEST_F(TrainChangedData, TokensThatAreWrittenAgain) {
  const std::string path = folder_.write("k.bin", std::string(4000000, '\0'));
  const Outcome o = changed(on_tokens(path), [&] {
    std::ofstream(path, std::ios::in | std::ios::binary) << std::string(4000000, '\0');
  });
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "'" + path + "' was written to (it has 4000000 bytes as before)");
}

TEST_F(TrainChangedData, AllRanksEnd) {
  const std::string path = folder_.write("k.bin", std::string(4000000, '\0'));
  const Outcome o = changed(bin("tlaunch") + " --nproc 2 " + on_tokens(path) + " --batch-size 4",
                            [&] { fs::resize_file(path, 4096); });
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "was truncated from 4000000 to 4096 bytes");
}

TEST_F(TrainChangedData, ATokenFileThatIsReplacedGoesOn) {
  const std::string path = folder_.write("k.bin", std::string(400000, '\0'));
  folder_.write("new.bin", "new");
  const Outcome o =
      changed(on_tokens(path).substr(0, on_tokens(path).find(" --steps")) + " --steps 200",
              [&] { fs::rename(folder_ / "new.bin", path); });
  EXPECT_EQ(o.status, 0) << o.output;
}

TEST_F(TrainChangedData, RawImagesThatAreCutOff) {
  for (int i = 1; i <= 5; ++i)
    folder_.write("cifar/data_batch_" + std::to_string(i) + ".bin", cifar_records(40));
  folder_.write("cifar/test_batch.bin", cifar_records(10));
  const std::string sizes("\0\0\0\x28\0\0\0\x1c\0\0\0\x1c", 12);  // 40 of 28 x 28
  for (const std::string part : {"train", "t10k"}) {
    folder_.write("idx/" + part + "-images-idx3-ubyte",
                  std::string("\0\0\x08\x03", 4) + sizes + std::string(40 * 28 * 28, 'x'));
    folder_.write("idx/" + part + "-labels-idx1-ubyte",
                  std::string("\0\0\x08\x01", 4) + sizes.substr(0, 4) + std::string(40, '\1'));
  }
  struct Case {
    std::string data, file, bytes;
  };
  for (const Case& c : {Case{"cifar10:" + (folder_ / "cifar"), "cifar/data_batch_3.bin", "122920"},
                        Case{"idx:" + (folder_ / "idx"), "idx/train-images-idx3-ubyte", "31376"}}) {
    const Outcome o = changed(bin("train") + " --model resnet18 --set width=8 --batch-size 4" +
                                  " --steps 1000000 --data " + c.data,
                              [&] { fs::resize_file(folder_ / c.file, 0); });
    EXPECT_EQ(o.status, 1) << o.output;
    expect_contains(o.output,
                    (folder_ / c.file) + "' was truncated from " + c.bytes + " to 0 bytes");
  }
}

// Skipping images that cannot be read does not mean to skip all of an archive that is gone.
TEST_F(TrainChangedData, AnArchiveThatIsCutOff) {
  for (const std::string name : {"cats", "dogs"})
    for (int i = 0; i < 20; ++i)
      folder_.write("images/" + name + "/" + std::to_string(i) + ".png", png_of(picture(32, 32)));
  const std::string path = folder_ / "images.tar";
  for (const std::string bad : {"stop", "skip"}) {
    ASSERT_EQ(run("tar -cf " + path + " -C " + (folder_ / "images") + " .").status, 0);
    const auto bytes = std::to_string(fs::file_size(path));
    const Outcome o =
        changed(bin("train") + " --model resnet18 --set width=8 --batch-size 4 --image-size 32" +
                    " --steps 1000000 --workers 2 --bad-images " + bad + " --data images:" + path,
                [&] { fs::resize_file(path, 0); });
    EXPECT_EQ(o.status, 1) << o.output;
    if (o.output.find("without the image libraries") != std::string::npos) GTEST_SKIP();
    expect_contains(o.output, "images.tar' was truncated from " + bytes + " to 0 bytes");
  }
}

}  // namespace
}  // namespace tessera
