// What all parts of the fake device share: settings from the environment, one lock, counters, and who is current.
#pragma once

#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace fake {

constexpr size_t KiB = 1024, MiB = KiB * KiB, GiB = KiB * MiB;
constexpr int STREAMS = 33;  // of each device: the default stream and a pool of 32, as torch has for each priority
constexpr int MOST_DEVICES = 2;

inline size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

inline const int devices = [] {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible && !*visible ? 0 : std::min<int>(MOST_DEVICES, setting("FAKE_CUDA_DEVICES", 1));
}();

// A driver has locks, too. Whoever waits for this one has given Python's lock back: ctypes and torch's dispatcher do
// so, and nothing that runs under it calls Python.
inline std::recursive_mutex driver;
using Lock = std::lock_guard<std::recursive_mutex>;

// In a child that was forked (a worker of a data loader) there is no device: its memory is not mapped there, and the lock
// may be held by a thread that does not exist. What the child inherited and drops is nobody's.
inline bool forked = false;
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

inline std::map<std::string, int64_t> counters;  // read by name from Python
inline void count(const std::string& what) {
  Lock lock(driver);
  ++counters[what];
}

// Per thread, as in CUDA: the current device, and the current stream of each.
inline thread_local int current_device = 0;
inline thread_local int current_streams[MOST_DEVICES] = {};
inline int current_stream() { return current_streams[current_device]; }

struct On {  // a scope in which `device` is current
  int before = current_device;
  explicit On(int device) { current_device = device; }
  ~On() { current_device = before; }
};

inline int checked(int device) {
  TORCH_CHECK(device < devices, "CUDA error: invalid device ordinal");
  return device < 0 ? current_device : device;
}

}  // namespace fake
