// Matches paths of modules and parameters: "h.*.attn.c_attn" names c_attn of every block.
#pragma once
#include <string_view>

namespace tessera::parallel {

/// True when `path` is `pattern`, in which "*" stands for any one part between dots.
inline bool matches(std::string_view pattern, std::string_view path) {
  for (;;) {
    size_t p = pattern.find('.'), q = path.find('.');
    std::string_view want = pattern.substr(0, p), have = path.substr(0, q);
    if (want == "*" ? have.empty() : want != have) return false;  // the root's path has no part
    if (p == pattern.npos || q == path.npos) return p == pattern.npos && q == path.npos;
    pattern.remove_prefix(p + 1);
    path.remove_prefix(q + 1);
  }
}

}  // namespace tessera::parallel
