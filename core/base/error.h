// Errors. Three families and no others: UserError (fix the call), CommError (rebuild the group),
// BugError (report it). Invariant: the text says `op: what is wrong, the values, what to do`;
// nothing in the library calls exit.
#pragma once
#include <fmt/core.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {

/// Root of all errors thrown by Tessera.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed something that cannot work; the text says what and how to fix it.
class UserError : public Error {
 public:
  using Error::Error;
};

/// Shapes, dtypes or devices of operands do not fit an op. The text holds every operand's shape.
class ShapeError : public UserError {
 public:
  using UserError::UserError;
};

/// A derivative was asked of something that has none.
class NotDifferentiable : public UserError {
 public:
  using UserError::UserError;
};

/// A collective failed. `ranks` are the ranks of `group` to blame (absent, dead or disagreeing);
/// the group must be rebuilt.
class CommError : public Error {
 public:
  CommError(const std::string& text, std::string group, uint64_t seq, std::vector<int> ranks,
            std::vector<int> culprits = {})
      : Error(text),
        group_(std::move(group)),
        seq_(seq),
        ranks_(std::move(ranks)),
        culprits_(std::move(culprits)) {}
  const std::string& group() const { return group_; }
  uint64_t seq() const { return seq_; }
  const std::vector<int>& ranks() const { return ranks_; }
  /// Ranks of the world that the failure comes down to: where a rank of `ranks` failed or waited
  /// because of another, that other one. Empty: not known.
  const std::vector<int>& culprits() const { return culprits_; }

 private:
  std::string group_;
  uint64_t seq_;
  std::vector<int> ranks_, culprits_;
};

/// An invariant of this library does not hold.
class BugError : public Error {
 public:
  using Error::Error;
};

namespace detail {
template <class E>
[[noreturn, gnu::noinline, gnu::cold]] void raise(std::string text) {
  throw E(text);
}
[[noreturn]] void raise_bug(const char* file, int line, const char* condition,
                            const std::string& text);
}  // namespace detail

}  // namespace tessera

/// Throws `E` with a formatted text unless `condition` holds.
#define TESSERA_CHECK_AS(E, condition, ...)                    \
  do {                                                         \
    if (!(condition)) [[unlikely]]                             \
      ::tessera::detail::raise<E>(::fmt::format(__VA_ARGS__)); \
  } while (false)

/// Throws UserError with a formatted text unless `condition` holds.
#define TESSERA_CHECK(condition, ...) TESSERA_CHECK_AS(::tessera::UserError, condition, __VA_ARGS__)

/// Throws BugError unless `condition`, an invariant of the library, holds.
#define TESSERA_ASSERT(condition, ...)                                                          \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::tessera::detail::raise_bug(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
