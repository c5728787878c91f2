#include "examples/train/outputs.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "core/io/safetensors.h"
#include "parallel/checkpoint/overwrite.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

struct Named {
  const char* flag;
  std::string path;
};

constexpr std::string_view kWeightsFlag = "--weights";
// The files of a Hugging Face folder.
constexpr const char *kWeights = "model.safetensors", *kConfig = "config.json";

std::vector<Named> inputs_of(const Options& o) {
  std::vector<Named> in = {{kWeightsFlag.data(), o.weights}};
  const size_t colon = o.data.find(':');
  if (colon != std::string::npos) in.push_back({"--data", o.data.substr(colon + 1)});
  constexpr std::string_view kWordPiece = "wordpiece:";
  const bool prefixed = o.tokenizer.starts_with(kWordPiece);
  if (o.tokenizer != "char" && o.tokenizer != "byte")
    in.push_back({"--tokenizer", o.tokenizer.substr(prefixed ? kWordPiece.size() : 0)});
  return in;
}

// True for a file that any number of writers can share, such as /dev/null.
bool is_device(const std::string& path) {
  std::error_code error;
  return fs::is_other(path, error);
}

// True for two names of one file or folder.
bool are_one(const std::string& a, const std::string& b) {
  std::error_code error;
  return !a.empty() && !b.empty() && !is_device(a) && fs::equivalent(a, b, error) && !error;
}

// Resolves a path that may not exist yet.
fs::path place_of(const std::string& path) {
  std::error_code error;
  const fs::path whole = fs::absolute(path, error), place = fs::weakly_canonical(whole, error);
  return error ? whole.lexically_normal() : place;  // for instance if a name is too long
}

bool is_below(const fs::path& place, const std::string& folder) {
  std::error_code error;
  if (folder.empty() || !fs::is_directory(folder, error)) return false;
  const fs::path top = fs::canonical(folder, error);
  return !error && std::ranges::mismatch(top, place).in1 == top.end();
}

