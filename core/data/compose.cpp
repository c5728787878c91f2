#include "core/data/compose.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/data/permutation.h"
#include "core/ops/create.h"
#include "core/ops/views.h"

namespace tessera::data {
namespace {

// An epoch that no pass over data has, so that a split is no order in which a sampler shuffles.
constexpr uint64_t kSplit = 0xFFFF'FFFF'FFFF;

// Calls f(name, a's, b's) for each tensor of two batches of the same names.
template <class F>
void for_each_pair(const Batch& a, const Batch& b, F f) {
  f("inputs", a.inputs, b.inputs);
  f("targets", a.targets, b.targets);
  for (size_t i = 0; i < a.extra.size(); ++i)
    f(a.extra[i].name, a.extra[i].tensor, b.extra[i].tensor);
}

Tensor rows_like(const Tensor& t, int64_t rows) {
  Shape shape = t.shape();
  shape[0] = rows;
  return empty(shape, t.dtype());
}

std::vector<int64_t> part_sizes(int64_t n, const std::vector<double>& sizes) {
  const double sum = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  std::vector<int64_t> parts;
  const bool fractions = std::abs(sum - 1) < 1e-9 && std::ranges::max(sizes) <= 1;
  for (double s : sizes) {
    TESSERA_CHECK(s > 0 && (fractions || s == std::floor(s)),
                  "random_split: a part of {} items, of parts whose sum is {}; expected numbers of "
                  "items, or fractions whose sum is 1",
                  s, sum);
    parts.push_back(fractions ? int64_t(std::floor(double(n) * s)) : int64_t(s));
  }
  if (fractions)
    for (int64_t i = 0, left = n - std::accumulate(parts.begin(), parts.end(), int64_t(0));
         i < left; ++i)
      ++parts[size_t(i) % parts.size()];
  TESSERA_CHECK(fractions || sum == double(n),
                "random_split: parts of {} items together of a dataset of {}; give sizes that add "
                "up to it, or fractions whose sum is 1",
                sum, n);
  return parts;
}

Batch places_for_items(int64_t rows) {
  Batch out;
  out.items = std::make_shared<std::vector<Item>>(size_t(rows));
  return out;
}

// The batch that the loader delivers, collated of the items of `read`.
Batch collated(const Batch& read, const Collate& collate) {
  Batch out = read.items->empty() ? Batch() : collate(*read.items);
  out.cursor = read.cursor, out.sample_numbers = read.sample_numbers;
  auto check = [&](const std::string& name, const Tensor& t) {
    TESSERA_CHECK(!t.defined() || (t.ndim() >= 1 && t.size(0) == read.rows()),
                  "collate: {} is {} for {} samples; expected a row for each", name, describe(t),
                  read.rows());
  };
  check("inputs", out.inputs), check("targets", out.targets);
  for (const NamedTensor& t : out.extra) check(t.name, t.tensor);
  return out;
}

}  // namespace

Batch Batch::to(Device device) const {
  Batch moved = *this;
  for (Tensor* t : {&moved.inputs, &moved.targets, &moved.sample_numbers})
    if (t->defined()) *t = t->to(device);
  for (NamedTensor& t : moved.extra) t.tensor = t.tensor.to(device);
  return moved;
}

const Tensor& Batch::operator[](std::string_view name) const {
  if (name == "inputs" && inputs.defined()) return inputs;
  if (name == "targets" && targets.defined()) return targets;
  std::string others;
  for (const NamedTensor& t : extra) {
    if (t.name == name) return t.tensor;
    others += " " + t.name;
  }
  throw UserError(fmt::format("batch: it has no {}, beside inputs and targets it has:{}", name,
                              others.empty() ? " nothing" : others));
}

// ---- TensorDataset

TensorDataset::TensorDataset(Tensor inputs, Tensor targets, std::vector<NamedTensor> extra) {
  rows_.inputs = std::move(inputs), rows_.targets = std::move(targets);
  rows_.extra = std::move(extra);
  for_each_pair(rows_, rows_, [&](const std::string& name, const Tensor& t, const Tensor&) {
    TESSERA_CHECK(t.defined() && t.device().is_cpu() && t.ndim() >= 1 && t.size(0) >= 1 &&
                      t.size(0) == rows_.inputs.size(0),
                  "TensorDataset: {} is {}, inputs {}; expected CPU tensors of equally many rows",
                  name, t.defined() ? describe(t) : "undefined", describe(rows_.inputs));
  });
  rows_.inputs = rows_.inputs.detach().contiguous();
  rows_.targets = rows_.targets.detach().contiguous();
  for (NamedTensor& t : rows_.extra) t.tensor = t.tensor.detach().contiguous();
}

Batch TensorDataset::allocate(int64_t rows) const {
  Batch out{rows_like(rows_.inputs, rows), rows_like(rows_.targets, rows)};
  for (const NamedTensor& t : rows_.extra) out.extra.push_back({t.name, rows_like(t.tensor, rows)});
  return out;
}

void TensorDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  for_each_pair(rows_, to, [&](const std::string&, const Tensor& from, const Tensor& into) {
    const size_t bytes = size_t(from.numel() / from.size(0)) * size_of(from.dtype());
    std::copy_n(static_cast<const std::byte*>(from.raw_values()) + size_t(sample.index) * bytes,
                bytes, static_cast<std::byte*>(into.raw()) + size_t(row) * bytes);
  });
}

// ---- Subset, random_split

