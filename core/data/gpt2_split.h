// Divides text into words as GPT-2 does, before byte pairs are merged, so that no token spans two
// words. The pattern is
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and PCRE2 matches it, with its tables of Unicode. Invariant: the words, in order, are the text.
// Internal: not part of the public interface.
#pragma once
#include <memory>
#include <string_view>

#include "core/base/function_ref.h"

struct pcre2_real_code_8;

namespace tessera::data {

class Gpt2Split {
 public:
  Gpt2Split();
  /// Calls `f` with every word of `text`, which must be UTF-8. Thread-safe.
  void for_each(std::string_view text, FunctionRef<void(std::string_view)> f) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace tessera::data
