#include "core/backend/cuda/ops/kernels.h"

#include <fmt/format.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/backend/cuda/kernels/families.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

class Library {
 public:
  Library() : texts_(all_kernel_texts()), programs_(texts_.size()) {
    for (size_t t = 0; t < texts_.size(); ++t)
      for (const Instance& i : texts_[t].instances) text_of_.emplace(i.name, t);
  }

  UntypedKernel& find(std::string_view instance, std::string_view entry) {
    const std::string name = fmt::format("{}_{}", instance, entry);
    std::lock_guard lock(mutex_);
    auto& kernel = kernels_[name];
    if (!kernel) kernel = std::make_unique<UntypedKernel>(program_of(instance), name);
    return *kernel;
  }

 private:
  Program& program_of(std::string_view instance) {
    const auto text = text_of_.find(std::string(instance));
    TESSERA_ASSERT(text != text_of_.end(), "cuda: no kernel text has the instance {}", instance);
    auto& program = programs_[text->second];
    if (!program) {
      const KernelText& t = texts_[text->second];
      program = std::make_unique<Program>(name_of(t), compose(t));
    }
    return *program;
  }

  std::mutex mutex_;
  const std::vector<KernelText> texts_;
  std::unordered_map<std::string, size_t> text_of_;  // by instance: index into texts_
  std::vector<std::unique_ptr<Program>> programs_;   // by text
  std::unordered_map<std::string, std::unique_ptr<UntypedKernel>> kernels_;
};

}  // namespace

UntypedKernel& find_kernel(std::string_view instance, std::string_view entry) {
  static Library& library = *new Library;  // kernels may be launched until the program ends
  return library.find(instance, entry);
}

}  // namespace tessera::cuda
