// Whatever writes over a file that is needed, under whatever name: it is refused, or the file stays
// as it is. Every writer is tried on every protected file.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class Overwrite : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::string text;
    for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i % 97) + " of a text\n";
    folder_.write("text.txt", text);
    folder_.write("texts/a.txt", text), folder_.write("texts/b.txt", text);
    fs::create_directory(folder_ / "out");
    const Outcome saved = run(train() + text_file() + " --steps 4 --save-every 2 --checkpoint " +
                              run_folder() + " --save " + weights());
    ASSERT_EQ(saved.status, 0) << saved.output;
  }
  std::string text_file() const { return " --data text:" + (folder_ / "text.txt"); }
  std::string run_folder() const { return folder_ / "run"; }
  std::string weights() const { return folder_ / "w.safetensors"; }
  std::string step() const { return run_folder() + "/step-000000004"; }
  static std::string train() {
    return "OMP_NUM_THREADS=1 " + bin("train") +
           " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 --batch-size 4";
  }
  // Bytes of all files but those in out/.
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.str()))
      if (entry.is_regular_file() && !entry.is_symlink()) {
        const std::string name = fs::relative(entry.path(), folder_.str()).string();
        if (!name.starts_with("out/")) all[name] = folder_.read(name);
      }
    return all;
  }
  // Runs it, and expects that only files in out/ have changed.
  Outcome harmless(const std::string& command) const {
    const auto before = contents();
    const Outcome o = run("cd " + folder_.str() + " && " + command);
    for (const auto& [name, bytes] : before) {
      EXPECT_TRUE(fs::exists(folder_ / name)) << name << " is gone: " << command << "\n"
                                              << o.output;
      EXPECT_TRUE(folder_.read(name) == bytes) << name << " changed: " << command << "\n"
                                               << o.output;
    }
    for (const auto& [name, bytes] : contents())
      EXPECT_TRUE(before.contains(name)) << name << " is new: " << command << "\n" << o.output;
    return o;
  }
  void refused(const std::string& command) const {
    const Outcome o = harmless(command);
    EXPECT_EQ(o.status, 1) << command << "\n" << o.output;
    EXPECT_EQ(o.output.find("step 1/"), o.output.npos) << command << "\n" << o.output;
    EXPECT_NE(o.output.find("name another"), o.output.npos) << command << "\n" << o.output;
  }
  TempFolder folder_;
};

using Writer = std::function<std::string(const std::string& path)>;

TEST_F(Overwrite, NoWriterChangesASavedStep) {
  const std::string trains = train() + text_file() + " --steps 1";
  std::vector<Writer> writers = {
      [&](auto& p) { return trains + " --save " + p; },
      [&](auto& p) { return trains + " --save " + p + "/"; },
      [&](auto& p) { return trains + " --metrics " + p; },
      [&](auto& p) { return trains + " --profile " + p; },
      [&](auto& p) { return trains + " --tensorboard " + p; },
      [&](auto& p) { return trains + " --checkpoint " + p; },
      [&](auto& p) { return bin("tckpt") + " convert " + run_folder() + " " + p; },
      [&](auto& p) { return bin("tckpt") + " convert " + weights() + " " + p; },
  };
  if (std::ifstream(bin("bench")))
    writers.push_back([](auto& p) { return bin("bench") + " roofline --json " + p; });
  fs::create_symlink("run/step-000000004", folder_ / "link");
  fs::create_symlink("../run/step-000000004/manifest.json", folder_ / "out/link");
  fs::create_symlink("../run/step-000000004/new.safetensors", folder_ / "out/dangling.safetensors");
  const std::string protected_names[] = {
      step() + "/rank-0000-of-0001.safetensors",
      step() + "/manifest.json",
      step() + "/new.safetensors",
      step() + "/new",
      step(),
      run_folder() + "/latest",
      run_folder() + "/step-000000009",
      "run/step-000000002/rank-0000-of-0001.safetensors",
      "out/../run/./step-000000004/rank-0000-of-0001.safetensors",
      "link/rank-0000-of-0001.safetensors",
      "out/link",
      "out/dangling.safetensors",
  };
  for (const Writer& writer : writers)
    for (const std::string& path : protected_names) {
      const Outcome o = harmless(writer(path));
      EXPECT_EQ(o.status, 1) << writer(path) << "\n" << o.output;
      EXPECT_EQ(o.output.find("step 1/"), o.output.npos) << writer(path) << "\n" << o.output;
    }
  for (const std::string& path : protected_names)
    if (path.ends_with(".safetensors"))
      refused(bin("tckpt") + " consolidate " + run_folder() + " --to " + path);
  EXPECT_EQ(run(bin("tckpt") + " verify " + run_folder()).status, 0);
  // A step without its manifest counts as a step, and so does one that was renamed; a folder that
  // only has the name of a step does not.
  fs::copy(run_folder(), folder_ / "lost", fs::copy_options::recursive);
  fs::remove(folder_ / "lost/step-000000004/manifest.json");
  refused(trains + " --save lost/step-000000004/rank-0000-of-0001.safetensors");
  fs::create_directories(folder_ / "out/step-000000004");
  EXPECT_EQ(harmless(trains + " --save out/step-000000004/w.safetensors").status, 0);
  fs::copy(step(), folder_ / "kept", fs::copy_options::recursive);
  refused(trains + " --save kept/rank-0000-of-0001.safetensors");
}

