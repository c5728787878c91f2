// A pass turns a verified graph into a verified graph that computes the same
// (compile/passes/passes.h).
#pragma once
#include <string_view>

namespace tessera::compiler {

struct Graph;

struct Pass {
  std::string_view name;  // "cse": what TESSERA_COMPILE_SKIP=cse,fuse leaves out
  void (*run)(Graph&);
};

}  // namespace tessera::compiler
