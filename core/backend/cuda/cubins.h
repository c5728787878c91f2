// Finds or makes the code of a card (a cubin) for a kernel's text. It looks in this order: a pack
// that came with the program (share/tessera/sm_90.pack), what this process has compiled, what this
// user's programs have compiled before (the cache on disk), the run-time compiler. Invariant: a
// cubin is found by the hash of all it was made of (text, architecture, options, and whether for a
// card or for the virtual GPU), on disk also by the compiler's version. So what is found is what
// compiling would give, except that another version of the compiler may have made the pack.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend/cuda/pack.h"
#include "core/base/function_ref.h"

namespace tessera::cuda {

struct Compiled {
  std::string cubin;
  std::string log;  // warnings; empty where there are none
};
/// What the compiler is told: the same for every text, since it is part of a cubin's key.
std::vector<std::string> compiler_options(std::string_view architecture);
/// Compiles by NVRTC for `architecture` ("sm_90"). Throws UserError with the log where the text
/// does not compile, and where there is no compiler.
Compiled compile(const std::string& name, const std::string& text, std::string_view architecture);

/// A text as Program has it.
struct NamedText {
  std::string name, text;
};
/// Compiles `texts` for `architecture`, on all cores, and writes them as a pack; equal texts enter
/// once. What a pack at `path` that this version of the compiler made has of them is taken from
/// there. Returns how many were compiled. What a build does with all texts of this folder. Throws
/// as compile() and write_pack() do.
size_t make_pack(const std::string& path, const std::string& architecture,
                 std::span<const NamedText> texts);

/// Thread-safe.
class Cubins {
 public:
  /// Looks for packs in `folders`: the first of them that has one for an architecture counts.
  /// `cache` is the folder of what was compiled before, as io::ObjectCache takes it.
  Cubins(std::vector<std::string> folders, std::string cache);

  /// The code of `text` for `architecture`; `name` stands in errors. Threads and processes that ask
  /// for one text at once wait for the one of them that compiles it. Throws UserError where no pack
  /// has it and it cannot be compiled. A cache that cannot be written is said once, and not used.
  std::string get(const std::string& name, const std::string& text,
                  const std::string& architecture);

  struct Counts {
    int from_pack = 0, from_process = 0, from_cache = 0, compiled = 0;
  };
  Counts counts() const;

 private:
  /// A text that this process has compiled, or is compiling.
  struct Known {
    std::mutex making;
    std::string cubin;  // empty until it is made
  };
  const Pack* pack_for(const std::string& architecture);
  std::optional<Pack> find_pack(const std::string& architecture) const;
  std::string find_or_make(const std::string& key, FunctionRef<std::string()> make);
  void count(int Counts::*which);

  const std::vector<std::string> folders_;
  const std::string cache_;
  mutable std::mutex mutex_;
  std::map<std::string, std::optional<Pack>> packs_;  // by architecture
  std::map<std::string, Known> known_;                // by key
  bool said_ = false;                                 // that the cache cannot be used
  Counts counts_;
};

/// Those of this process. Packs are looked for in ../share/tessera, share/tessera and the folder
/// itself, seen from the program's folder; the cache is where compiled kernels of the CPU are.
Cubins& cubins();

}  // namespace tessera::cuda