// Whether an existing file is of the kind that the flag writes, so that an earlier run may have
// written it.
bool is_earlier_output(const Named& w) {
  std::string begin(64, '\0');
  std::ifstream in(w.path, std::ios::binary);
  in.read(begin.data(), long(begin.size()));
  begin.resize(size_t(in.gcount()));
  const std::string_view text = begin, flag = w.flag;
  if (text.empty()) return true;
  if (flag == "--metrics") return text.starts_with("{\"step\":") || text.starts_with("{\"event\":");
  if (flag == "--profile") return text.find("\"traceEvents\":") != text.npos;
  if (w.path.ends_with(kConfig)) return text[0] == '{';
  try {
    io::SafetensorsFile::open(w.path);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

// Lists the files that a run creates or replaces.
std::vector<Named> outputs_of(const Options& o) {
  std::vector<Named> out;
  if (saves_folder(o))
    for (const char* name : {kWeights, kConfig}) out.push_back({"--save", o.save + name});
  else
    out.push_back({"--save", o.save});
  out.push_back({"--metrics", o.metrics}), out.push_back({"--profile", o.profile});
  std::erase_if(out, [](const Named& w) { return w.path.empty(); });
  return out;
}

// Throws if the output would replace something that is read: now, later by another rank, or by a
// run that resumes this one.
void check_reads(const Options& o, const Named& w) {
  std::error_code error;
  for (const Named& r : inputs_of(o)) {
    TESSERA_CHECK(!are_one(w.path, r.path),
                  "train: {} {} would overwrite what {} reads; name another path", w.flag, w.path,
                  r.flag);
    const bool exists = fs::is_regular_file(w.path, error), weights = r.flag == kWeightsFlag;
    // A folder of weights is read as a whole; a folder of data may contain what earlier runs wrote.
    TESSERA_CHECK(
        !exists || !is_below(place_of(w.path), r.path) || (!weights && is_earlier_output(w)),
        "train: {} {} would overwrite a file of {} {}; name another path", w.flag, w.path, r.flag,
        r.path);
  }
}

void check_apart(const Options& o) {
  const std::vector<Named> out = outputs_of(o);
  for (const Named& w : out) {
    checkpoint::check_may_write(w.path, fmt::format("train: {}", w.flag), o.checkpoint);
    check_reads(o, w);
  }
  for (const Named& r : inputs_of(o))  // an input may be a whole folder
    TESSERA_CHECK(!are_one(o.save, r.path),
                  "train: --save {} would overwrite what {} reads; name another path", o.save,
                  r.flag);
  if (!o.tensorboard.empty())
    checkpoint::check_may_write(o.tensorboard, "train: --tensorboard", o.checkpoint);
  for (size_t i = 0; i < out.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      TESSERA_CHECK(is_device(out[i].path) || place_of(out[i].path) != place_of(out[j].path),
                    "train: {} and {} are both {}; name two paths", out[j].flag, out[i].flag,
                    out[i].path);
}

// Checks by making a file: permissions do not tell everything (a read-only file system, /proc).
void check_writable(const Options& o, const fs::path& folder) {
  std::string probe = (folder / ".train-XXXXXX").string();
  const int fd = mkstemp(probe.data());
  TESSERA_CHECK(fd >= 0, "train: --save {}: {} cannot be written to: {}; name another place",
                o.save, folder.string(), std::strerror(errno));
  ::close(fd);
  ::unlink(probe.c_str());
}

// Creates what saving will create, and removes it again, so that for instance too long names fail
// here.
void try_save(const Options& o) {
  if (!saves_folder(o)) {
    io::AtomicFile probe(o.save, "train: --save");
    return;
  }
  std::vector<fs::path> missing;  // the outermost last
  std::error_code error;
  for (fs::path at = fs::path(o.save).parent_path(); !at.empty() && !fs::exists(at, error);
       at = at.parent_path())
    missing.push_back(at);
  std::vector<fs::path> made;  // the innermost last
  std::string trouble;
  for (; !missing.empty() && trouble.empty(); missing.pop_back())
    if (fs::create_directory(missing.back(), error))
      made.push_back(missing.back());
    else
      trouble = error.message();
  auto remove_made = [&] {
    for (; !made.empty(); made.pop_back()) fs::remove(made.back(), error);
  };
  try {
    TESSERA_CHECK(trouble.empty(), "train: --save {}: the folder cannot be made: {}; name another",
                  o.save, trouble);
    for (const Named& w : outputs_of(o))
      if (w.path.starts_with(o.save)) io::AtomicFile probe(w.path, "train: --save");
  } catch (...) {
    remove_made();
    throw;
  }
  remove_made();
}

void check_save(const Options& o) {
  if (o.save.empty()) return;
  std::error_code error;
  // A link is followed, as saving will follow it.
  fs::path place = fs::weakly_canonical(fs::absolute(o.save), error);
  if (error) place = fs::absolute(o.save);
  if (!saves_folder(o)) {
    TESSERA_CHECK(!fs::is_directory(place, error),
                  "train: --save {}: that is a folder; name a file in it that ends in "
                  ".safetensors, or give {}/ for a folder of Hugging Face",
                  o.save, o.save);
    TESSERA_CHECK(fs::is_directory(place.parent_path(), error),
                  "train: --save {}: {} is no folder; make it first", o.save,
                  place.parent_path().string());
    check_writable(o, place.parent_path());
    return try_save(o);
  }
  while (!fs::exists(place, error) && place.has_relative_path()) place = place.parent_path();
  TESSERA_CHECK(fs::is_directory(place, error), "train: --save {}: {} is a file, not a folder",
                o.save, place.string());
  check_writable(o, place);
  try_save(o);
}

}  // namespace

void check_outputs(const Options& o) {
  check_apart(o);
  check_save(o);
}

}  // namespace tessera::train
