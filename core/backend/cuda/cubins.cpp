#include "core/backend/cuda/cubins.h"

#include <atomic>
#include <climits>
#include <exception>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/object_cache.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class Compilation {
 public:
  Compilation(const std::string& name, const std::string& text) {
    nvrtc().create(&program_, text.c_str(), name.c_str(), 0, nullptr, nullptr);
  }
  ~Compilation() { nvrtc().destroy.result(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  NvrtcResult run(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& o : options) pointers.push_back(o.c_str());
    return nvrtc().compile.result(program_, int(pointers.size()), pointers.data());
  }
  std::string log() const {
    size_t bytes = 0;
    nvrtc().log_size(program_, &bytes);
    std::string log(bytes, '\0');
    if (bytes) nvrtc().log(program_, log.data());
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    return log;
  }
  std::string cubin() const {
    size_t bytes = 0;
    nvrtc().cubin_size(program_, &bytes);
    std::string cubin(bytes, '\0');
    nvrtc().cubin(program_, cubin.data());
    return cubin;
  }

 private:
  ProgramHandle program_ = nullptr;
};

std::vector<std::string> folders_of_program() {
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  if (error) return {};
  return {folder.parent_path() / "share/tessera", folder / "share/tessera", folder};
}

}  // namespace

// The multiplications and additions that a text fuses are those that it says (fma), on every
// device.
std::vector<std::string> compiler_options(std::string_view architecture) {
  return {fmt::format("--gpu-architecture={}", architecture), "--std=c++20", "--fmad=false"};
}

Compiled compile(const std::string& name, const std::string& text, std::string_view architecture) {
  Compilation program(name, text);
  const NvrtcResult r = program.run(compiler_options(architecture));
  if (r == NvrtcResult::kCompilation)
    throw UserError(
        fmt::format("cuda: {} does not compile for {}:\n{}", name, architecture, program.log()));
  TESSERA_CHECK(r != NvrtcResult::kInvalidOption,
                "cuda: NVRTC {}.{} does not compile for {}: {}; install a newer one, or set "
                "TESSERA_CUDA_LIBRARIES to its folder",
                nvrtc().major, nvrtc().minor, architecture, program.log());
  if (r != NvrtcResult::kSuccess) raise(r, nvrtc().compile.symbol());
  return {program.cubin(), program.log()};
}

namespace {

int nvrtc_version() { return nvrtc().major * 1000 + nvrtc().minor * 10; }

// The pack at `path`, if this compiler made it; one that is damaged is replaced.
std::optional<Pack> earlier_pack(const std::string& path, const std::string& architecture) {
  try {
    std::optional<Pack> pack = Pack::open(path, architecture);
    if (pack && pack->version() == nvrtc_version()) return pack;
  } catch (const UserError& e) {
    logging::warn("{}", e.what());
  }
  return {};
}

std::string kept_by(const Pack& pack, const CubinKey& key) {
  try {
    return pack.find(key).value_or("");
  } catch (const UserError& e) {
    logging::warn("{}", e.what());
    return {};
  }
}

}  // namespace

size_t make_pack(const std::string& path, const std::string& architecture,
                 std::span<const NamedText> texts) {
  std::map<CubinKey, const NamedText*> distinct;
  for (const NamedText& t : texts) distinct.emplace(cubin_key(t.text, architecture), &t);
  const std::optional<Pack> earlier = earlier_pack(path, architecture);
  std::vector<PackEntry> entries;
  for (const auto& [key, text] : distinct)
    entries.push_back({key, earlier ? kept_by(*earlier, key) : ""});
  std::atomic<size_t> next = 0, compiled = 0;
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    for (size_t i; (i = next++) < entries.size();) {
      if (!entries[i].cubin.empty()) continue;
      const NamedText& t = *distinct.at(entries[i].key);
      try {
        Compiled c = compile(t.name, t.text, architecture);
        if (!c.log.empty()) logging::warn("cuda: {}: {}", t.name, c.log);
        entries[i].cubin = std::move(c.cubin);
        ++compiled;
      } catch (...) {
        std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = entries.size();
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
  write_pack(path, architecture, nvrtc_version(), std::move(entries));
  return compiled;
}

Cubins::Cubins(std::vector<std::string> folders, std::string cache)
    : folders_(std::move(folders)), cache_(std::move(cache)) {}

std::optional<Pack> Cubins::find_pack(const std::string& architecture) const {
  for (const std::string& folder : folders_) {
    std::optional<Pack> pack =
        Pack::open(fmt::format("{}/{}.pack", folder, architecture), architecture);
    if (!pack) continue;
    const int newest = why_no_driver().empty() ? driver().version / 1000 : INT_MAX;
    if (pack->version() / 1000 > newest) {
      logging::warn(
          "cuda: {} is left out: its code is for drivers of CUDA {} or later, this one is "
          "for {}; update the driver",
          pack->path(), pack->version() / 1000, newest);
      return {};
    }
    logging::info("cuda: {} kernels from {}", pack->size(), pack->path());
    return pack;
  }
  return {};
}

const Pack* Cubins::pack_for(const std::string& architecture) {
  std::lock_guard lock(mutex_);
  auto known = packs_.find(architecture);
  if (known == packs_.end()) known = packs_.emplace(architecture, find_pack(architecture)).first;
  return known->second ? &*known->second : nullptr;
}

void Cubins::count(int Counts::*which) {
  std::lock_guard lock(mutex_);
  ++(counts_.*which);
}

std::string Cubins::get(const std::string& name, const std::string& text,
                        const std::string& architecture) {
  const CubinKey key = cubin_key(text, architecture);
  if (const Pack* pack = pack_for(architecture)) {
    if (std::optional<std::string> cubin = pack->find(key)) {
      count(&Counts::from_pack);
      return *std::move(cubin);
    }
  }
  TESSERA_CHECK(why_no_nvrtc().empty(),
                "cuda: {} is in no pack for {} beside the program, and there is {}", name,
                architecture, why_no_nvrtc());
  // Another version of the compiler may give other code, and code that an older driver refuses.
  const std::string entry =
      fmt::format("{}-{}-nvrtc{}-{}{}", to_string(key), architecture, nvrtc().major, nvrtc().minor,
                  nvrtc().emulation.empty() ? "" : "-virtual");
  Known* known;
  {
    std::lock_guard lock(mutex_);
    known = &known_[entry];
  }
  std::lock_guard one_at_a_time(known->making);
  if (!known->cubin.empty()) {
    count(&Counts::from_process);
    return known->cubin;
  }
  return find_or_make(entry, [&] {
    Compiled c = compile(name, text, architecture);
    if (!c.log.empty()) logging::warn("cuda: {}: {}", name, c.log);
    count(&Counts::compiled);
    return known->cubin = std::move(c.cubin);
  });
}

// Without the cache a program takes longer to start, but it runs.
std::string Cubins::find_or_make(const std::string& key, FunctionRef<std::string()> make) {
  std::string made;
  try {
    bool here = false;
    const auto entry = io::ObjectCache(cache_, ".cubin", "cuda")
                           .find_or_make(
                               key, [&](const std::string&) { return made = make(); }, &here);
    if (!here) count(&Counts::from_cache);
    return std::string(entry.object());
  } catch (const io::CacheError& e) {
    std::lock_guard lock(mutex_);
    if (!std::exchange(said_, true))
      logging::warn("{}; until then every start compiles its kernels again", e.what());
  }
  return made.empty() ? make() : made;
}

Cubins::Counts Cubins::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

Cubins& cubins() {
  static Cubins& all = *new Cubins(folders_of_program(), "");
  return all;
}

}  // namespace tessera::cuda
