#include "launcher/cards.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace tessera::launcher {
namespace {

enum Answer { kAsked, kNoDriver, kOldDriver, kNotStarted };

/// What the driver answers: the PCI address of each card, "0000:1B:00.0" with '\n' after it.
Answer ask_driver(int out) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return kNoDriver;
  auto* init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  auto* count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  auto* address = reinterpret_cast<int (*)(char*, int, int)>(dlsym(library, "cuDeviceGetPCIBusId"));
  if (!init || !count || !address) return kOldDriver;
  int cards = 0;
  if (init(0) != 0 || count(&cards) != 0) return kNotStarted;
  for (int card = 0; card < cards; ++card) {
    char line[64] = "";  // empty where the driver does not say
    if (address(line, sizeof line - 1, card) != 0) *line = '\0';
    std::strcat(line, "\n");
    if (::write(out, line, std::strlen(line)) < 0) return kNotStarted;
  }
  return kAsked;
}

/// Everything that is written to `fd` until its writers have closed it.
std::string read_all(int fd) {
  std::string text;
  char part[1024];
  for (ssize_t n; (n = ::read(fd, part, sizeof part)) > 0;) text.append(part, size_t(n));
  return text;
}

int node_of(std::string address) {
  for (char& c : address) c = char(std::tolower(static_cast<unsigned char>(c)));
  const char* root = std::getenv("HWLOC_FSROOT");  // hwloc reads the machine below this folder too
  std::ifstream file(fmt::format("{}/sys/bus/pci/devices/{}/numa_node", root ? root : "", address));
  int node = -1;
  return file >> node ? node : -1;
}

}  // namespace

// A child asks, since a process that has started the driver should not fork.
std::vector<int> nodes_of_cards(std::string& why) {
  int ends[2];
  Answer answer = kNotStarted;
  std::string addresses;
  if (::pipe(ends) == 0) {
    const pid_t child = fork();
    if (child == 0) _exit(ask_driver(ends[1]));
    ::close(ends[1]);
    if (child > 0) addresses = read_all(ends[0]);
    ::close(ends[0]);
    int status = 0;
    if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status))
      answer = Answer(WEXITSTATUS(status));
  }
  std::vector<int> nodes;
  if (answer == kAsked)
    for (size_t begin = 0, end; (end = addresses.find('\n', begin)) != std::string::npos;
         begin = end + 1)
      nodes.push_back(node_of(addresses.substr(begin, end - begin)));
  if (nodes.empty())
    why = answer == kNoDriver    ? "there is no libcuda.so.1; install the card's driver"
          : answer == kOldDriver ? "the driver's libcuda.so.1 is too old; install a newer one"
                                 : "the driver sees no card; see nvidia-smi and "
                                   "CUDA_VISIBLE_DEVICES";
  return nodes;
}

}  // namespace tessera::launcher
