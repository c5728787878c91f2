// Datasets made of tensors, of other datasets, and of samples that differ in shape.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/data/dataset.h"

namespace tessera::data {

/// Sample i is row i of each tensor, whose memory is shared. Throws UserError unless all are on the
/// CPU and have the same number of rows, at least one.
class TensorDataset final : public Dataset {
 public:
  TensorDataset(Tensor inputs, Tensor targets, std::vector<NamedTensor> extra = {});
  int64_t size() const override { return rows_.inputs.size(0); }
  Batch allocate(int64_t rows) const override;
  void read(const Sample& sample, int64_t row, const Batch& to) const override;

 private:
  Batch rows_;
};

/// The items of another dataset that `items` lists, in that order; an item may be listed several
/// times. Throws UserError for an item that `dataset` does not have, and for an empty list.
class Subset final : public Dataset {
 public:
  Subset(std::shared_ptr<const Dataset> dataset, std::vector<int64_t> items);
  int64_t size() const override { return int64_t(items_.size()); }
  const std::vector<int64_t>& items() const { return items_; }
  Batch allocate(int64_t rows) const override { return dataset_->allocate(rows); }
  void read(const Sample& sample, int64_t row, const Batch& to) const override;
  Batch finish(Batch read) const override { return dataset_->finish(std::move(read)); }

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::vector<int64_t> items_;
};

/// Puts every item of `dataset` into one of the parts, drawn by `seed`: the same on every rank.
/// `sizes` are numbers of items, or fractions with the sum 1; items that rounding leaves over go to
/// the parts in turn. Throws UserError for sizes that do not add up, and for a part without items.
std::vector<std::shared_ptr<const Subset>> random_split(std::shared_ptr<const Dataset> dataset,
                                                        const std::vector<double>& sizes,
                                                        uint64_t seed);

/// The items of the first dataset, then those of the second, and so on, in batches that the first
/// allocates and finishes. Throws UserError unless all have rows of the same names, shapes and
/// dtypes, for one that is endless, and for samples that are collated (concatenate their sources).
class ConcatDataset final : public Dataset {
 public:
  explicit ConcatDataset(std::vector<std::shared_ptr<const Dataset>> parts);
  int64_t size() const override { return ends_.back(); }
  Batch allocate(int64_t rows) const override { return parts_[0]->allocate(rows); }
  void read(const Sample& sample, int64_t row, const Batch& to) const override;
  Batch finish(Batch read) const override { return parts_[0]->finish(std::move(read)); }

 private:
  std::vector<std::shared_ptr<const Dataset>> parts_;
  std::vector<int64_t> ends_;  // of each part, in items of the whole
};

/// Makes a batch of at least one sample; samples may differ in shape. Every tensor of the batch
/// must have one row for each sample.
using Collate = std::function<Batch(std::span<const Item>)>;
/// Stacks tensors of equal names, shapes and dtypes; "inputs" and "targets" go to where a batch has
/// them, the others are extra. Throws UserError naming what differs between which samples, and
/// where there is no sample.
Batch stack_items(std::span<const Item> items);

/// `item` makes a sample, in a thread of the loader; `collate` makes the batch, in the thread that
/// asks for it. A batch without samples, with which a short pass may end on some ranks, has no
/// tensors: rows() is 0.
class CollatedDataset final : public Dataset {
 public:
  CollatedDataset(int64_t size, std::function<Item(const Sample&)> item,
                  Collate collate = stack_items);
  int64_t size() const override { return size_; }
  Batch allocate(int64_t rows) const override;
  void read(const Sample& sample, int64_t row, const Batch& to) const override;
  Batch finish(Batch read) const override;

 private:
  int64_t size_;
  std::function<Item(const Sample&)> item_;
  Collate collate_;
};

/// A sample, as ItemDataset::get returns it.
struct Example {
  Tensor inputs, targets = {};
  std::vector<NamedTensor> extra = {};
};
/// The base of a dataset that defines size() and get(i), as in `return {x, y};`. Threads of the
/// loader call get(), several at a time. Examples of equal shapes are stacked; another `collate`
/// may pad those of different shapes.
class ItemDataset : public Dataset {
 public:
  virtual Example get(int64_t index) const = 0;
  Batch allocate(int64_t rows) const final;
  void read(const Sample& sample, int64_t row, const Batch& to) const final;
  Batch finish(Batch read) const final;

 protected:
  explicit ItemDataset(Collate collate = stack_items) : collate_(std::move(collate)) {}

 private:
  Collate collate_;
};

}  // namespace tessera::data
