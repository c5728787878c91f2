// From a kernel's text to the code of a card (a cubin). In this order: a pack that came with the
// program (share/tessera/sm_90.pack), what this user's programs have compiled before, the run-time
// compiler. Invariant: a cubin is found by the hash of all it was made of (text, architecture,
// options), so one that is found is the one that compiling would give, up to the compiler's
// version.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend/cuda/pack.h"
#include "core/base/function_ref.h"

namespace tessera::cuda {

/// Cubins that were compiled on this machine. `key` is a name of letters, digits and '-'.
class CubinStore {
 public:
  virtual ~CubinStore() = default;
  /// Returns the entry; where there is none, the one that `make` returns, which is kept. Processes
  /// that ask for one entry at once should let one of them make it.
  virtual std::string find_or_make(const std::string& key, FunctionRef<std::string()> make) = 0;
};

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
/// once. What a build does with all texts of this folder. Throws as compile() and write_pack() do.
void make_pack(const std::string& path, const std::string& architecture,
               std::span<const NamedText> texts);

/// Thread-safe.
class Cubins {
 public:
  /// Looks for packs in `folders`, the first of them that has one for an architecture counts.
  /// Without `store`, nothing is kept between runs.
  Cubins(std::vector<std::string> folders, std::unique_ptr<CubinStore> store);

  /// The code of `text` for `architecture`; `name` stands in errors. Throws UserError where no pack
  /// has it and it cannot be compiled.
  std::string get(const std::string& name, const std::string& text,
                  const std::string& architecture);

  struct Counts {
    int from_pack = 0, from_store = 0, compiled = 0;
  };
  Counts counts() const;
  /// Before the first get().
  void set_store(std::unique_ptr<CubinStore> store) { store_ = std::move(store); }

 private:
  const Pack* pack_for(const std::string& architecture);

  const std::vector<std::string> folders_;
  std::unique_ptr<CubinStore> store_;
  mutable std::mutex mutex_;
  std::map<std::string, std::optional<Pack>> packs_;  // by architecture
  Counts counts_;
};

/// Those of this process. Packs are looked for in ../share/tessera, share/tessera and the folder
/// itself, seen from the program's folder.
Cubins& cubins();

}  // namespace tessera::cuda
