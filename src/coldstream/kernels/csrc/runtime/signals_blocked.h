// Signals belong to the threads of the application; only faults must reach the thread that causes them.
// Threads started while one of these lives never see others.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace coldstream {

class signals_blocked {
 public:
  signals_blocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  signals_blocked(const signals_blocked&) = delete;
  signals_blocked& operator=(const signals_blocked&) = delete;
  ~signals_blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace coldstream
