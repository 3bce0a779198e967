// Streams as queues of closures over raw addresses. What is launched runs later: as late as possible, at random, or at
// once. So the host runs ahead as it does of a GPU, memory that is freed too early is written by somebody else first,
// and a wait for an event that was not recorded orders nothing.
#pragma once

#include "common.hpp"

#include <chrono>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

namespace fake {

// The queue's length: launching blocks when so many are under way, as on a GPU. Without it a loop that never waits
// would keep every batch's closures.
constexpr size_t MOST_LAUNCHES = 1024;

enum class Order { lazy, random, eager };
inline const Order order = [] {
  std::string_view wanted = getenv("FAKE_CUDA") ? getenv("FAKE_CUDA") : "lazy";
  return wanted == "eager" ? Order::eager : wanted == "random" ? Order::random : Order::lazy;
}();
inline std::mt19937 dice(setting("FAKE_CUDA_SEED", 0));

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Queue;
// A place in a stream's order. An event that is recorded again gets a new one, so that whoever waits already still
// waits for what the event stood for then, as CUDA defines it.
struct Mark {
  Queue* queue = nullptr;
  uint64_t position = 0;
  double time = 0;
  bool over() const;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Launch {
  std::function<void()> work;
  MarkPtr wait, stamp;
};
struct Queue {
  std::deque<Launch> launches;
  uint64_t issued = 0, done = 0;
  bool running = false;
  bool no_pageable = false;  // a copy that blocks the host is an error here
};
inline Queue queues[MOST_DEVICES][STREAMS];
inline Queue& current_queue() { return queues[current_device][current_stream()]; }
inline bool Mark::over() const { return queue->done >= position; }

// How deep this thread is in work that was launched earlier: memory is by then as the host has left it meanwhile.
inline thread_local int late = 0;

inline void run(Queue& queue, uint64_t upto) {
  while (queue.done < upto) {
    TORCH_CHECK(!queue.running, "fake: streams wait for each other");
    Launch launch = std::move(queue.launches.front());
    queue.launches.pop_front();
    queue.running = true;
    if (launch.wait) run(*launch.wait->queue, launch.wait->position);
    ++late;
    try {
      if (launch.work) launch.work();
    } catch (const std::exception& error) {  // as on a GPU nobody is there to be told; the tests look at the counter
      count("kernels that failed late");
      fprintf(stderr, "[fake CUDA] a kernel failed: %.600s\n", error.what());
    }
    --late;
    if (launch.stamp) launch.stamp->time = now();
    queue.running = false;
    ++queue.done;
  }
}
inline void synchronize(Queue& queue) {
  Lock lock(driver);
  run(queue, queue.issued);
}
inline void synchronize(const Mark& mark) {
  Lock lock(driver);
  run(*mark.queue, mark.position);
}
inline void synchronize_device(int device) {
  Lock lock(driver);
  for (auto& queue : queues[device]) run(queue, queue.issued);
}

inline void progress() {  // in random order the device does some work whenever it is talked to
  if (order != Order::random) return;
  // Mostly one of the first streams: those are in use.
  auto& queue = queues[current_device][dice() % 8 < 6 ? dice() % 4 : dice() % STREAMS];
  if (queue.done < queue.issued && !queue.running) run(queue, queue.done + 1 + dice() % (queue.issued - queue.done));
}

inline void launch(Queue& queue, Launch what) {
  TORCH_CHECK(!forked, "CUDA error: initialization error (fake: in a forked process)");
  Lock lock(driver);
  queue.launches.push_back(std::move(what));
  ++queue.issued;
  if (order == Order::eager) run(queue, queue.issued);
  else if (queue.launches.size() > MOST_LAUNCHES && !queue.running) run(queue, queue.done + 1);
  else progress();
}
inline void launch(std::function<void()> work) { launch(current_queue(), {std::move(work), {}, {}}); }

inline MarkPtr record(Queue& queue) {
  Lock lock(driver);
  auto mark = std::make_shared<Mark>();
  mark->queue = &queue, mark->position = queue.issued + 1;
  launch(queue, {{}, {}, mark});
  return mark;
}
inline void wait(Queue& queue, MarkPtr mark) { launch(queue, {{}, std::move(mark), {}}); }

inline bool query(const Mark& mark) {
  Lock lock(driver);
  // Whoever polls gets there in the end, though not at once.
  if (!mark.over() && !mark.queue->running && dice() % 4 == 0) run(*mark.queue, mark.queue->done + 1);
  return mark.over();
}

// Behind everything that any stream of the device has been given so far.
inline std::vector<MarkPtr> record_all(int device) {
  Lock lock(driver);
  std::vector<MarkPtr> marks;
  for (auto& queue : queues[device])
    if (queue.done < queue.issued) marks.push_back(record(queue));
  return marks;
}
inline bool over(const std::vector<MarkPtr>& marks) {
  for (auto& mark : marks)
    if (!mark->over()) return false;
  return true;
}

}  // namespace fake
