// Which of the library's suggestions computes a product. Choices are kept by the process and, where
// they were timed, on disk, so that another process need not time them.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/backend/cuda/cublaslt.h"
#include "core/base/function_ref.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

struct ProductChoice {
  blas::Algorithm algorithm;
  uint64_t workspace_bytes;
};

struct ChosenProduct {
  ProductChoice choice;
  bool for_good = true;  // false: another use of the product may choose better
};

/// The most scratch that products of card `device` ask for.
size_t product_workspace_bytes(int device);

/// The choice for the product that `text` describes, all that suggestions depend on, on the card
/// and stream. `suggest` asks the library for its suggestions, best first; nothing is returned
/// where there are none. `run` enqueues the product by a suggestion, with results that nobody
/// reads. `fits` says whether the library takes a choice that was kept. May wait for the stream.
std::optional<ChosenProduct> choose_product(
    const std::string& text, const Stream& stream,
    FunctionRef<std::vector<ProductChoice>(bool deterministic)> suggest,
    FunctionRef<bool(const ProductChoice&)> run, FunctionRef<bool(const ProductChoice&)> fits);

}  // namespace tessera::cuda
