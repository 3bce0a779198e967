// Device memory, torch's caching allocator over it, and page-locked host memory.
//
// The memory of a device is one sparse file that is mapped twice. Tensors carry addresses of the first mapping, which
// nobody may access: host code that touches device memory ends in SIGSEGV. Kernels use the second one. No protection is
// switched on the way, so it works whichever threads run kernels.
#pragma once

#include "streams.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>

namespace fake {

// -- page-locked host memory -----------------------------------------------------------------------------------------

struct Registered {
  std::map<uintptr_t, size_t> ranges;
  size_t bytes = 0, limit = setting("FAKE_CUDA_PIN_BYTES", ~size_t(0));

  bool holds(const void* p, size_t n = 1) const {
    Lock lock(driver);
    auto after = ranges.upper_bound((uintptr_t)p);
    if (after == ranges.begin()) return false;
    --after;
    return (uintptr_t)p + n <= after->first + after->second;
  }
};
inline Registered registered;

// -- a device's memory -----------------------------------------------------------------------------------------------

constexpr size_t POOL = 16 * GiB, REGION = 2 * STREAMS * POOL;  // of addresses: for each stream small and large blocks
constexpr size_t SMALL = MiB, SMALL_UNIT = 2 * MiB, LARGE_UNIT = 20 * MiB, LEAST = 512;  // torch's figures

using Ranges = std::map<size_t, size_t>;  // offset -> bytes
inline void add(Ranges& ranges, size_t at, size_t bytes) {  // merged with its neighbours
  auto [it, _] = ranges.emplace(at, bytes);
  if (auto next = std::next(it); next != ranges.end() && at + bytes == next->first) {
    it->second += next->second;
    ranges.erase(next);
  }
  if (it == ranges.begin()) return;
  if (auto before = std::prev(it); before->first + before->second == it->first) {
    before->second += it->second;
    ranges.erase(it);
  }
}
inline size_t take_from(Ranges& ranges, Ranges::iterator range, size_t bytes) {  // its beginning
  auto [at, has] = *range;
  ranges.erase(range);
  if (has > bytes) ranges.emplace(at + bytes, has - bytes);
  return at;
}

// What torch's allocator holds for one stream and size of blocks: an expandable segment. Memory is mapped unit by unit,
// and unmapped where a whole unit is not used.
struct Pool {
  size_t begin, unit;
  Ranges idle, unmapped;

  Pool(size_t begin, size_t unit) : begin(begin), unit(unit), unmapped{{begin, POOL}} {}

  // Returns where there are `bytes`, or -1.
  ssize_t take(size_t bytes) {
    auto best = idle.end();
    for (auto it = idle.begin(); it != idle.end(); ++it)
      if (it->second >= bytes && (best == idle.end() || it->second < best->second)) best = it;
    return best == idle.end() ? -1 : (ssize_t)take_from(idle, best, bytes);
  }
  // Returns where memory is to be mapped, and how much, so that there are `bytes` in a row.
  std::pair<size_t, size_t> missing(size_t bytes) const {
    for (auto [at, has] : unmapped) {
      size_t before = 0, behind = 0;
      if (auto after = idle.upper_bound(at); after != idle.begin())
        if (auto last = std::prev(after); last->first + last->second == at) before = last->second;
      if (auto next = idle.find(at + has); next != idle.end()) behind = next->second;
      if (before + has + behind < bytes) continue;
      return {at, std::min(has, (bytes - before + unit - 1) / unit * unit)};
    }
    TORCH_CHECK(false, "fake: the addresses of a pool are used up");
  }
  void map(size_t at, size_t bytes) {
    auto range = unmapped.find(at);
    take_from(unmapped, range, bytes);
    add(idle, at, bytes);
  }
  // Unmaps what is unused; returns how much that was. `forget` gives the pages back.
  template <class Forget>
  size_t trim(Forget forget) {
    size_t gone = 0;
    for (auto [at, has] : Ranges(idle)) {
      size_t first = (at - begin + unit - 1) / unit * unit + begin, last = (at + has - begin) / unit * unit + begin;
      if (first >= last) continue;
      idle.erase(at);
      if (first > at) idle.emplace(at, first - at);
      if (at + has > last) idle.emplace(last, at + has - last);
      add(unmapped, first, last - first);
      forget(first, last - first);
      gone += last - first;
    }
    return gone;
  }
};

struct Block {
  size_t bytes;
  Pool* pool;
  std::set<Queue*> users;  // streams that it was recorded on, beside the one it belongs to
};

inline bool refuses_memory = false;  // as a driver does that cannot map it page by page

struct Gpu {
  char *addresses = nullptr, *memory = nullptr;  // of tensors; of kernels
  size_t total = setting("FAKE_CUDA_BYTES", 8 * GiB), cap = total, context = setting("FAKE_CUDA_CONTEXT", 200 * MiB);
  size_t others = 0;  // what other processes occupy
  size_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, retries = 0, frees = 0, failures = 0;
  std::vector<Pool> pools;
  std::map<size_t, Block> blocks;
  std::vector<std::pair<size_t, std::vector<MarkPtr>>> freed;  // not to be used before the streams are there

