// Helper threads of collectives. They block all signals, so that a program's handlers only run on
// its own threads.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>

namespace tessera::detail {

template <class F>
std::thread start_thread(const char* name, F body) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace tessera::detail