Subset::Subset(std::shared_ptr<const Dataset> dataset, std::vector<int64_t> items)
    : dataset_(std::move(dataset)), items_(std::move(items)) {
  TESSERA_CHECK(!items_.empty(), "Subset: no items; a dataset has at least one");
  for (int64_t i : items_)
    TESSERA_CHECK(i >= 0 && i < dataset_->size(),
                  "Subset: item {} of a dataset that has {} (0: endless)", i, dataset_->size());
}

void Subset::read(const Sample& sample, int64_t row, const Batch& to) const {
  dataset_->read({sample.number, items_[size_t(sample.index)]}, row, to);
}

std::vector<std::shared_ptr<const Subset>> random_split(std::shared_ptr<const Dataset> dataset,
                                                        const std::vector<double>& sizes,
                                                        uint64_t seed) {
  const int64_t n = dataset->size();
  TESSERA_CHECK(n > 0 && !sizes.empty(), "random_split: {} items (0: endless) into {} parts", n,
                sizes.size());
  std::vector<std::shared_ptr<const Subset>> parts;
  int64_t at = 0;
  for (int64_t size : part_sizes(n, sizes)) {
    std::vector<int64_t> items;
    for (int64_t i = 0; i < size; ++i) items.push_back(permute(at++, n, seed, kSplit));
    parts.push_back(std::make_shared<const Subset>(dataset, std::move(items)));
  }
  return parts;
}

// ---- ConcatDataset

ConcatDataset::ConcatDataset(std::vector<std::shared_ptr<const Dataset>> parts)
    : parts_(std::move(parts)) {
  TESSERA_CHECK(!parts_.empty(), "ConcatDataset: no datasets");
  const Batch first = parts_[0]->allocate(1);
  for (size_t p = 0; p < parts_.size(); ++p) {
    const int64_t n = parts_[p]->size();
    TESSERA_CHECK(n > 0, "ConcatDataset: dataset {} is endless; nothing can follow it", p);
    ends_.push_back((ends_.empty() ? 0 : ends_.back()) + n);
    const Batch rows = parts_[p]->allocate(1);
    TESSERA_CHECK(!rows.items,
                  "ConcatDataset: dataset {} is collated; concatenate what its samples come from",
                  p);
    bool same = rows.extra.size() == first.extra.size();
    for (size_t i = 0; same && i < rows.extra.size(); ++i)
      same = rows.extra[i].name == first.extra[i].name;
    TESSERA_CHECK(same, "ConcatDataset: dataset {} has other tensors than the first", p);
    for_each_pair(first, rows, [&](const std::string& name, const Tensor& a, const Tensor& b) {
      const bool both = a.defined() && b.defined();
      TESSERA_CHECK(
          both ? a.shape() == b.shape() && a.dtype() == b.dtype() && a.strides() == b.strides()
               : a.defined() == b.defined(),
          "ConcatDataset: {} of a sample of dataset {} is {}, of the first {}", name, p,
          describe(b), describe(a));
    });
  }
}

void ConcatDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  const size_t p = size_t(std::ranges::upper_bound(ends_, sample.index) - ends_.begin());
  parts_[p]->read({sample.number, sample.index - (p == 0 ? 0 : ends_[p - 1])}, row, to);
}

// ---- Collating

Batch stack_items(std::span<const Item> items) {
  TESSERA_CHECK(!items.empty(), "stack_items: no samples; there is nothing to tell shapes from");
  Batch out;
  for (size_t k = 0; k < items[0].size(); ++k) {
    const NamedTensor& first = items[0][k];
    std::vector<Tensor> rows;
    for (size_t i = 0; i < items.size(); ++i) {
      const bool named = items[i].size() == items[0].size() && items[i][k].name == first.name;
      TESSERA_CHECK(named, "stack_items: sample {} of the batch has other tensors than the first",
                    i);
      const Tensor& t = items[i][k].tensor;
      TESSERA_CHECK(t.shape() == first.tensor.shape() && t.dtype() == first.tensor.dtype(),
                    "stack_items: {} of sample {} of the batch is {}, of the first {}; pad them in "
                    "a collate function of your own",
                    first.name, i, describe(t), describe(first.tensor));
      rows.push_back(t);
    }
    Tensor all = stack(rows, 0);
    if (first.name == "inputs")
      out.inputs = all;
    else if (first.name == "targets")
      out.targets = all;
    else
      out.extra.push_back({first.name, all});
  }
  return out;
}

CollatedDataset::CollatedDataset(int64_t size, std::function<Item(const Sample&)> item,
                                 Collate collate)
    : size_(size), item_(std::move(item)), collate_(std::move(collate)) {
  TESSERA_CHECK(size_ >= 0 && item_ && collate_,
                "CollatedDataset: size {} (0: endless), and functions that make a sample and a "
                "batch are needed",
                size_);
}

Batch CollatedDataset::allocate(int64_t rows) const { return places_for_items(rows); }

void CollatedDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  (*to.items)[size_t(row)] = item_(sample);
}

Batch CollatedDataset::finish(Batch read) const { return collated(read, collate_); }

Batch ItemDataset::allocate(int64_t rows) const { return places_for_items(rows); }

void ItemDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  Example example = get(sample.index);
  TESSERA_CHECK(example.inputs.defined(), "ItemDataset: example {} has no inputs", sample.index);
  Item item{{"inputs", std::move(example.inputs)}};
  if (example.targets.defined()) item.push_back({"targets", std::move(example.targets)});
  for (NamedTensor& t : example.extra) item.push_back(std::move(t));
  (*to.items)[size_t(row)] = std::move(item);
}

Batch ItemDataset::finish(Batch read) const { return collated(read, collate_); }

}  // namespace tessera::data
