// Which word was meant by one that does not exist.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The one of `known` that becomes `word` by the fewest letters changed, added, left out or swapped
/// with their neighbour (optimal string alignment distance); "" where a third of the letters of
/// `word` does not suffice.
std::string nearest_word(std::string_view word, std::span<const std::string> known);

}  // namespace tessera