  void open() {
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, REGION) == 0, "fake: no memory for a device");
    addresses = (char*)mmap(nullptr, REGION, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    memory = (char*)mmap(nullptr, REGION, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(addresses != MAP_FAILED && memory != MAP_FAILED, "fake: no addresses for a device");
    madvise(memory, REGION, MADV_DONTFORK);
    close(file);
    for (int i = 0; i < 2 * STREAMS; ++i) pools.emplace_back(i * POOL, i % 2 ? LARGE_UNIT : SMALL_UNIT);
  }
  bool has(const void* p) const { return p >= addresses && p < addresses + REGION; }
  bool has_physical(const void* p) const { return p >= memory && p < memory + REGION; }
  // With the page tables that it needs to reach host memory, and what others have.
  size_t beside() const { return context + registered.bytes / 512; }
  size_t available() const {
    size_t taken = beside() + others + reserved;
    return total > taken ? total - taken : 0;
  }

  void trim() {
    synchronize_device((int)(this - first()));
    reuse();
    for (auto& pool : pools) {
      size_t gone = pool.trim([&](size_t at, size_t bytes) { madvise(memory + at, bytes, MADV_REMOVE); });
      reserved -= gone, frees += gone > 0;
    }
  }
  void* take(size_t wanted) {
    Lock lock(driver);
    if (wanted == 0) return nullptr;
    TORCH_CHECK(!refuses_memory, "CUDA driver error: operation not supported");
    reuse();
    size_t bytes = (wanted + LEAST - 1) / LEAST * LEAST;
    Pool& pool = pools[2 * current_streams[this - first()] + (bytes > SMALL)];
    for (bool again = false;; again = true) {
      ssize_t at = pool.take(bytes);
      if (at < 0) {
        auto [where, more] = pool.missing(bytes);
        if (reserved + more <= cap && more <= available()) {
          pool.map(where, more);
          reserved += more, peak_reserved = std::max(peak_reserved, reserved);
          at = pool.take(bytes);
        }
      }
      if (at >= 0) {
        blocks.emplace(at, Block{bytes, &pool, {}});
        allocated += bytes, peak_allocated = std::max(peak_allocated, allocated);
        return addresses + at;
      }
      if (again) break;
      ++retries;
      trim();
    }
    ++failures;
    C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory (fake). Tried to allocate ", bytes, " bytes; ",
                                               allocated, " allocated, ", reserved, " reserved, at most ", cap));
  }
  void use(const void* p, Queue& queue) {  // record_stream
    Lock lock(driver);
    auto block = blocks.upper_bound((char*)p - addresses);
    if (block == blocks.begin()) return;
    --block;
    if ((size_t)((char*)p - addresses) < block->first + block->second.bytes) block->second.users.insert(&queue);
  }
  // Used again by the stream it belongs to without waiting, since that is in order; that is all that protects whoever
  // reads it on another one.
  void drop(void* p) {
    Lock lock(driver);
    auto block = blocks.find((char*)p - addresses);
    if (block == blocks.end()) return;
    allocated -= block->second.bytes;
    std::vector<MarkPtr> marks;
    for (Queue* user : block->second.users) marks.push_back(record(*user));
    if (!marks.empty()) {
      freed.emplace_back(block->first, std::move(marks));
      return;
    }
    give(block);
  }

  Gpu* first() const;

 private:
  void give(std::map<size_t, Block>::iterator block) {
    add(block->second.pool->idle, block->first, block->second.bytes);
    blocks.erase(block);
  }
  void reuse() {
    std::erase_if(freed, [&](auto& one) {
      if (!over(one.second)) return false;
      give(blocks.find(one.first));
      return true;
    });
  }
};
inline Gpu gpus[MOST_DEVICES];
inline Gpu* Gpu::first() const { return gpus; }

