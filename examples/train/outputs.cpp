#include "examples/train/outputs.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/base/error.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

struct Named {
  const char* flag;
  std::string path;
};

std::vector<Named> inputs_of(const Options& o) {
  std::vector<Named> in = {{"--weights", o.weights}};
  const size_t colon = o.data.find(':');
  if (colon != std::string::npos) in.push_back({"--data", o.data.substr(colon + 1)});
  constexpr std::string_view kWordPiece = "wordpiece:";
  const bool prefixed = o.tokenizer.starts_with(kWordPiece);
  if (o.tokenizer != "char" && o.tokenizer != "byte")
    in.push_back({"--tokenizer", o.tokenizer.substr(prefixed ? kWordPiece.size() : 0)});
  return in;
}

// What takes any number of writers, as /dev/null does.
bool is_device(const std::string& path) {
  std::error_code error;
  return fs::is_other(path, error);
}

// One file or one folder, by whatever names.
bool are_one(const std::string& a, const std::string& b) {
  std::error_code error;
  return !a.empty() && !b.empty() && !is_device(a) && fs::equivalent(a, b, error) && !error;
}

// Of what may not be there yet.
fs::path place_of(const std::string& path) {
  std::error_code error;
  return fs::weakly_canonical(fs::absolute(path, error), error);
}

void check_apart(const Options& o) {
  const std::vector<Named> in = inputs_of(o);
  const Named out[] = {{"--save", o.save}, {"--metrics", o.metrics}, {"--profile", o.profile}};
  for (const Named& w : out) {
    for (const Named& r : in)
      TESSERA_CHECK(!are_one(w.path, r.path),
                    "train: {} {} would overwrite what {} reads; name another path", w.flag, w.path,
                    r.flag);
    // A folder of weights is read whole; of a data folder, a run's own files may well be part.
    std::error_code error;
    TESSERA_CHECK(!fs::exists(w.path, error) ||
                      !are_one(fs::absolute(w.path, error).parent_path().string(), o.weights),
                  "train: {} {} would overwrite a file of --weights {}; name another path", w.flag,
                  w.path, o.weights);
  }
  for (size_t i = 0; i < std::size(out); ++i)
    for (size_t j = 0; j < i; ++j)
      TESSERA_CHECK(out[i].path.empty() || out[j].path.empty() || is_device(out[i].path) ||
                        place_of(out[i].path) != place_of(out[j].path),
                    "train: {} and {} are both {}; name two paths", out[j].flag, out[i].flag,
                    out[i].path);
}

// By a file: permissions do not say all (a read-only file system, /proc).
void check_writable(const Options& o, const fs::path& folder) {
  std::string probe = (folder / ".train-XXXXXX").string();
  const int fd = mkstemp(probe.data());
  TESSERA_CHECK(fd >= 0, "train: --save {}: {} cannot be written to: {}; name another place",
                o.save, folder.string(), std::strerror(errno));
  ::close(fd);
  ::unlink(probe.c_str());
}

void check_save(const Options& o) {
  if (o.save.empty()) return;
  std::error_code error;
  fs::path place =
      fs::weakly_canonical(fs::absolute(o.save), error);  // a link is followed, as it will be
  if (error) place = fs::absolute(o.save);
  if (!saves_folder(o)) {
    TESSERA_CHECK(!fs::is_directory(place, error),
                  "train: --save {}: that is a folder; name a file in it that ends in "
                  ".safetensors, or give {}/ for a folder of Hugging Face",
                  o.save, o.save);
    TESSERA_CHECK(fs::is_directory(place.parent_path(), error),
                  "train: --save {}: {} is no folder; make it first", o.save,
                  place.parent_path().string());
    return check_writable(o, place.parent_path());
  }
  if (!place.has_filename()) place = place.parent_path();  // "a/" ends in an empty name
  while (!fs::exists(place, error) && place.has_relative_path()) place = place.parent_path();
  TESSERA_CHECK(fs::is_directory(place, error), "train: --save {}: {} is a file, not a folder",
                o.save, place.string());
  check_writable(o, place);
}

}  // namespace

void check_outputs(const Options& o) {
  check_apart(o);
  check_save(o);
}

}  // namespace tessera::train
