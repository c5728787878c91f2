// A folder for one test, removed with all it holds.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/base/error.h"

namespace tessera {

class TempFolder {
 public:
  /// Inside `parent` where that exists, else inside the system's folder for temporary files.
  explicit TempFolder(const std::string& parent = "") {
    namespace fs = std::filesystem;
    fs::path where = fs::is_directory(parent) ? fs::path(parent) : fs::temp_directory_path();
    std::string pattern = (where / "tessera-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string str() const { return path_.string(); }
  /// Writes `bytes` to the file `name` and returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return *this / name;
  }
  std::string read(const std::string& name) const {
    std::ifstream in(path_ / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  size_t count() const {
    return size_t(std::distance(std::filesystem::directory_iterator(path_),
                                std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

/// The text of the UserError that `f` throws; fails the test when it throws none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  ADD_FAILURE() << "no UserError was thrown";
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace tessera
