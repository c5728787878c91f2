// Words of messages: which was meant by one that does not exist, and how many of a thing.
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

/// "1 rank", "4 ranks"; of a noun whose plural ends in s.
std::string counted(int64_t n, std::string_view noun);

}  // namespace tessera
