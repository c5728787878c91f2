// Instances and launches of kernels that read, write and sort by position; see indexing.h.
#include "core/backend/cuda/kernels/indexing.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kRun = 1024;  // elements that a block sorts

std::string type_of(DType t) { return std::string(element_type(name_of(t))); }

}  // namespace

int element_bytes(int64_t row_bytes, std::span<const void* const> addresses) {
  int bytes = 16;
  while (bytes > 1 && row_bytes % bytes != 0) bytes /= 2;
  for (const void* at : addresses)
    while (reinterpret_cast<uintptr_t>(at) % uintptr_t(bytes) != 0) bytes /= 2;
  return bytes;
}

int widen_lines(IndexCall& c, int bytes) {
  const void* addresses[] = {c.in, c.out};
  const int64_t line_bytes = int64_t(c.inner.divisor) * bytes;
  const int wide = element_bytes(line_bytes, addresses);
  const unsigned lines = c.count / c.inner.divisor;
  c.inner = make_divisor(uint32_t(line_bytes / wide));
  c.count = lines * c.inner.divisor;
  return wide;
}

Instance indexing_instance(int bytes, DType index) {
  return {fmt::format("index_{}_{}", bytes, name_of(index)),
          {{"E", bytes == 16 ? "Quad" : std::string(bits_type(bytes))}, {"I", type_of(index)}}};
}
Instance segments_instance(std::string_view join, DType in, DType out) {
  const char* type = join == "sum"    ? "Sum"
                     : join == "prod" ? "Prod"
                     : join == "amax" ? "Max"
                                      : "Min";
  return {fmt::format("scatter_{}_{}_{}", join, name_of(in), name_of(out)),
          {{"JOIN", type}, {"IN", type_of(in)}, {"OUT", type_of(out)}}};
}
int segment_pack(DType in, DType out, int64_t inner, std::span<const void* const> addresses) {
  const int pack = 16 / int(std::max(size_of(in), size_of(out)));
  const bool aligned = std::all_of(addresses.begin(), addresses.end(), [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  });
  return aligned && inner % pack == 0 ? pack : 1;
}
Instance sparse_instance(DType dtype) {
  return {fmt::format("sparse_{}", name_of(dtype)), {{"T", type_of(dtype)}}};
}
Instance sort_instance(bool descending, DType dtype) {
  return {fmt::format("sort_{}_{}", descending ? "down" : "up", name_of(dtype)),
          {{"DESCENDING", descending ? "true" : "false"}, {"T", type_of(dtype)}}};
}

SortLaunches sort_launches(int64_t outer, int64_t n, int64_t inner) {
  const int64_t lines = outer * inner, runs = (n + kRun - 1) / kRun;
  TESSERA_ASSERT(lines * runs < int64_t(1) << 31 && lines * n < int64_t(1) << 31,
                 "kernels: a sort of {} lines of {}", lines, n);
  SortLaunches all{{}, 0};
  if (lines * n == 0) return all;
  SortCall call{};
  call.outer = unsigned(outer), call.n = unsigned(n), call.inner = unsigned(inner);
  call.runs = unsigned(runs), call.run = unsigned(kRun), call.count = unsigned(lines * n);
  all.launches.push_back({"blocks", {{unsigned(lines * runs), 1, 1}, {256, 1, 1}, 0}, call, 1});
  for (int64_t run = kRun; run < n; run *= 2) {
    call.run = unsigned(run);
    all.launches.push_back({"merge", cover(lines * n, 256), call, all.result});
    all.result = 1 - all.result;
  }
  return all;
}

}  // namespace tessera::cuda
