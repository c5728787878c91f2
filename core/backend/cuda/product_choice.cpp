#include "core/backend/cuda/product_choice.h"

#include <cstring>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/stream.h"
#include "core/base/deterministic.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/io/tuned_choices.h"

namespace tessera::cuda {
namespace {

constexpr int kTimedRuns = 3;  // of each suggestion, after one that is not timed

// Times of a virtual GPU mean nothing.
bool times_products() {
  static const bool on =
      env::get_int("TESSERA_CUDA_TIME_PRODUCTS", driver().emulated ? 0 : 1, 0, 1) == 1;
  return on;
}

const io::TunedChoices& on_disk() {
  static const auto& all = *new io::TunedChoices(".product", "cuda", "products");
  return all;
}

std::string bytes_of(const ProductChoice& c) {
  std::string bytes(sizeof(c), '\0');
  std::memcpy(bytes.data(), &c, sizeof(c));
  return bytes;
}
std::optional<ProductChoice> choice_of(std::string_view bytes) {
  ProductChoice c;
  if (bytes.size() != sizeof(c)) return {};
  std::memcpy(&c, bytes.data(), sizeof(c));
  return c;
}

std::optional<ProductChoice> kept(const std::string& key) {
  const auto bytes = on_disk().find(key);
  return bytes ? choice_of(*bytes) : std::nullopt;
}
ProductChoice keep(const std::string& key, const ProductChoice& mine) {
  return choice_of(on_disk().keep(key, bytes_of(mine))).value_or(mine);
}

ProductChoice fastest(const std::vector<ProductChoice>& all, const Stream& stream,
                      FunctionRef<bool(const ProductChoice&)> run) {
  const ProductChoice* best = &all[0];
  double least = std::numeric_limits<double>::infinity();
  for (const ProductChoice& c : all) {
    if (!run(c)) continue;
    StreamEvent begin(stream, StreamEvent::Timing::kOn);
    for (int i = 0; i < kTimedRuns; ++i) run(c);
    StreamEvent end(stream, StreamEvent::Timing::kOn);
    if (const double ms = elapsed_ms(begin, end); ms < least) least = ms, best = &c;
  }
  return *best;
}

/// The choices of this process, by key.
class Choices {
 public:
  std::optional<ProductChoice> find(const std::string& key) {
    std::lock_guard lock(mutex_);
    const auto it = all_.find(key);
    return it == all_.end() ? std::nullopt : std::optional(it->second);
  }
  /// Keeps the first.
  ProductChoice add(const std::string& key, const ProductChoice& choice) {
    std::lock_guard lock(mutex_);
    return all_.emplace(key, choice).first->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, ProductChoice> all_;
};
Choices& choices() {
  static Choices& all = *new Choices;
  return all;
}

}  // namespace

// The vendor's recommendation.
size_t product_workspace_bytes(int device) {
  return size_t(properties(device).major >= 9 ? 32 : 4) << 20;
}

std::optional<ChosenProduct> choose_product(
    const std::string& text, const Stream& stream,
    FunctionRef<std::vector<ProductChoice>(bool deterministic)> suggest,
    FunctionRef<bool(const ProductChoice&)> run, FunctionRef<bool(const ProductChoice&)> fits) {
  const bool deterministic = deterministic_algorithms();
  const std::string all =
      fmt::format("{}, cuBLASLt {}{}: {}", identity(stream.device.index), cublaslt()->version,
                  deterministic ? ", deterministic" : "", text);
  const std::string key = io::TunedChoices::key_of(all);
  if (const auto known = choices().find(key)) return ChosenProduct{*known};
  const bool timed = times_products() && !deterministic;
  if (timed)
    if (const auto known = kept(key); known && fits(*known))
      return ChosenProduct{choices().add(key, *known)};
  const std::vector<ProductChoice> suggestions = suggest(deterministic);
  if (suggestions.empty()) return {};
  if (!timed) return ChosenProduct{choices().add(key, suggestions[0])};
  if (captures(stream)) return ChosenProduct{suggestions[0], false};
  return ChosenProduct{choices().add(key, keep(key, fastest(suggestions, stream, run)))};
}

}  // namespace tessera::cuda