TEST_F(Overwrite, HardLinksLeadNowhere) {
  const std::string file = step() + "/rank-0000-of-0001.safetensors", link = folder_ / "out/l";
  const std::string trains = train() + text_file() + " --steps 4";
  for (const std::string& command :
       {trains + " --metrics " + link, trains + " --profile " + link, trains + " --save " + link,
        bin("tckpt") + " consolidate " + run_folder() + " --to " + link + ".safetensors",
        bin("bench") + " roofline --json " + link}) {
    if (command.find("/bench") != command.npos && !std::ifstream(bin("bench"))) continue;
    for (const std::string& name : {link, link + ".safetensors"}) {
      fs::remove(name);
      fs::create_hard_link(file, name);
    }
    EXPECT_EQ(harmless(command).status, 0) << command;
  }
}

TEST_F(Overwrite, TheFolderOfARunKeepsItsNames) {
  fs::create_directory(folder_ / "fresh");
  for (const std::string name : {"latest", "step-000000002"})
    for (const std::string flag : {"--metrics", "--profile", "--save"})
      refused(train() + text_file() + " --steps 2 --checkpoint fresh " + flag + " fresh/" + name);
  // Beside them there is room.
  EXPECT_EQ(run("cd " + folder_.str() + " && " + train() + text_file() +
                " --steps 2 --checkpoint fresh --metrics fresh/m.jsonl --save fresh/w.safetensors")
                .status,
            0);
}

TEST_F(Overwrite, AFileThatIsNoPointerIsNotReplaced) {
  folder_.write("mine/latest", "notes of mine");
  refused(train() + text_file() + " --steps 1 --checkpoint mine");
  refused(bin("tckpt") + " convert w.safetensors mine");
}

TEST_F(Overwrite, NoOutputTakesThePlaceOfAnInput) {
  fs::create_symlink("../text.txt", folder_ / "out/link");
  fs::create_hard_link(folder_ / "text.txt", folder_ / "out/hard");
  fs::create_symlink("texts", folder_ / "other");
  folder_.write("ids/train.bin", std::string(2000, '\0'));
  folder_.write("ids/val.bin", std::string(2000, '\0'));
  const std::string on_file = train() + text_file() + " --weights w.safetensors --steps 1 ";
  for (const std::string flag : {"--save", "--metrics", "--profile"}) {
    for (const std::string path :
         {"text.txt", "./out/../text.txt", "out/link", "out/hard", "w.safetensors"})
      refused(on_file + flag + " " + path);
    for (const std::string path : {"texts/a.txt", "other/b.txt"}) {
      refused(train() + " --steps 1 --data text:texts " + flag + " " + path);
      refused(train() + " --steps 1 --data text:other " + flag + " " + path);
    }
    refused(train() + " --steps 1 --data tokens:ids " + flag + " ids/val.bin");
  }
}

// What a run left in the folder that it reads is replaced by the next one.
TEST_F(Overwrite, EarlierOutputsMayBeAmongTheData) {
  const std::string command =
      "cd " + folder_.str() + " && " + train() +
      " --steps 5 --data text:texts --tokenizer byte --metrics texts/m.jsonl"
      " --profile texts/p.json --save texts/w.safetensors";
  for (int i = 0; i < 2; ++i) {
    const Outcome o = run(command);
    EXPECT_EQ(o.status, 0) << o.output;
  }
}

// Paths that are no UTF-8 are kept with a save, losslessly.
TEST_F(Overwrite, PathsOfAnyBytesAreSaved) {
  const std::string odd = folder_ / "n\xff\\x";
  fs::create_directory(odd);
  fs::copy_file(folder_ / "text.txt", odd + "/t.txt");
  const std::string command = train() + " --data 'text:" + odd + "/t.txt' --checkpoint '" + odd +
                              "/run' --save '" + odd + "/w.safetensors'";
  EXPECT_EQ(run(command + " --steps 2 --save-every 1").status, 0);
  const Outcome o = run(command + " --steps 3 --resume");
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "note: not as it was saved: --steps 3 (was 2)\n");
  const Outcome looked = run(bin("tckpt") + " inspect '" + odd + "/run'");
  expect_contains(looked.output, "extra train.data = text:" + folder_.str() + "/n\\xff\\\\x/t.txt");
}

// Names as long as a file system has them, and longer ones.
TEST_F(Overwrite, NamesThatAreTooLongAreRefusedAtOnce) {
  const std::string trains = train() + text_file() + " --steps 1 ";
  auto name = [](size_t bytes, const std::string& end) {
    return "out/" + std::string(bytes - end.size(), 'e') + end;
  };
  const std::string longest = name(255, ".safetensors");
  EXPECT_EQ(run("cd " + folder_.str() + " && " + trains + " --save " + longest).status, 0);
  EXPECT_TRUE(fs::exists(folder_ / longest));
  for (const std::string& flags :
       {"--save " + name(256, ".safetensors"), "--save " + name(300, "/"),
        "--metrics " + name(256, ".jsonl"), "--profile " + name(256, ".json"),
        "--tensorboard " + name(256, ""), "--checkpoint " + name(256, "")}) {
    const Outcome o = harmless(trains + flags);
    EXPECT_EQ(o.status, 1) << flags << "\n" << o.output;
    expect_contains(o.output, "File name too long");
    EXPECT_EQ(o.output.find("step 1/"), o.output.npos) << flags << "\n" << o.output;
  }
  std::string deep = folder_ / "out";
  while (deep.size() < 4060)
    deep += "/" + std::string(std::min<size_t>(200, 4070 - deep.size()), 'd');
  const Outcome o = harmless(trains + "--checkpoint " + deep);
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "leaves no room for the names of what is saved there");
  EXPECT_EQ(o.output.find("step 1/"), o.output.npos) << o.output;
}

}  // namespace
}  // namespace tessera