inline int device_of(const void* p) {  // -1: host memory
  for (int i = 0; i < devices; ++i)
    if (gpus[i].has(p)) return i;
  return -1;
}

// Where a kernel finds what has this address on the device.
inline void* physical(const void* p, size_t bytes) {
  if (p == nullptr || bytes == 0) return nullptr;
  if (int device = device_of(p); device >= 0) return gpus[device].memory + ((char*)p - gpus[device].addresses);
  TORCH_CHECK(registered.holds(p, bytes), "CUDA error: an illegal memory access was encountered (fake: ", p,
              " is neither device memory nor page-locked)");
  return (void*)p;
}

struct DeviceAllocator final : c10::Allocator {
  static void drop(void* p) {
    if (int device = device_of(p); device >= 0 && !forked) gpus[device].drop(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = gpus[current_device].take(bytes);
    return {p, p, &drop, c10::Device(c10::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fake: copy_data"); }
};
inline DeviceAllocator device_allocator;

// -- what kernels allocate -------------------------------------------------------------------------------------------

// Kernels of the CPU stand in for those of the device. What they allocate while they run at the time of their launch is
// device memory, too; those that run late would find the pools as the host has left them meanwhile.
inline thread_local int in_kernel = 0;

struct HostAllocator final : c10::Allocator {
  c10::Allocator* plain = c10::GetCPUAllocator();
  c10::DataPtr allocate(size_t bytes) override {
    if (!in_kernel || late || bytes == 0) return plain->allocate(bytes);
    auto& gpu = gpus[current_device];
    void* p = gpu.memory + ((char*)gpu.take(bytes) - gpu.addresses);
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  static void drop(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline HostAllocator host_allocator;
inline void HostAllocator::drop(void* p) {
  for (int i = 0; i < devices; ++i)
    if (gpus[i].has_physical(p)) return DeviceAllocator::drop((char*)p - gpus[i].memory + gpus[i].addresses);
  host_allocator.plain->raw_deleter()(p);
}

// -- the calls of the CUDA runtime for host memory, and torch's cache of it ------------------------------------------

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;

inline int host_register(void* p, size_t bytes) {
  Lock lock(driver);
  count("cudaHostRegister");
  if (bytes == 0) return INVALID_VALUE;
  auto after = registered.ranges.lower_bound((uintptr_t)p + bytes);  // the last that begins before the end
  if (after != registered.ranges.begin() && std::prev(after)->first + std::prev(after)->second > (uintptr_t)p)
    return ALREADY_REGISTERED;
  if (registered.bytes + bytes > registered.limit) return OUT_OF_MEMORY;
  registered.ranges[(uintptr_t)p] = bytes, registered.bytes += bytes;
  return 0;
}
inline int host_unregister(void* p) {
  Lock lock(driver);
  count("cudaHostUnregister");
  auto range = registered.ranges.find((uintptr_t)p);
  if (range == registered.ranges.end()) return NOT_REGISTERED;
  for (int i = 0; i < devices; ++i) synchronize_device(i);  // as the driver does
  registered.bytes -= range->second, registered.ranges.erase(range);
  return 0;
}

// What was freed is handed out again when all streams are through with what they had been given by then: at least as
// late as torch does, which records what each copy uses.
struct PinnedAllocator final : c10::Allocator {
  struct Cached {
    void* p;
    size_t bytes;
    std::vector<MarkPtr> marks;
  };
  static inline std::map<void*, size_t> sizes;
  static inline std::vector<Cached> cached;

  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(driver);
    size_t bytes = std::max<size_t>(4 * KiB, std::bit_ceil(wanted));  // torch rounds as well
    for (auto it = cached.begin(); it != cached.end(); ++it) {
      if (it->bytes != bytes || !over(it->marks)) continue;
      void* p = it->p;
      cached.erase(it);
      return data(p);
    }
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host_register(p, bytes) != 0) {
      munmap(p, bytes);
      TORCH_CHECK(false, "CUDA error: out of memory (fake: page-locked memory)");
    }
    sizes[p] = bytes;
    return data(p);
  }
  static c10::DataPtr data(void* p) { return {p, p, &drop, c10::Device(c10::kCPU)}; }
  static void drop(void* p) {
    if (forked) return;
    Lock lock(driver);
    std::vector<MarkPtr> marks;
    for (int i = 0; i < devices; ++i)
      for (auto& mark : record_all(i)) marks.push_back(mark);
    cached.push_back({p, sizes.at(p), std::move(marks)});
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;

}  // namespace fake
