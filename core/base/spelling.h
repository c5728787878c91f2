// Words of messages: which word was probably meant, and numbers with their nouns.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The one of `known` that becomes `word` by the fewest letters changed, added, left out or swapped
/// with their neighbour (optimal string alignment distance); "" where a third of the letters of
/// `word` does not suffice.
std::string nearest_word(std::string_view word, std::span<const std::string> known);

/// "1 rank", "4 ranks"; for nouns with a plural in s.
std::string counted(int64_t n, std::string_view noun);

}  // namespace tessera
