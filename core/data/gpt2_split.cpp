#include "core/data/gpt2_split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <string>

#include "core/base/error.h"

namespace tessera::data {
namespace {

// Unicode's White_Space property, spelled out: PCRE2's own \s differs from it by U+180E.
constexpr const char* kSpaces = R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a})"
                                R"(\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

std::string text_of(int error) {
  char text[256] = {};
  pcre2_get_error_message(error, reinterpret_cast<unsigned char*>(text), sizeof text);
  return text;
}

}  // namespace

void Gpt2Split::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

Gpt2Split::Gpt2Split() {
  std::string s = kSpaces;
  std::string pattern = R"('(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\p{L}\p{N})" + s + "]+|[" +
                        s + "]+(?![^" + s + "])|[" + s + "]+";
  int error = 0;
  size_t offset = 0;
  code_.reset(pcre2_compile(reinterpret_cast<const unsigned char*>(pattern.data()), pattern.size(),
                            PCRE2_UTF, &error, &offset, nullptr));
  TESSERA_ASSERT(code_, "GPT-2's pattern does not compile at {}: {}", offset, text_of(error));
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // only for speed: matching works without it
}

void Gpt2Split::for_each(std::string_view text, FunctionRef<void(std::string_view)> f) const {
  std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(
      pcre2_match_data_create_from_pattern(code_.get(), nullptr), pcre2_match_data_free);
  TESSERA_CHECK(match != nullptr, "tokenizer gpt2-bpe: out of memory");
  for (size_t at = 0; at < text.size();) {
    int found =
        pcre2_match(code_.get(), reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                    at, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED, match.get(), nullptr);
    TESSERA_CHECK(found > 0, "tokenizer gpt2-bpe: cannot split the text at offset {}: {}", at,
                  text_of(found));
    size_t end = pcre2_get_ovector_pointer(match.get())[1];
    TESSERA_ASSERT(end > at, "empty word at offset {}", at);
    f(text.substr(at, end - at));
    at = end;
  }
}

}  // namespace tessera::data
