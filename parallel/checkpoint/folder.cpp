#include "parallel/checkpoint/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "core/io/file.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using io::quote;

constexpr std::string_view kPrefix = "step-";

std::string name_of_step(int64_t step) { return fmt::format("step-{:09}", step); }

bool all_digits(std::string_view s) {
  return !s.empty() && s.find_first_not_of("0123456789") == std::string_view::npos;
}

std::optional<int64_t> parse_step(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::string_view digits = name.substr(kPrefix.size());
  int64_t step = 0;
  auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  bool whole = error == std::errc() && end == digits.data() + digits.size();
  return whole && name_of_step(step) == name ? std::optional(step) : std::nullopt;
}

// True for ".step-<digits>.tmp", ".step-<digits>.old.tmp" and "latest.tmp.<digits>.<digits>".
bool is_leftover(std::string_view name) {
  if (name.starts_with(".step-") && name.ends_with(".tmp")) {
    std::string_view middle = name.substr(6, name.size() - 10);
    if (middle.ends_with(".old")) middle.remove_suffix(4);
    return all_digits(middle);
  }
  constexpr std::string_view kPointer = "latest.tmp.";
  if (!name.starts_with(kPointer)) return false;
  std::string_view rest = name.substr(kPointer.size());
  size_t dot = rest.find('.');
  return dot != std::string_view::npos && all_digits(rest.substr(0, dot)) &&
         all_digits(rest.substr(dot + 1));
}

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  throw UserError(
      fmt::format("checkpoint: cannot {} {}: {}", what, quote(path), std::strerror(error)));
}

std::vector<std::string> entries(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    out.push_back(it->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory) fail("list", folder, error.value());
  return out;
}

void check_place(const std::string& folder, const Manifest& m) {
  if (auto why = misplaced(folder, m))
    throw UserError(fmt::format("checkpoint: {}: {}", quote(folder + "/" + kManifestName), *why));
}

}  // namespace

std::string step_name(int64_t step) { return name_of_step(step); }
std::string temporary_name(int64_t step) { return "." + name_of_step(step) + ".tmp"; }
std::string rank_file_name(int rank, int world_size) {
  return fmt::format("rank-{:04}-of-{:04}.safetensors", rank, world_size);
}

std::vector<int64_t> saved_steps(const std::string& folder) {
  std::vector<int64_t> out;
  for (const std::string& name : entries(folder))
    if (auto step = parse_step(name)) out.push_back(*step);
  std::ranges::sort(out);
  return out;
}

Latest read_latest(const std::string& folder) {
  std::string path = folder + "/" + kLatestName;
  std::error_code error;
  TESSERA_CHECK(
      fs::exists(fs::symlink_status(path, error)),
      "checkpoint: {}: No such file; it names the newest save, and the next one writes it",
      quote(path));
  std::string text = io::read_file(path, "checkpoint", 4096);
  size_t blank = text.find(' ');
  Latest out;
  auto step = parse_step(std::string_view(text).substr(0, blank));
  bool good = step && blank != std::string::npos && text.size() == blank + 34 &&
              text.back() == '\n' &&
              io::parse_digest(std::string_view(text).substr(blank + 1, 32), &out.manifest);
  TESSERA_CHECK(good, "checkpoint: {} holds {}, expected a step and its hash; it is damaged",
                quote(path), quote(text));
  out.step = *step;
  return out;
}

void write_latest(const std::string& folder, const Latest& latest) {
  io::write_file(folder + "/" + kLatestName,
                 fmt::format("{} {}\n", step_name(latest.step), to_string(latest.manifest)),
                 "checkpoint");
}

std::optional<Newest> newest(const std::string& folder) {
  std::string trouble;
  std::error_code unreadable;
  try {
    Latest latest = read_latest(folder);
    Newest out{latest.step, folder + "/" + step_name(latest.step), ""};
    // Damage inside the folder is reported when that step is read; here only the folder matters.
    if (fs::exists(out.folder, unreadable)) return out;
    trouble = fmt::format("checkpoint: {} names {}, which is gone",
                          quote(folder + "/" + kLatestName), step_name(latest.step));
  } catch (const UserError& e) {
    trouble = e.what();
  }
  std::vector<int64_t> steps = saved_steps(folder);
  if (steps.empty()) return std::nullopt;
  for (size_t i = steps.size(); i-- > 0;) {
    std::string name = step_name(steps[i]);
    try {
      check_place(folder + "/" + name, read_manifest(folder + "/" + name));
    } catch (const UserError& e) {
      trouble += fmt::format("; {}", e.what());
      continue;
    }
    return Newest{steps[i], folder + "/" + name, fmt::format("{}; taking {}", trouble, name)};
  }
  throw UserError(fmt::format("{}; no step saved in {} is sound", trouble, quote(folder)));
}

