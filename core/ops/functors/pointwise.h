// Every pointwise op as one functor of its name, exp::apply(x), from the column `kernel` of
// core/ops/pointwise.def. One text, used four ways: eager CPU, eager CUDA, generated CPU and
// generated CUDA; so it includes nothing but that table, whose text stands in its place in
// generated code, and its includer supplies prelude.h and the functions of this folder first.
namespace tessera::functors {

#define TESSERA_OP1(name, kernel, ...) \
  struct name {                        \
    template <class T>                 \
    TESSERA_FN T apply(T x) {          \
      return kernel;                   \
    }                                  \
  };
#define TESSERA_OP2(name, kernel, ...) \
  struct name {                        \
    template <class T>                 \
    TESSERA_FN T apply(T x, T y) {     \
      return kernel;                   \
    }                                  \
  };
#define TESSERA_OP3(name, kernel, ...)  \
  struct name {                         \
    template <class T>                  \
    TESSERA_FN T apply(T x, T y, T z) { \
      return kernel;                    \
    }                                   \
  };
#define TESSERA_PREDICATE(name, kernel, ...) \
  struct name {                              \
    template <class T>                       \
    TESSERA_FN bool apply(T x) {             \
      return kernel;                         \
    }                                        \
  };
#define TESSERA_COMPARISON(name, kernel, ...) \
  struct name {                               \
    template <class T>                        \
    TESSERA_FN bool apply(T x, T y) {         \
      return kernel;                          \
    }                                         \
  };
#include "core/ops/pointwise.def"

}  // namespace tessera::functors
