// make_packs FOLDER ARCHITECTURE...: compiles every kernel text of the CUDA backend by NVRTC and
// writes FOLDER/sm_90.pack and so on. Exit status 1: NVRTC is not there, or a text does not
// compile.
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "core/backend/cuda/cubins.h"
#include "core/backend/cuda/kernels/families.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"

namespace {

void make_packs(const std::filesystem::path& folder, std::span<char*> architectures) {
  using namespace tessera;
  TESSERA_CHECK(cuda::emulation().empty(), "{} is the virtual GPU's; unset LD_LIBRARY_PATH",
                cuda::nvrtc().path);
  std::vector<cuda::NamedText> texts;
  for (const cuda::KernelText& text : cuda::all_kernel_texts())
    texts.push_back({cuda::name_of(text), cuda::compose(text)});
  std::filesystem::create_directories(folder);
  for (const char* architecture : architectures) {
    const auto begin = std::chrono::steady_clock::now();
    const std::string path = folder / (std::string(architecture) + ".pack");
    const size_t compiled = cuda::make_pack(path, architecture, texts);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%s: %zu texts, %zu of them compiled, in %.1f s, %.1f MB, by NVRTC %d.%d\n",
                path.c_str(), texts.size(), compiled, took.count(),
                double(std::filesystem::file_size(path)) / 1e6, cuda::nvrtc().major,
                cuda::nvrtc().minor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: make_packs FOLDER ARCHITECTURE...\n");
    return 2;
  }
  try {
    make_packs(argv[1], std::span(argv + 2, size_t(argc - 2)));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "make_packs: %s\n", e.what());
    return 1;
  }
}
