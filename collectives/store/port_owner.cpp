#include "collectives/store/port_owner.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace tessera::detail {
namespace {

namespace fs = std::filesystem;

// Lines of /proc/net/tcp: "sl local:port remote:port state tx:rx tr:when retr uid timeout inode".
void listening_inodes(const char* table, int port, std::vector<std::string>& inodes) {
  std::ifstream file(table);
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state, skip, inode;
    fields >> slot >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
    size_t colon = local.rfind(':');
    unsigned found = 0;
    if (state != "0A" || colon == std::string::npos) continue;
    if (std::sscanf(local.c_str() + colon + 1, "%x", &found) == 1 && int(found) == port)
      inodes.push_back("socket:[" + inode + "]");
  }
}

bool holds(const fs::path& process, const std::vector<std::string>& sockets) {
  std::error_code error;
  for (const auto& fd : fs::directory_iterator(process / "fd", error)) {
    std::string target = fs::read_symlink(fd.path(), error).string();
    if (std::find(sockets.begin(), sockets.end(), target) != sockets.end()) return true;
  }
  return false;
}

}  // namespace

std::string port_owner(int port) {
  std::vector<std::string> sockets;
  listening_inodes("/proc/net/tcp", port, sockets);
  listening_inodes("/proc/net/tcp6", port, sockets);
  if (sockets.empty()) return "";
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    std::string pid = entry.path().filename().string();
    if (!std::isdigit(static_cast<unsigned char>(pid[0])) || !holds(entry.path(), sockets))
      continue;
    std::string name;
    std::ifstream comm(entry.path() / "comm");
    std::getline(comm, name);
    return "pid " + pid + " (" + name + ")";
  }
  return "";
}

}  // namespace tessera::detail