void mend_latest(const std::string& folder, const std::optional<Newest>& found) {
  if (found && !found->warning.empty()) {
    write_latest(folder, {found->step, read_step(found->folder).hash});
  } else if (!found && unlink((folder + "/" + kLatestName).c_str()) == 0) {
    sync_folder(folder);
  }
}

Newest resolve(const std::string& path) {
  std::error_code error;
  const std::optional<int64_t> step = parse_step(fs::path(path).filename().string());
  if (fs::exists(path + "/" + kManifestName, error)) return {step.value_or(-1), path, ""};
  TESSERA_CHECK(fs::is_directory(path, error), "checkpoint: {} is no folder; check the path",
                quote(path));
  if (step) return {*step, path, ""};  // damaged, for its reader to report
  auto found = newest(path);
  TESSERA_CHECK(found, "checkpoint: {} holds no saved step and no {}; check the path", quote(path),
                kManifestName);
  return *found;
}

std::optional<std::string> misplaced(const std::string& folder, const Manifest& m) {
  std::error_code error;
  fs::path path = fs::canonical(folder, error);
  auto step = parse_step(path.filename().string());
  if (!step) return std::nullopt;
  if (*step != m.step)
    return fmt::format("it describes step {}, but lies in {}; give the folder its own name", m.step,
                       path.filename().string());
  Latest latest;
  try {
    latest = read_latest(path.parent_path().string());
  } catch (const UserError&) {  // newest() reports it where it matters
    return std::nullopt;
  }
  if (latest.step != m.step || latest.manifest == m.hash) return std::nullopt;
  return fmt::format(
      "its hash is {}, but `latest` names {}; one of them is damaged. To take the step all the "
      "same, remove `latest`; to go on from an older one, the folder",
      to_string(m.hash), to_string(latest.manifest));
}

Manifest read_step(const std::string& folder) {
  Manifest m;
  try {
    m = read_manifest(folder);
  } catch (const UserError& e) {
    throw UserError(
        fmt::format("{}; to go on from an older step, remove the folder of this one", e.what()));
  }
  check_place(folder, m);
  return m;
}

void make_folder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0777) != 0) fail("create", folder, errno);
}

void make_folders(const std::string& folder) {
  std::error_code error;
  if (folder.empty() || fs::is_directory(folder, error)) return;
  std::string parent = fs::path(folder).lexically_normal().parent_path().string();
  if (parent != folder) make_folders(parent);
  if (mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) fail("create", folder, errno);
  TESSERA_CHECK(fs::is_directory(folder, error), "checkpoint: {} is not a folder; name another",
                quote(folder));
  sync_folder(parent.empty() ? "." : parent);
}

void sync_folder(const std::string& folder) {
  int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int error = fd < 0 ? errno : fsync(fd) != 0 ? errno : 0;
  if (fd >= 0) ::close(fd);
  // EINVAL is the answer of a file system that cannot sync folders, EACCES of a folder that may be
  // written but not read.
  if (error != 0 && error != EINVAL && error != EACCES) fail("sync", folder, error);
}

void rename_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail("rename the new folder to", to, errno);
}

std::string remove_temporary(const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;  // what could not be removed is found below
    fs::remove_all(at->path(), ignored);
    got_on();
  }
  fs::remove_all(folder, error);
  return error ? fmt::format("cannot remove {}: {}", quote(folder), error.message()) : "";
}

void remove_leftovers(const std::string& folder) {
  for (const std::string& name : entries(folder)) {
    if (!is_leftover(name)) continue;
    std::string trouble = remove_temporary(folder + "/" + name);
    TESSERA_CHECK(trouble.empty(), "checkpoint: {}; remove it", trouble);
  }
}

void remove_step(const std::string& folder, int64_t step) {
  std::string from = folder + "/" + step_name(step),
              to = fmt::format("{}/.{}.old.tmp", folder, step_name(step));
  rename_folder(from, to);
  std::string trouble = remove_temporary(to);
  TESSERA_CHECK(trouble.empty(), "checkpoint: {}; remove it", trouble);
}

FolderLock::FolderLock(const std::string& folder) {
  fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd_ < 0) fail("open", folder, errno);
  // Network file systems may have no locks for folders; the job then holds none.
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(fd_);
    throw UserError(fmt::format(
        "checkpoint: another job saves into {}; wait for its end or name another folder",
        quote(folder)));
  }
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace tessera::checkpoint
